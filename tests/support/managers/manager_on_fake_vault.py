"""`varuna manager` whose Azure Key Vault is a fake one: the first argument is the file of its authority."""

from __future__ import annotations

import sys
from pathlib import Path

from fake_vault import vault_of
from varuna_manager.jobs import secrets, vault
from varuna_manager.main import main

ca_file = Path(sys.argv.pop(1))
vault.PAUSE_S = 0.2
secrets.SUBMISSION_WAIT_S = 600.0  # however slow this machine is
vault.open_vault = lambda url: vault_of(url, ca_file, timeout_s=600.0)
sys.exit(main(sys.argv[1:]))
