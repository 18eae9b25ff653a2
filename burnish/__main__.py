"""`python -m burnish` is the command `burnish`."""

import sys

from burnish.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
