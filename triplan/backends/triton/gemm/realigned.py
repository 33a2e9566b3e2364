"""Kernel ``realigned``: ``wgmma`` or ``wgmma_tiles`` on copies of the matrices that TMA cannot map.

A leading dimension that is no multiple of 16 bytes keeps a matrix from TMA, and pointers feed tensor cores at a third
of their speed or less. The copies in the workspace have a leading dimension that is rounded up. They take as long as
streaming the matrices twice, which large products outweigh many times. A copy of C is copied out in the end.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from triplan.backends.runtime.launch import Arg, Copy, Int, Launch, Scratch, TensorMap
from triplan.backends.table import Build
from triplan.backends.triton.common.card import OVERLAPPED_LAUNCH_US
from triplan.backends.triton.common.offsets import bits, padded_bytes
from triplan.backends.triton.gemm import realigned_kernels as kernels, tma, wgmma, wgmma_tiles
from triplan.backends.triton.gemm.arguments import extent, matrix_strides
from triplan.backends.triton.gemm.entries import for_products, hopper_kernel
from triplan.backends.triton.gemm.guarantees import guarantee
from triplan.backends.triton.gemm.matrices import layout, unit_axis, vector_elements
from triplan.descriptors import GemmDescriptor, Layout, Operand
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import Support, Target
from triplan.sku.facts import fact

#: Rows and columns of a copy per program: 32 elements per thread. Columns lie along the unit-stride axis.
ROWS, COLUMNS = 32, 128
#: Bytes per microsecond that a copy reads and writes. Untuned.
COPY_BYTES_PER_US = 2.5e6


@fact
def _moved(desc: MatrixProductDescriptor) -> tuple[Operand, ...]:
    """The matrices that are copied: those that TMA cannot map, and a C whose rows would be written beyond their end."""
    over = desc.n % vector_elements(desc.out.itemsize) != 0
    return tuple(desc.operand(x) for x in "abc" if tma.unmappable(desc, x) or (x == "c" and over))


def _unit(o: Operand) -> int:
    """The axis of a matrix along which its copy is contiguous: the operand's own, or that of rows; of C always that."""
    return 0 if unit_axis(o) == 0 and o.name != "c" else 1


@fact
def copy_strides(o: Operand) -> tuple[int, ...]:
    """Of the copy: its leading dimension is rounded up to a multiple of 16 bytes."""
    *_, m, n = o.shape
    rows, columns = (n, m) if _unit(o) == 0 else (m, n)
    width = vector_elements(o.element.itemsize)
    leading = -(-columns // width) * width
    matrix = (1, leading) if _unit(o) == 0 else (leading, 1)
    return (rows * leading, *matrix) if len(o.shape) > 2 else matrix


def copy_bytes(o: Operand) -> int:
    """Of the copy."""
    *_, m, n = o.shape
    rows = n if _unit(o) == 0 else m
    return math.prod(o.shape[:-2]) * rows * max(copy_strides(o)[-2:]) * o.element.itemsize


@fact
def _inner(desc: MatrixProductDescriptor) -> MatrixProductDescriptor:
    """The problem on the copies."""
    known = {
        o.name: Layout.strided(
            unit_axis=len(o.shape) - 2 + _unit(o), alignment=16, stride_multiple=vector_elements(o.element.itemsize)
        )
        for o in _moved(desc)
    }
    return desc.replace(layouts={**dict(desc.layouts), **known})


def _offsets(desc: MatrixProductDescriptor) -> dict[str, int]:
    """Where each copy begins in the workspace."""
    found, end = {}, 0
    for o in _moved(desc):
        found[o.name] = end
        end += padded_bytes(copy_bytes(o))
    return found


def _programs(o: Operand) -> int:
    *_, m, n = o.shape
    rows, columns = (n, m) if _unit(o) == 0 else (m, n)
    return math.prod(o.shape[:-2]) * -(-rows // ROWS) * -(-columns // COLUMNS)


def copy_launch(o: Operand, offset: int) -> Launch:
    """Of a factor into the workspace, or of C out of it."""
    itemsize = o.element.itemsize
    own, other = ("out", "source") if o.is_written else ("source", "out")
    down, along = ("n", "m") if _unit(o) == 0 else ("m", "n")  # the kernel's rows lie along the copy's unit-stride axis
    names = {down: "m", along: "n"}
    args, known = matrix_strides(o, [f"{own}_{names['m']}", f"{own}_{names['n']}", f"{own}_batch"])
    sizes = dict(zip("mn", o.shape[-2:], strict=True))
    vectors = vector_elements(itemsize)
    found: dict[str, Arg] = {
        own: bits(o),
        other: Scratch(offset, o.element.bits),
        "rows": extent(sizes[down], itemsize),
        "columns": extent(sizes[along], itemsize),
        **args,
        f"{other}_m": Int(max(copy_strides(o)[-2:]), wide=True, divisibility=vectors),
        f"{other}_batch": Int(copy_strides(o)[0], wide=True, divisibility=vectors) if len(o.shape) > 2 else None,
    }
    constants = {**known, f"{other}_n": 1, "ROWS": ROWS, "COLUMNS": COLUMNS}
    return Launch(kernels.realign_kernel, _programs(o), found, constants, overlaps=True)


def _on_copies(desc: MatrixProductDescriptor, launch: Launch) -> Launch:
    """A launch of the inner kernel, with copies in place of operands."""
    offsets = _offsets(desc)

    def replaced(arg: Arg) -> Arg:
        if isinstance(arg, TensorMap) and arg.operand in offsets:
            o = desc.operand(arg.operand)
            return replace(arg, copy=Copy(offsets[o.name], o.shape, copy_strides(o)))
        return arg

    return replace(launch, args={name: replaced(arg) for name, arg in launch.args.items()})


def _kernel_of(inner: MatrixProductDescriptor, target: Target) -> Build:
    """The cheaper kernel; ``wgmma_tiles`` takes no batches."""
    tiles = isinstance(inner, GemmDescriptor) and wgmma_tiles.rank(inner, target) < wgmma.rank(inner, target)
    return wgmma_tiles.wgmma_tiles if tiles else wgmma.wgmma


def supports(desc: MatrixProductDescriptor, target: Target) -> Support:
    """Whether TMA cannot map a matrix as it lies, but can map the copies."""
    if not _moved(desc):
        return Support.no("TMA can map every matrix as it lies")
    if any(_programs(o) >= 2**31 for o in _moved(desc)):
        return Support.no("2**31 programs of a copy; a grid holds fewer")
    return tma.supports(_inner(desc), target, roomy="c" in _offsets(desc))


def rank(desc: MatrixProductDescriptor, target: Target) -> float:
    """Estimated microseconds."""
    inner = _inner(desc)
    copies = sum(OVERLAPPED_LAUNCH_US + 2 * o.nbytes / COPY_BYTES_PER_US for o in _moved(desc))
    if isinstance(inner, GemmDescriptor):
        return copies + min(wgmma.rank(inner, target), wgmma_tiles.rank(inner, target))
    return copies + wgmma.rank(inner, target)


def workspace(desc: MatrixProductDescriptor, target: Target) -> int:
    """Bytes of the copies; none for an empty C."""
    return sum(padded_bytes(copy_bytes(o)) for o in _moved(desc)) if desc.operand("c").numel else 0


@for_products(
    partial(
        hopper_kernel,
        name="realigned",
        supports=supports,
        rank=rank,
        workspace=workspace,
        guarantee=guarantee,
        layout=layout,
    )
)
def realigned(desc: MatrixProductDescriptor, target: Target) -> list[Launch]:
    if desc.operand("c").numel == 0:
        return []
    inner, offsets = _inner(desc), _offsets(desc)
    main = _kernel_of(inner, target)(inner, target)
    first = [copy_launch(o, offsets[o.name]) for o in _moved(desc) if not o.is_written]
    last = [copy_launch(o, offsets[o.name]) for o in _moved(desc) if o.is_written]
    return [*first, *(_on_copies(desc, x) for x in main), *last]
