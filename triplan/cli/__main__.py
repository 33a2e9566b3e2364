"""``python -m triplan.cli``."""

from triplan.cli import main

main()
