"""Files that outlive a process: the software versions they record, and how they are written atomically."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

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
    """Write ``content`` atomically: a reader sees the old file or the new one, never a part of it.

    An existing file keeps its mode, a symbolic link stays one. What processes that were killed left behind goes.
    """
    target = Path(os.path.realpath(path))
    for orphan in target.parent.glob(".triplan-*.tmp"):
        _remove_orphan(orphan)
    with _temporary(target.parent) as file:
        try:
            json.dump(content, file, indent=1)
            file.flush()
            with suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            os.replace(file.name, target)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(file.name)
            raise


def _temporary(folder: Path) -> TextIO:
    """A new file, locked while its writer lives. (Some file systems have no locks: there, orphans stay.)"""
    while True:
        file = open(folder / f".triplan-{secrets.token_hex(8)}.tmp", "x")  # noqa: SIM115
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.exists(file.name):
            return file  # else another process removed it before it was locked


def _remove_orphan(path: Path) -> None:
    # Any OSError: it is locked, or it is gone, or another user's.
    with suppress(OSError), open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
