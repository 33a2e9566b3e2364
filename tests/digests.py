"""Prints digests of what entries write: ``digests.py WHERE OP…``, for another process to compare with its own.

A module of its own, because a process that imports the tests plans the problems that they are collected from.
"""

from __future__ import annotations

import hashlib
import json
import sys
from itertools import islice

from proofs import COUNT, cases, digest_bytes, first_run, places

import triplan as tp


def digests(where: str, op: str) -> dict[str, str]:
    """A hash of what every entry of an op writes that claims to be bit-stable."""
    found = {}
    for entry in (e for e in tp.TABLE.rows(op) if where in places(e)):
        # Another process compiles everything anew on the GPU; two elements stand for all.
        few = {"f32", "bf16"} & set(entry.elements) or entry.elements if where == "gpu" else entry.elements
        # The interpreter computes by numpy: one problem of a kernel stands for all.
        for problem, plan in islice(cases(where, op, entry, COUNT[where]), 1 if where == "interpret" else None):
            if plan.precision_guarantee().bit_stable_on_same_hardware and problem.desc.element in few:  # type: ignore[attr-defined]
                digest = hashlib.sha256(digest_bytes(first_run(plan, problem))).hexdigest()
                found[f"{plan.sku().id} {problem.desc.key}"] = digest
    return found


if __name__ == "__main__":
    print(json.dumps({key: digest for op in sys.argv[2:] for key, digest in digests(sys.argv[1], op).items()}))
