"""`varuna agent` with other timings: the first argument has them, in JSON, by their names in `Timings`."""

from __future__ import annotations

import json
import sys

from varuna_agent.main import main
from varuna_agent.state import Timings

Timings.__init__.__kwdefaults__.update(json.loads(sys.argv.pop(1)))
sys.exit(main(sys.argv[1:]))
