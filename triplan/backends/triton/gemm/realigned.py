"""Kernel ``realigned``: ``wgmma``, ``wgmma_tiles`` or ``wgmma_cut`` on copies of the matrices that TMA cannot map.

A leading dimension that is no multiple of 16 bytes keeps a matrix from TMA, and pointers feed tensor cores at a third
of their speed or less. The copies in the workspace have a leading dimension that is rounded up. They take as long as
streaming the matrices twice, which large products outweigh many times. A copy of C is copied out in the end. A
column-major C is row-major where the product computes its transpose, unless a bias lies along its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from triplan.backends.runtime.launch import Launch
from triplan.backends.table import Build, Configuration
from triplan.backends.triton.gemm import copies, tma, wgmma, wgmma_cut, wgmma_tiles
from triplan.backends.triton.gemm.copies import MatrixCopy
from triplan.backends.triton.gemm.entries import for_products, hopper_kernel
from triplan.backends.triton.gemm.guarantees import guarantee
from triplan.backends.triton.gemm.matrices import layout, unit_axis, vector_elements
from triplan.backends.triton.gemm.products import Product, transposed
from triplan.descriptors import GemmDescriptor
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import Support, Target
from triplan.sku.facts import fact

#: Factor on the estimate of a product of copied factors, of which the costs of ``rings`` know no case: its extents end
#: within tiles, and nothing of it was read before. By least squares of logarithms, with copies that stream as others
#: do, from 41 products in ``bench/results/anywhere-gemm-*`` of which copies of factors take a fifth of the time or
#: more.
PRODUCT_SLOWER = 1.2


@fact
def _turned(desc: MatrixProductDescriptor) -> Product | None:
    """The transposed product of a column-major C; None if it is computed as it is."""
    if not isinstance(desc, GemmDescriptor) or desc.has_bias or desc.saves_pre:
        return None
    written = ("c", "c0") if desc.reads_c0 else ("c",)
    return transposed(desc) if all(unit_axis(desc.operand(name)) == 0 for name in written) else None


def _seen(desc: MatrixProductDescriptor) -> MatrixProductDescriptor:
    """The problem whose C is row-major."""
    product = _turned(desc)
    return product.desc if product else desc


@fact
def _moved(desc: MatrixProductDescriptor) -> tuple[MatrixCopy, ...]:
    """The matrices that are copied, as ``_seen``: those that TMA cannot map, and a C whose rows would be written beyond
    their end.

    A copy is contiguous along the operand's own unit-stride axis, or that of rows; of C always that.
    """
    desc = _seen(desc)
    over = desc.n % vector_elements(desc.out.itemsize) != 0
    found = (desc.operand(x) for x in "abc" if tma.unmappable(desc, x) or (x == "c" and over))
    return tuple(MatrixCopy(o, 0 if unit_axis(o) == 0 and o.name != "c" else 1) for o in found)


@fact
def _inner(desc: MatrixProductDescriptor) -> MatrixProductDescriptor:
    """The problem on the copies."""
    return copies.of_copies(_seen(desc), _moved(desc))


class _Kernel(NamedTuple):
    """A kernel that computes the problem on the copies."""

    us: float
    workspace: int
    build: Build


def _kernel_of(desc: MatrixProductDescriptor, target: Target, cuts: bool = True) -> _Kernel:
    """The cheapest; ``wgmma_tiles`` takes no batches, and ``wgmma_cut`` needs tiles to cut.

    Without ``cuts`` no tile is cut.
    """
    inner = _inner(desc)
    found = [_Kernel(wgmma.rank(inner, target), 0, wgmma.wgmma)]
    if isinstance(inner, GemmDescriptor):
        found.append(_Kernel(wgmma_tiles.rank(inner, target), 0, wgmma_tiles.wgmma_tiles))
    if cuts and wgmma_cut.supports(inner, target, roomy=True):
        found.append(_Kernel(wgmma_cut.rank(inner, target), wgmma_cut.workspace(inner, target), wgmma_cut.wgmma_cut))
    return min(found, key=lambda kernel: kernel.us)


def supports(desc: MatrixProductDescriptor, target: Target) -> Support:
    """Whether TMA cannot map a matrix as it lies, but can map the copies."""
    moved = _moved(desc)
    if not moved and not _turned(desc):
        return Support.no("TMA can map every matrix as it lies")
    roomy = any(copy.operand.name == "c" for copy in moved)
    return copies.counted(moved) and tma.supports(_inner(desc), target, roomy)


def rank(desc: MatrixProductDescriptor, target: Target, cuts: bool = True) -> float:
    """Estimated microseconds."""
    moved, product = _moved(desc), _kernel_of(desc, target, cuts).us
    if any(copy.operand.name != "c" for copy in moved):
        product *= PRODUCT_SLOWER
    return sum(copy.cost_us for copy in moved) + product


def workspace(desc: MatrixProductDescriptor, target: Target, cuts: bool = True) -> int:
    """Bytes of the copies, and of parts of tiles behind them; none for an empty C."""
    if desc.operand("c").numel == 0:
        return 0
    return copies.workspace_bytes(_moved(desc)) + _kernel_of(desc, target, cuts).workspace


def launches(desc: MatrixProductDescriptor, target: Target, cuts: bool = True) -> list[Launch]:
    """The copies, the product on them, and the copy of C; nothing for an empty C."""
    if desc.operand("c").numel == 0:
        return []
    product = _turned(desc)
    found = copies.around(_moved(desc), _kernel_of(desc, target, cuts).build(_inner(desc), target))
    return [product.on_operands(x) for x in found] if product else found


def configurations(desc: MatrixProductDescriptor, target: Target) -> Mapping[str, Configuration]:
    """If tiles are cut, also with whole ones, so that nothing but the copies needs workspace."""
    if workspace(desc, target) == workspace(desc, target, cuts=False):
        return {}
    return {
        name: Configuration(
            rank(desc, target, cuts), partial(launches, desc, target, cuts), workspace(desc, target, cuts)
        )
        for name, cuts in (("cut tiles", True), ("whole tiles", False))
    }


@for_products(
    partial(
        hopper_kernel,
        name="realigned",
        version=4,
        supports=supports,
        rank=rank,
        workspace=workspace,
        guarantee=guarantee,
        layout=layout,
        configurations=configurations,
    )
)
def realigned(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    return launches(desc, target)
