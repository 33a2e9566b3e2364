"""The command line: ``triplan ops | schema | explain | compile | demo``. Needs the ``cli`` extra.

Exit codes: 0 done; 1 the request is understood and cannot be met; 2 bad input or usage, or output that cannot be
written; 3 a fault of triplan or its toolchain; as a shell reports them, 130 interrupted and 141 the reader of the
output has gone. Errors go to stderr, one line without a traceback; results go to stdout.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from triplan._interrupts import handle, is_command

BAD_OUTPUT, INTERRUPTED, READER_GONE = 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the ``triplan`` command. Returns the exit code."""
    try:
        if is_command():
            handle()
        if sys.stdout is None:
            raise OSError("closed")
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # for an ASCII terminal
        code = _run(arguments)
        sys.stdout.flush()  # here, where a full disk can still be reported
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return READER_GONE
    except OSError as e:
        _discard_output()
        print(f"triplan: standard output: {e.strerror or e}", file=sys.stderr)
        return BAD_OUTPUT
    return code


def _run(arguments: Sequence[str] | None) -> int:
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as e:
        print(f"triplan: the command line needs {e.name}: pip install 'triplan[cli]'", file=sys.stderr)
        return 1
    from triplan.cli.app import app

    try:
        app(arguments, prog_name="triplan")
    except SystemExit as e:
        if isinstance(e.__context__, BrokenPipeError):  # rich and click exit with 1 then
            raise e.__context__ from None
        return e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    return 0


def _discard_output() -> None:
    """Python flushes the output again when it exits, and would print a traceback."""
    if sys.stdout is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


__all__ = ["main"]
