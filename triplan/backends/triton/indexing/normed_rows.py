"""Entry ``normed_rows``: an embedding and its RMSNorm, by programs that hold whole rows of the table."""

from __future__ import annotations

import math
from collections.abc import Mapping

from triplan.backends.runtime.launch import Arg, Float, Int, Launch, Stride, power_of_two_in
from triplan.backends.table import kernel
from triplan.backends.triton.common import bounds
from triplan.backends.triton.common.card import BYTES_PER_US, LAUNCH_US
from triplan.backends.triton.common.fill import fill_launch
from triplan.backends.triton.common.offsets import I32_LIMIT, TL, ceil_power, extent_int, values
from triplan.backends.triton.common.tiles import Tile, fits_grid, tile_of
from triplan.backends.triton.indexing import normed_rows_kernels as kernels
from triplan.backends.triton.indexing.arguments import status
from triplan.descriptors import NormedEmbeddingDescriptor
from triplan.descriptors.fields import NO_BAD_INDEX
from triplan.sku import PrecisionGuarantee, Support, Target

#: Bytes of short rows in a program. Untuned.
TILE_BYTES = 4096
#: Elements and bytes of a row at most: longer ones would spill.
MOST_ELEMENTS, MOST_BYTES = 16384, 65536


def applies(desc: NormedEmbeddingDescriptor, target: Target) -> Support:
    most = min(MOST_ELEMENTS, MOST_BYTES // desc.element.itemsize)
    if desc.embedding_dim > most:
        return Support.no(f"rows of {desc.embedding_dim} elements; takes {most} or fewer")
    for o in desc.operands():
        if o.name != "weight" and not o.layout.packed:
            return Support.no(f"{o.name} is not promised packed")
    return fits_grid(-(-desc.operand("index").numel // _tile(desc).rows))


def guarantee(desc: NormedEmbeddingDescriptor) -> Mapping[str, PrecisionGuarantee]:
    """Rows are copied. Of rstd: the additions of a tile's row, whose errors the root halves, and 12 for all else."""
    compute = desc.element.compute
    roundings = _tile(desc).additions(desc.embedding_dim) / 2 + 12
    if desc.element is compute:
        roundings *= 2  # f64: the float64 oracle's own
    found = {n: bounds.rounded(desc.operand(n).element, compute, roundings, batch=True) for n in ("out", "rstd")}
    return {**bounds.of_outputs(desc, PrecisionGuarantee.exact(desc.element)), **found}


def rank(desc: NormedEmbeddingDescriptor, target: Target) -> float:
    return LAUNCH_US + 3 * desc.operand("rows").nbytes / BYTES_PER_US


def numerics(desc: NormedEmbeddingDescriptor) -> str:
    """The tile, and how many neighbours a thread loads together, decide the order of a sum."""
    o, tile = desc.operand("weight"), _tile(desc)
    promise = f"{o.layout.kind}{min(o.alignment, 16)}x{o.layout.stride_multiple}u{o.layout.unit_axis}"
    others = ",".join(str(min(desc.operand(n).alignment, 16)) for n in ("norm_weight", "rows", "out"))
    return f"normed_embedding.{desc.element}.{tile.text}.{desc.embedding_dim}.{promise}.{others}.v1"


def _tile(desc: NormedEmbeddingDescriptor) -> Tile:
    block, size = ceil_power(desc.embedding_dim), desc.element.itemsize
    return tile_of(max(TILE_BYTES // size // block, 1), block, size)


@kernel(
    op="normed_embedding",
    name="normed_rows",
    elements=("f16", "bf16", "f32", "f64"),
    index_elements=("i32", "i64"),
    guarantee=guarantee,
    supports=applies,
    rank=rank,
    numerics=numerics,
)
def normed_rows(desc: NormedEmbeddingDescriptor, target: Target) -> list[Launch]:
    pointer = status(desc)
    before = [] if pointer is None else [fill_launch(pointer, 1, NO_BAD_INDEX)]
    count, n, tile = desc.operand("index").numel, desc.embedding_dim, _tile(desc)
    if not count:
        return before
    weight = desc.operand("weight")

    def along(axis: int) -> Arg:
        if weight.layout.packed:
            return None if axis else Int(n, True, power_of_two_in(n))
        if axis in weight.layout.zero_axes:
            return Int(0, True, 16)
        unit = axis == weight.layout.unit_axis
        return None if unit else Stride("weight", axis, divisibility=weight.layout.stride_multiple)

    pointers = ("weight", "index", "norm_weight", "rows", "out", "rstd")
    args: dict[str, Arg] = {
        **{name: values(desc.operand(name)) for name in pointers},
        "status": pointer,
        "weight_strides": (along(0), along(1)),
        "extent": extent_int(desc.num_embeddings),
        "count": Int(count, count >= I32_LIMIT),
        "n": Int(n, False, power_of_two_in(n)),
        "inverse_n": Float(1 / n if n else math.inf, desc.element.compute),
        "eps": Float(desc.eps, desc.element.compute),
    }
    constants = {
        "COMPUTE": TL[desc.element.compute],
        "ROWS": tile.rows,
        "BLOCK": tile.block,
        "WRAP": desc.wrap_negative,
        "CLAMP": desc.out_of_bounds == "clamp",
    }
    grid = -(-count // tile.rows)
    return [*before, Launch(kernels.normed_rows_kernel, grid, args, constants, num_warps=tile.warps)]
