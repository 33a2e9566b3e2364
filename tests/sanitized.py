"""Runs every Triton entry of the kernel table on small problems: ``python sanitized.py SHARD OF``, under a sanitizer.

Operands are allocations of their own and outputs are not initialised, so that the tools see each byte too many.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from cases import pinned
from samples import ACCUMULATING, COPIES, SAMPLES, known

import triplan as tp
from triplan.testing import args_for


def plans_of_samples(op: str, entry: str, target: tp.Target) -> Iterator[tp.Plan[Any, Any]]:
    """The entry's plans of the op's sample, with two contributions to a sum by index, for each of its elements.

    Where the entry does not take the sample: without ``c0`` and ``pre``, with operands of one shape, or depthwise.
    """
    (row,) = (e for e in tp.TABLE.rows(op) if e.name == entry)
    sample = SAMPLES[op]
    fewer = known(sample, k=8)
    if op in ACCUMULATING:
        fewer = known(sample, src_shape=(2, 32), index_shape=(2,)) or {"out_shape": (2, 32)}
    for element, accumulate in product(sorted(row.elements), (True, False)):
        fields = known(sample, element=element, accumulate=accumulate)
        desc = sample.replace(**fewer, **fields) if fields else type(sample).example(element)
        bare = desc.replace(**known(desc, reads_c0=False, saves_pre=False, y_shape=None, z_shape=None, groups=6))
        if entry == "transposed" and op in ("expression", *COPIES):
            bare = desc.replace(layouts={"x": tp.Layout.strided(unit_axis=0)})
        plan = pinned(desc, entry, target) or pinned(bare, entry, target)
        if plan is not None and (accumulate or op == "index_put"):
            yield plan


def exact_args(desc: tp.Descriptor) -> Any:
    """Args on the GPU without bytes around them."""
    given = args_for(desc, "cuda", 0).args
    written = {o.name for o in desc.operands() if o.role == "output"}

    def own(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [own(name, v) for v in value]
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_like(value) if name in written else value.clone()

    return dataclasses.replace(
        given, **{f.name: own(f.name, getattr(given, f.name)) for f in dataclasses.fields(given)}
    )


def main(shard: int, of: int) -> None:
    entries = [(op, e.name) for op in SAMPLES for e in tp.TABLE.rows(op) if e.backend is tp.BackendKind.TRITON]
    ran = 0
    for op, entry in entries[shard::of]:
        for plan in plans_of_samples(op, entry, tp.Target.current()):
            plan.run(exact_args(plan.descriptor), tp.Workspace.allocate(plan))
            torch.cuda.synchronize()
            ran += 1
    print(f"{ran} plans of {len(entries[shard::of])} entries ran")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
