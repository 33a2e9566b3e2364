"""``__all__`` of packages that re-export their modules' names by star."""

from __future__ import annotations

import sys
from types import ModuleType


def export(*packages: str) -> None:
    """Set ``__all__`` of each package to its public names, without submodules; type checkers follow the stars."""
    for package in packages:
        names = vars(sys.modules[package])
        names["__all__"] = sorted(
            n for n, v in names.items() if not n.startswith("_") and not isinstance(v, ModuleType)
        )
