"""Runs every Triton entry of the kernel table on small problems: ``sanitized.py SHARD OF [check]``, under a sanitizer.

Operands are allocations of their own and outputs are not initialised, so that the tools see each byte too many. With
``check`` results are compared with the reference instead: a tool that changes the order of a kernel's threads shows
what relies on that order.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from itertools import chain, product
from typing import Any

import torch
from cases import pinned
from samples import ACCUMULATING, COPIES, SAMPLES, known

import triplan as tp
from triplan.testing import args_for, check_plan


def plans_of_samples(op: str, entry: str, target: tp.Target) -> Iterator[tp.Plan[Any, Any]]:
    """The entry's plans of the op's sample, with two contributions to a sum by index, for each of its elements.

    Where the entry does not take the sample: without ``c0`` and ``pre``, with operands of one shape, or depthwise; a
    product of one column, of odd extents, or of a long k; a convolution without groups and with channels last.
    """
    (row,) = (e for e in tp.TABLE.rows(op) if e.name == entry)
    sample = SAMPLES[op]
    fewer = known(sample, k=8)
    if op in ACCUMULATING:
        fewer = known(sample, src_shape=(2, 32), index_shape=(2,)) or {"out_shape": (2, 32)}
    for element, accumulate in product(sorted(row.elements), (True, False)):
        fields = known(sample, element=element, accumulate=accumulate)
        desc = sample.replace(**fewer, **fields) if fields else type(sample).example(element).replace(op=op)
        bare = desc.replace(**known(desc, reads_c0=False, saves_pre=False, y_shape=None, z_shape=None, groups=6))
        if entry == "transposed" and (op in COPIES or desc.category is tp.OpCategory.ELEMENTWISE):
            first = next(o.name for o in desc.operands() if not o.is_written)
            bare = bare.replace(layouts={first: tp.Layout.strided(unit_axis=0)})
        elif entry == "gemv":
            bare = desc.replace(n=1)
        elif op.startswith("attention") and entry.endswith("_wide"):
            width = 136 if entry == "wgmma_wide" else 133
            bare = desc.replace(head_dim=width, value_dim=8, heads=64, key_heads=64, keys=2)
        elif op.startswith("attention") and entry.startswith("realigned"):
            bare = desc.replace(head_dim=33)
        elif entry == "realigned":
            bare = desc.replace(n=129, reads_c0=False, saves_pre=False)
        elif entry == "wgmma_cut":
            bare = desc.replace(k=520, **known(desc, saves_pre=False, symmetric=False))
        elif entry == "repacked":
            b = tp.Layout.strided(unit_axis=len(desc.operand("b").shape) - 2)
            bare = desc.replace(layouts={"b": b}, reads_c0=False, saves_pre=False)
        elif entry == "separate_wgmma":
            bare = desc.replace(m=1025, n=1023, k=1023)
        elif entry.endswith(("wgmma", "windowed", "interleaved")) and op.startswith("conv2d"):
            last = tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=8)
            layouts = {o.name: last for o in desc.operands() if len(o.shape) == 4 and entry != "converted_wgmma"}
            sizes = {"in_channels": 8, "out_channels": 16} if op != "conv2d_backward_weight" or not layouts else {}
            bare = desc.replace(groups=1, layouts=layouts, **sizes)
        plan = pinned(desc, entry, target) or pinned(bare, entry, target)
        if plan is not None and (accumulate or op == "index_put"):
            yield plan


def exact_args(desc: tp.Descriptor) -> Any:
    """Args on the GPU in allocations of their own, from their first element to their last, with the same strides."""
    given = args_for(desc, "cuda", 0).args
    written = {o.name for o in desc.operands() if o.role == "output"}

    def own(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [own(name, v) for v in value]
        if not isinstance(value, torch.Tensor):
            return value
        last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        span = last + 1 if value.numel() else 0
        held = value.new_empty(span) if name in written else value.as_strided((span,), (1,)).clone()
        return held.as_strided(value.shape, value.stride())

    return dataclasses.replace(
        given, **{f.name: own(f.name, getattr(given, f.name)) for f in dataclasses.fields(given)}
    )


#: Entries that TMA stores into the workspace of: initcheck does not see what TMA writes, and calls it not initialised.
#: (That they read nothing else shows with ``check``, for which a workspace is full of garbage.)
STORED_BY_TMA = ("converted_wgmma",)
#: (m, n, k) of tiles that are whole and cut, of one step and of two: for kernels whose warps have tasks of their own.
PRODUCTS = ((264, 136, 72), (264, 136, 8), (128, 128, 64))


def plans_of_products(entry: str, target: tp.Target) -> Iterator[tp.Plan[Any, Any]]:
    for (m, n, k), element in product(PRODUCTS, (tp.ElementKind.BF16, tp.ElementKind.F16)):
        plan = pinned(tp.GemmDescriptor(m=m, n=n, k=k, element=element), entry, target)
        if plan is not None:
            yield plan


def plans_of_odd_rows(op: str, entry: str, target: tp.Target) -> Iterator[tp.Plan[Any, Any]]:
    """Of rows of 16 bits that are longer than a tile and no whole vectors: some kernels read around their ends."""
    sample = SAMPLES[op]
    if entry == "looped" and len(getattr(sample, "input_shape", ())) == 2:
        for element in known(sample, element=tp.ElementKind.F16).values():
            plan = pinned(sample.replace(input_shape=(3, 8195), element=element), entry, target)
            if plan is not None:
                yield plan


def main(shard: int, of: int, check: bool) -> None:
    entries = [(op, e.name) for op in SAMPLES for e in tp.TABLE.rows(op) if e.backend is tp.BackendKind.TRITON]
    ran, target = 0, tp.Target.current()
    for op, entry in entries[shard::of]:
        plans = chain(plans_of_samples(op, entry, target), plans_of_odd_rows(op, entry, target))
        for plan in chain(plans, plans_of_products(entry, target) if check and op == "gemm" else ()):
            if check:
                check_plan(plan, seed=ran, runs=2, passes=("unit",))
            else:
                workspace = tp.Workspace.allocate(plan)
                if entry in STORED_BY_TMA:
                    workspace.tensor.zero_()
                plan.run(exact_args(plan.descriptor), workspace)
            torch.cuda.synchronize()
            ran += 1
    print(f"{ran} plans of {len(entries[shard::of])} entries ran")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), "check" in sys.argv)
