"""`python -m polyturn.cli`."""

import sys

from polyturn.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
