"""Which properties the tests show of which entry of the kernel table, from the tests that pytest collects.

A line is an op, a kernel (``*``: the op as a whole), where it runs (cpu, interpret, gpu, or the architecture it is
compiled for) and a property: what the marker ``shows`` of a test names, else the test's own name. Ops and kernels are
those among the parameters of a test; ``-`` stands for tests of no one op. ``--summary`` counts the lines by property.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch

import triplan as tp

PLACES = ("cpu", "interpret", "gpu", "sm80", "sm90a")
Line = tuple[str, str, str, str]


def shown(item: pytest.Item) -> Iterator[Line]:
    """What one test shows."""
    given = getattr(getattr(item, "callspec", None), "params", {}).values()
    # What holds several values names nothing. Printing a tensor reads its memory, which in some tests is none at all.
    params = [str(getattr(v, "op", v)) for v in given if not isinstance(v, (torch.Tensor, tuple, list, dict))]
    ops = [v for v in params if v in tp.descriptor_types()]
    entries = {entry.name for op in tp.TABLE.ops() for entry in tp.TABLE.rows(op)}
    kernels = [v for v in params if v in entries]
    marked = [name for name in ("interpret", "gpu") if item.get_closest_marker(name)]
    where = next((v for v in params if v in PLACES), marked[0] if marked else "cpu")
    name = re.sub(r"^test_|(_interpreted|_on_the_gpu)$", "", getattr(item, "originalname", item.name))
    marker = item.get_closest_marker("shows")
    for prop in marker.args if marker else (name.replace("_", " "),):
        yield (ops or ["-"])[0], (kernels or ["*"])[0], where, prop


class Collector:
    """A plugin of pytest that keeps what is collected."""

    def __init__(self) -> None:
        self.lines: set[Line] = set()

    def pytest_collection_finish(self, session: Any) -> None:
        self.lines = {line for item in session.items for line in shown(item)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--summary", action="store_true")
    asked = parser.parse_args()
    collector = Collector()
    with redirect_stdout(io.StringIO()):
        code = pytest.main(
            ["--collect-only", "-qqq", "--override-ini=addopts=--import-mode=importlib"], plugins=[collector]
        )
    if asked.summary:
        for prop, count in sorted(Counter(line[-1] for line in collector.lines).items()):
            print(f"{count:5d} {prop}")
    else:
        print("\n".join("\t".join(line) for line in sorted(collector.lines)))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
