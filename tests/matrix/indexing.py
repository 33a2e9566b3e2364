"""Indexing: wide rows, narrow rows, strided ones, every policy, both index elements."""

from __future__ import annotations

from collections.abc import Iterator

from cases.indexing import OPS, STORING, build
from samples import SAMPLES, known

import triplan as tp
from matrix import Build, compiles, planned
from triplan.backends.triton.indexing.geometry import geometry

#: Wide rows, as many as a GPU takes at once.
BIG = {
    "out_shape": (4096, 1024),
    "src_shape": (4096, 1024),
    "index_shape": (4096,),
    "embedding_dim": 1024,
    "padding_idx": 3,
}


def contiguous(desc: tp.Descriptor, axis: int) -> tp.Descriptor:
    """``desc`` with a dense operand that is contiguous along ``axis``, and others along their last: tiles."""
    dense = geometry(desc).dense.name
    axes = {o.name: range(len(o.shape))[axis if o.name == dense else -1] for o in desc.operands() if o.kind == "tensor"}
    return desc.replace(layouts={n: tp.Layout.strided(unit_axis=a, stride_multiple=2) for n, a in axes.items()})


def problems(op: str, entry: str) -> Iterator[tp.Descriptor]:
    base = SAMPLES[op]
    big = known(base, **(BIG if op != "index_put" else {**BIG, "out_shape": (512, 1024)}))
    if op == "index_put":
        base = base.replace(accumulate=entry not in STORING)
    tensors = [o for o in base.operands() if o.kind == "tensor"]
    strided = {o.name: "strided" for o in tensors}
    unaligned = {o.name: tp.Layout(alignment=o.element.itemsize) for o in tensors}
    integers = op == "scatter_prod"
    half = "i32" if integers else "f16" if entry != "atomic_f32" else "bf16"
    indices = {"indices": "strided"} if op == "index_put" else {}
    yield base.replace(**big, element=half)
    yield base.replace(**big, index_element="i32", out_of_bounds="error", wrap_negative=True)
    yield base.replace(element=half, layouts=unaligned, out_of_bounds="clamp")
    yield base.replace(element=half, layouts=strided, index_element="i32")
    yield base.replace(layouts={**strided, **indices}, out_of_bounds="error")
    yield base.replace(element="i64" if integers else "f64")
    if op == "index_put":
        yield base.replace(num_indices=2)
    elif hasattr(base, "accumulate"):
        yield base.replace(**big, accumulate=False)
    if entry.startswith(("elements", "atomic", "fixed", "sorted")):
        yield contiguous(base.replace(element=half), -1)
        yield contiguous(base.replace(**big, element=half), 0)
    if (op, entry) == ("embedding_backward", "sorted_sum"):
        odd = build(op, (1 << 20, 83), 0, 1 << 19, element="f16")
        yield odd  # rows that begin anywhere
        yield odd.replace(layouts={"dout": tp.Layout.strided(unit_axis=0, stride_multiple=8)})  # padded in a copy
        yield build(op, (1 << 16, 83), 0, 1 << 20, element="f16", accumulate=False)  # sparse: for positions
        yield build(op, (1 << 16, 83), 0, 1 << 20, element="f64", accumulate=False, layouts=strided)


@compiles(*OPS)
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    return planned(op, entry, target, problems(op, entry))
