"""Ctrl-C in the command while torch is imported, for seconds: the process dies of the signal, without a traceback.

Imported first of all. ``triplan.cli.main`` brings Python's handler back, and catches what it raises.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path


def is_command() -> bool:
    """Whether this process is ``triplan``, ``python -m triplan`` or ``python -m triplan.cli``."""
    given = sys.orig_argv[1:]
    module = given[given.index("-m") + 1 :][:1] if "-m" in given else []
    return module in (["triplan"], ["triplan.cli"]) or [Path(name).stem for name in sys.argv[:1]] == ["triplan"]


def handle() -> None:
    """Let ``KeyboardInterrupt`` be raised again."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
