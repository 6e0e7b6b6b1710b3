"""`python -m jaxcode` is the `jaxcode` command."""

import sys

from jaxcode.cli import main

if __name__ == "__main__":
    sys.exit(main())
