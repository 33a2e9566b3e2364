"""Replaces the table between the marks of README.md by standard input: ``triplan ops --summary``, in ``make ops``."""

import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"(?<=<!-- ops: written by make ops -->\n).*?(?=<!-- end of ops -->)", re.DOTALL)

text, found = BLOCK.subn(lambda match: sys.stdin.read(), README.read_text())
if found != 1:
    sys.exit(f"README.md has {found} pairs of marks; exactly one is needed")
README.write_text(text)
