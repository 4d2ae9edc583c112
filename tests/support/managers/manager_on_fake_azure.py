"""`varuna manager` whose Azure is a fake one: the first argument is its URL."""

from __future__ import annotations

import sys

from fake_arm import client_of
from varuna_manager.main import main
from varuna_manager.providers import azure

url = sys.argv.pop(1)
azure.make_azure_client = lambda settings: client_of(url, settings)
sys.exit(main(sys.argv[1:]))
