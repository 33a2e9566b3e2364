"""Operands as kernel arguments: pointers, extents, strides, and what is known of each when planning.

Each function returns the run-time arguments and the constexprs, by parameter name. What kernels specialise on is kept
to few cases, so that a thousand shapes compile a handful of binaries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from triplan.backends.runtime.launch import Arg, Int, Ptr, Scalar, Stride
from triplan.backends.triton.common.card import MAX_THREAD_REGISTERS, SM_SHARED_BYTES
from triplan.backends.triton.common.offsets import TL
from triplan.backends.triton.gemm import tiles_kernels as kernels
from triplan.backends.triton.gemm.matrices import (
    I32_COUNTER_LIMIT,
    has_elementwise_access,
    loads_single_halves,
    stride_multiple,
    unit_axis,
    vector_elements,
)
from triplan.backends.triton.gemm.tile_shapes import Tile
from triplan.descriptors import Operand
from triplan.descriptors.gemm import MatrixProductDescriptor
from triplan.sku import MathPrecision

ACTIVATIONS = {
    "identity": kernels.identity,
    "relu": kernels.relu,
    "gelu": kernels.gelu,
    "silu": kernels.silu,
}
#: Rows of tiles whose programs run together: with 128 rows a tile, 8 by 16 of them fill a card and share its L2 cache.
GROUP_M = 8
#: Registers of a thread with which a multiprocessor holds three programs of 4 warps; and the accumulators of a thread
#: where these suffice for halves that are loaded one by one, and the longest step. (Tiles of 16 columns, which have
#: fewer accumulators, spill; on sm80 so does a second matrix of C's extents. Of a longer step more elements wait in
#: registers.)
THREE_PROGRAMS_REGISTERS, THREE_PROGRAMS_ACCUMULATORS, THREE_PROGRAMS_STEP = 168, range(16, 33), 32


def _vectors(itemsize: int) -> tuple[int, ...]:
    """Elements per load that kernels know of. Pairs of four bytes are left out: on an H200 they were slower than one by
    one."""
    return (vector_elements(itemsize), 2, 1) if itemsize <= 2 else (vector_elements(itemsize), 1)


def extent(value: int, itemsize: int) -> Int:
    """An extent of a matrix. Masked vector loads need to know a divisor of it: 16, a vector's elements, 2 of two bytes
    (a word), or 1."""
    known = next(d for d in (16, *_vectors(itemsize)) if value % d == 0)
    return Int(value, wide=value >= I32_COUNTER_LIMIT, divisibility=known)


def contiguous_elements(o: Operand) -> int:
    """Elements of a row-major matrix that one load can take from any multiple of their number on."""
    size = o.element.itemsize
    fits = (e for e in _vectors(size) if o.alignment >= e * size and not (stride_multiple(o) | o.shape[-1]) % e)
    return next(fits, 1)


def pointer(o: Operand) -> Ptr:
    """The address of an operand, known to be aligned to 16 bytes or to its element."""
    return Ptr(o.name, o.element, 16 if o.alignment >= 16 else o.element.itemsize)


def matrix_strides(o: Operand | None, names: Sequence[str]) -> tuple[dict[str, Arg], dict[str, int]]:
    """A matrix's strides; ``names`` are the parameters for those of rows, columns and the batch.

    Strides of 1 and 0 are compiled in. All are None without an operand, and the batch's without a batch.
    """
    if o is None:
        return dict.fromkeys(names), {}
    unit = unit_axis(o)
    first = len(o.shape) - 2
    divisibility = next(d for d in _vectors(o.element.itemsize) if stride_multiple(o) % d == 0)
    args: dict[str, Arg] = {}
    constants: dict[str, int] = {}
    for axis, name in zip((first, first + 1, 0), names, strict=True):
        if name == names[2] and first == 0:
            args[name] = None
        elif axis == (None if unit is None else unit + first):
            constants[name] = 1
        elif axis in o.layout.zero_axes:
            constants[name] = 0
        elif o.layout.packed:
            stride = math.prod(o.shape[axis + 1 :])
            args[name] = Int(stride, wide=True, divisibility=divisibility)
        else:
            args[name] = Stride(o.name, axis, divisibility=divisibility)
    return args, constants


def vector_stride(o: Operand | None, name: str) -> tuple[dict[str, Arg], dict[str, int]]:
    """``matrix_strides`` for an operand of one axis."""
    if o is None:
        return {name: None}, {}
    if o.layout.packed or o.layout.unit_axis == 0:
        return {}, {name: 1}
    return ({}, {name: 0}) if o.layout.zero_axes else ({name: Stride(o.name, 0)}, {})


def epilogue_arguments(desc: MatrixProductDescriptor) -> tuple[dict[str, Arg], dict[str, object]]:
    """The arguments of ``tiles_kernels.epilogue`` except ``c``."""
    o = {operand.name: operand for operand in desc.operands()}
    compute = desc.sums
    one = 1.0 if compute.is_floating_point else 1
    c, c_known = matrix_strides(o["c"], ("cm", "cn", "c_batch"))
    c0, c0_known = matrix_strides(o.get("c0"), ("c0m", "c0n", "c0_batch"))
    pre, pre_known = matrix_strides(o.get("pre"), ("prem", "pren", "pre_batch"))
    bias, bias_known = vector_stride(o.get("bias"), "bias_n")
    args: dict[str, Arg] = {
        "c0": pointer(o["c0"]) if "c0" in o else None,
        "bias": pointer(o["bias"]) if "bias" in o else None,
        "alpha": Scalar("alpha", compute, one),
        "beta": Scalar("beta", compute, one) if "c0" in o else None,
        **c,
        "pre": pointer(o["pre"]) if "pre" in o else None,
        **c0,
        **pre,
        **bias,
    }
    return args, {**c_known, **c0_known, **pre_known, **bias_known, "ACTIVATION": ACTIVATIONS[desc.activation]}


def product_arguments(desc: MatrixProductDescriptor, tile: Tile) -> tuple[dict[str, Arg], dict[str, object]]:
    """The arguments of ``tiles_kernels.product_of``: the factors, the extents and the tile."""
    a, b = desc.operand("a"), desc.operand("b")
    a_strides, a_known = matrix_strides(a, ("am", "ak", "a_batch"))
    b_strides, b_known = matrix_strides(b, ("bk", "bn", "b_batch"))
    tf32 = desc.multiplicands in (MathPrecision.TF32, MathPrecision.TF32X3)
    itemsize = desc.element.itemsize
    args: dict[str, Arg] = {
        "a": pointer(a),
        "b": pointer(b),
        "m": extent(desc.m, itemsize),
        "n": extent(desc.n, itemsize),
        "k": extent(desc.k, itemsize),
        **a_strides,
        **b_strides,
    }
    return args, {
        **a_known,
        **b_known,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "GROUP_M": GROUP_M,
        "WHOLE_K": desc.k % tile.k == 0,
        "PRECISION": str(desc.multiplicands) if tf32 else "ieee",
        "ACC": TL[desc.sums],
    }


def max_registers(desc: MatrixProductDescriptor, tile: Tile) -> int | None:
    """Registers of a thread that ptxas may use, or None to let it choose.

    ptxas may spill a few registers to make room for one more resident program. The limit is 255, which prevents that,
    where it is known to happen, and where shared memory has no room for another program anyhow.
    """
    alone = loads_single_halves(desc) and not (desc.reads_c0 or desc.saves_pre)
    three = tile.accumulators in THREE_PROGRAMS_ACCUMULATORS and tile.k <= THREE_PROGRAMS_STEP
    if alone and tile.warps == 4 and three:
        # Steps wait in registers, so that other programs must hide what they wait for. Left alone, ptxas takes more for
        # addresses of C that it could find after the last step.
        return THREE_PROGRAMS_REGISTERS
    # Three programs do not fit into shared memory, and two of four warps leave each thread 255 registers.
    shared_bound = tile.warps == 4 and 3 * tile.shared_bytes(desc.element.itemsize) > SM_SHARED_BYTES
    # i8 and tf32x3 spill in most tiles. f32 with a column-major B spills under some versions of Triton, to fit a second
    # program of eight warps. Elementwise access holds one address per element.
    spills = (
        desc.multiplicands in (MathPrecision.EXACT, MathPrecision.TF32X3)
        or (desc.multiplicands is MathPrecision.F32 and unit_axis(desc.operand("b")) == 0)
        or has_elementwise_access(desc)
    )
    return MAX_THREAD_REGISTERS if spills or shared_bound else None
