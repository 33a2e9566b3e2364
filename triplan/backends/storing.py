"""Files that outlive a process: the software versions they record, and how they are written atomically."""

from __future__ import annotations

import json
import os
import tempfile
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch


@cache
def software() -> MappingProxyType[str, str]:
    """Versions of triplan, triton and torch, by name."""
    try:
        own = version("triplan")
    except PackageNotFoundError:
        own = "source tree"  # run from a checkout that is not installed
    return MappingProxyType({"triplan": own, "triton": version("triton"), "torch": torch.__version__})


def write_json(path: str | os.PathLike[str], content: Any) -> None:
    """Write ``content`` atomically: a reader sees the old file or the new one, never a part of it."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
