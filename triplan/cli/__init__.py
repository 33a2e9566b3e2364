"""The command line: ``triplan ops | explain | compile | demo``. Needs the ``cli`` extra.

Exit codes: 0 done; 1 the request is understood and cannot be met; 2 bad input or usage; 3 a fault of triplan or its
toolchain. Errors go to stderr, results to stdout.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the ``triplan`` command."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as e:
        print(f"triplan: the command line needs {e.name}: pip install 'triplan[cli]'", file=sys.stderr)
        raise SystemExit(1) from None
    from triplan.cli.app import app

    app(prog_name="triplan")


__all__ = ["main"]
