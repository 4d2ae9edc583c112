"""`python -m varuna.launcher`: the command line of `varuna.launching.launcher`."""

import sys

from varuna.launching.launcher import main

if __name__ == "__main__":
    sys.exit(main())
