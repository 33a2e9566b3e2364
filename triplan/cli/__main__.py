"""``python -m triplan.cli``."""

from triplan.cli import main

if __name__ == "__main__":
    main()
