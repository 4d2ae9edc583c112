"""`python -m varuna.run_varuna`: the command line of `varuna.launching.run_varuna`."""

import sys

from varuna.launching.run_varuna import main

if __name__ == "__main__":
    sys.exit(main())
