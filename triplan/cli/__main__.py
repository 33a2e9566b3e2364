"""``python -m triplan.cli``."""

import sys

from triplan.cli import main

if __name__ == "__main__":
    sys.exit(main())
