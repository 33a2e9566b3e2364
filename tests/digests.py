"""Prints digests of what entries write, for another process to compare with its own.

``digests.py WHERE`` reads an op and the name of an entry a line, and answers each with a line of JSON.

A module of its own, because a process that imports the tests plans the problems that they are collected from.
"""

from __future__ import annotations

import hashlib
import json
import sys

from proofs import COUNT, cases, digest_bytes, first_run, places

import triplan as tp


def digests(where: str, op: str, *names: str) -> dict[str, str]:
    """A hash of what every entry of an op, or each of those named, writes that claims to be bit-stable."""
    found = {}
    for entry in (e for e in tp.TABLE.rows(op) if where in places(e) and (not names or e.name in names)):
        every = cases(where, op, entry, COUNT[where])
        stable = [(p, plan) for p, plan in every if plan.precision_guarantee().bit_stable_on_same_hardware]
        if where == "interpret":  # which computes by numpy: one problem of a kernel stands for all
            del stable[1:]
        elif where == "gpu":  # where another process compiles everything anew: two elements stand for all
            stable = [(p, plan) for p, plan in stable if getattr(p.desc, "element", "") in ("f32", "bf16")] or stable
        for problem, plan in stable:
            digest = hashlib.sha256(digest_bytes(first_run(plan, problem))).hexdigest()
            found[f"{plan.sku().id} {problem.desc.key}"] = digest
    return found


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(digests(sys.argv[1], *line.split())), flush=True)
