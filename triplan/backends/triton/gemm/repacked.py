"""Kernel ``repacked``: ``tiles`` or ``split_k`` of f32, on copies of the factors that lie as they are read the fastest.

FMAs read B from shared memory by columns of C: along a column-major B, threads of a warp read the same banks. And wgmma
reads tf32 along k alone, from rows that begin at multiples of 16 bytes. What lies otherwise takes up to four times as
long. Copies in the workspace take as long as streaming the factors twice, which large products outweigh many times.
"""

from __future__ import annotations

from functools import partial

from triplan.backends.runtime.launch import Launch
from triplan.backends.table import kernel
from triplan.backends.triton.gemm import copies, split_k, tiles
from triplan.backends.triton.gemm.copies import MatrixCopy
from triplan.backends.triton.gemm.entries import for_products
from triplan.backends.triton.gemm.guarantees import guarantee
from triplan.backends.triton.gemm.matrices import is_elementwise, layout
from triplan.backends.triton.gemm.tile_shapes import is_turned
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import ArchSku, MathPrecision, Support, Target
from triplan.sku.facts import fact

#: k of a product of tf32 is a multiple of it: of 16 bytes.
DEPTH = 4


@fact
def moved(desc: MatrixProductDescriptor) -> tuple[MatrixCopy, ...]:
    """The factors that are copied: for FMAs to a row-major B, for tf32 to rows of k."""
    a, b = desc.operand("a"), desc.operand("b")
    if desc.multiplicands is MathPrecision.F32:
        return () if is_turned(b) else (MatrixCopy(b, 1),)
    if desc.multiplicands is MathPrecision.TF32:
        return tuple(MatrixCopy(o, unit) for o, unit in ((a, 1), (b, 0)) if is_turned(o) or is_elementwise(o))
    return ()


@fact
def inner(desc: MatrixProductDescriptor) -> MatrixProductDescriptor:
    """The problem on the copies. Where rows of k are no multiple of 16 bytes, both factors are copied, with zeros
    behind each row, and k includes these."""
    k = -(-desc.k // DEPTH) * DEPTH if desc.multiplicands is MathPrecision.TF32 else desc.k
    return copies.of_copies(desc, moved(desc)).replace(k=k)


def _splits(desc: MatrixProductDescriptor, target: Target) -> bool:
    return split_k.rank(inner(desc), target) < tiles.rank(inner(desc), target)


def supports(desc: MatrixProductDescriptor, target: Target) -> Support:
    """Whether a copy of a factor would be read faster."""
    if not moved(desc):
        return Support.no("both factors lie as they are read the fastest, or it makes no difference")
    if desc.multiplicands is MathPrecision.TF32 and target.arch is ArchSku.SM80:
        return Support.no("tensor cores of sm80 read tf32 as it lies")
    if desc.k == 0:
        return Support.no("k is 0: there is nothing to copy")
    both = tiles.supports(inner(desc), target) and split_k.supports(inner(desc), target)
    return copies.counted(moved(desc)) and both


def rank(desc: MatrixProductDescriptor, target: Target) -> float:
    """Estimated microseconds."""
    product = min(tiles.rank(inner(desc), target), split_k.rank(inner(desc), target))
    return product + sum(copy.cost_us for copy in moved(desc))


def workspace(desc: MatrixProductDescriptor, target: Target) -> int:
    """Bytes of the copies, and of partial sums behind them; none for an empty C."""
    if desc.operand("c").numel == 0:
        return 0
    sums = split_k.workspace(inner(desc), target) if _splits(desc, target) else 0
    return copies.workspace_bytes(moved(desc)) + sums


@for_products(
    partial(
        kernel,
        name="repacked",
        version=8,
        elements=("f32",),
        supports=supports,
        rank=rank,
        workspace=workspace,
        guarantee=guarantee,
        layout=layout,
    )
)
def repacked(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    if desc.operand("c").numel == 0:
        return []
    build = split_k.split_k if _splits(desc, target) else tiles.tiles
    return copies.around(moved(desc), build(inner(desc), target))
