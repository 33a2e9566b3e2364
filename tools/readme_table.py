"""Puts what standard input holds between README's marks; ``make ops`` pipes ``triplan ops --summary`` into it."""

import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"(?<=<!-- ops: written by make ops -->\n).*?(?=<!-- end of ops -->)", re.DOTALL)

text, found = BLOCK.subn(lambda match: sys.stdin.read(), README.read_text())
if found != 1:
    sys.exit(f"README.md has {found} pairs of marks; one is needed")
README.write_text(text)
