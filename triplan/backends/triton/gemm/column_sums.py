"""dbias: the sums of dc's columns, in one launch, or in two over chunks of rows."""

from __future__ import annotations

from collections.abc import Mapping

from triplan.backends.runtime.launch import Arg, Int, Launch, Scratch
from triplan.backends.triton.common.card import BYTES_PER_US, OVERLAPPED_LAUNCH_US
from triplan.backends.triton.common.offsets import TL, ceil_power
from triplan.backends.triton.gemm import column_sums_kernels as kernels
from triplan.backends.triton.gemm.arguments import extent, matrix_strides, pointer, vector_stride
from triplan.backends.triton.gemm.matrices import is_elementwise
from triplan.descriptors import GemmBackwardDescriptor
from triplan.sku import ElementKind

#: Elements that a program accumulates at a time, and where dc is read element by element: each then has an address of
#: its own, of two registers. Half of them in f64.
BLOCK_ELEMENTS, BLOCK_ELEMENTS_ELEMENTWISE = 8192, 2048
#: Rows of a block of many rows and columns; the most where there are few columns, because they enter the tolerance.
BLOCK_ROWS, MOST_BLOCK_ROWS = 64, 256
#: Most columns of a block: of few rows, wider ones would leave multiprocessors idle.
MOST_BLOCK_COLUMNS = 256
#: Rows of dc without unit stride that a warp loads of at a time: the best on an H200 of 1, 2, 4, 8 and all, for slices
#: of rows, of columns and of both, by a run that is not published.
ROWS_TOGETHER = 8
#: Blocks of rows up to which one program sums them all: a second launch takes longer. Untuned.
BLOCKS_OF_ONE = 2
#: Programs of the first launch, at most, if it has several chunks: four per multiprocessor of an H200, as many as
#: registers have room for. One number for all targets, because the number of chunks enters the tolerance.
PROGRAMS = 528
#: Microseconds that the sums wait for products of several rounds. Untuned.
GAPS_US = 2.0


def _block(desc: GemmBackwardDescriptor, rows: int) -> tuple[int, int]:
    """Rows and columns that a program accumulates at a time, of ``rows``: as many elements where either is short."""
    elements = BLOCK_ELEMENTS_ELEMENTWISE if is_elementwise(desc.operand("dc")) else BLOCK_ELEMENTS
    if desc.element is ElementKind.F64:
        elements //= 2
    most = BLOCK_ROWS // 2 if desc.element is ElementKind.F64 else BLOCK_ROWS
    height = min(max(most, elements // ceil_power(desc.n)), MOST_BLOCK_ROWS, ceil_power(rows))
    return height, min(elements // height, MOST_BLOCK_COLUMNS, ceil_power(desc.n))


def _chunks(desc: GemmBackwardDescriptor) -> tuple[int, int]:
    """The number of chunks that dc's rows are cut into, and the rows of each: a multiple of its block's."""
    rows, columns = _block(desc, desc.m)
    blocks = max(-(-desc.n // columns), 1)
    chunks = max(min(-(-desc.m // rows), PROGRAMS // blocks), 1) if desc.m > BLOCKS_OF_ONE * rows else 1
    each = -(-desc.m // (chunks * rows)) * rows
    return max(-(-desc.m // max(each, 1)), 1), each


def workspace(desc: GemmBackwardDescriptor) -> int:
    """Bytes of the chunks' partial sums; none for a single chunk."""
    chunks, _ = _chunks(desc)
    return chunks * desc.n * desc.element.compute.itemsize if desc.wants_dbias and chunks > 1 else 0


def roundings(desc: GemmBackwardDescriptor) -> int:
    """The most additions that an element of dc passes through."""
    chunks, each = _chunks(desc)
    (rows, _), (again, _) = _block(desc, desc.m), _block(desc, chunks)
    return -(-each // rows) + -(-chunks // again) + rows + again


def launches(desc: GemmBackwardDescriptor) -> list[Launch]:
    """The sums of each chunk into the workspace, then the sums of those; a single chunk is written to dbias at once."""
    if not desc.wants_dbias or desc.n == 0:
        return []
    dc = desc.operand("dc")
    chunks, each = _chunks(desc)
    dc_strides, dc_known = matrix_strides(dc, ("xm", "xn", "batch"))
    del dc_strides["batch"]
    from_dc: dict[str, Arg] = {"x": pointer(dc), **dc_strides}
    if chunks == 1:
        to_dbias, out_known = _to_dbias(desc)
        return [_launch(desc, desc.m, each, 1, {**from_dc, **to_dbias}, {**dc_known, **out_known})]
    to_partial: dict[str, Arg] = {"out": Scratch(0, desc.element.compute), "out_m": _columns(desc)}
    first = _launch(desc, desc.m, each, chunks, {**from_dc, **to_partial}, {**dc_known, "out_n": 1})
    return [first, sum_launch(desc, chunks, 0)]


def sum_launch(desc: GemmBackwardDescriptor, parts: int, offset: int) -> Launch:
    """dbias from ``parts`` partial sums of each column, ``offset`` bytes from the start of the workspace."""
    from_partial: dict[str, Arg] = {"x": Scratch(offset, desc.element.compute), "xm": _columns(desc)}
    to_dbias, out_known = _to_dbias(desc)
    return _launch(desc, parts, parts, 1, {**from_partial, **to_dbias}, {"xn": 1, **out_known})


def _columns(desc: GemmBackwardDescriptor) -> Int:
    return extent(desc.n, desc.element.itemsize)


def _to_dbias(desc: GemmBackwardDescriptor) -> tuple[dict[str, Arg], dict[str, int]]:
    dbias = desc.operand("dbias")
    stride, known = vector_stride(dbias, "out_n")
    return {"out": pointer(dbias), "out_m": Int(0), **stride}, known


def _launch(
    desc: GemmBackwardDescriptor,
    rows: int,
    each: int,
    chunks: int,
    args: Mapping[str, Arg],
    constexprs: Mapping[str, int],
) -> Launch:
    height, columns = _block(desc, rows)
    blocks = -(-desc.n // columns)
    together = height if 1 in (constexprs.get("xm"), constexprs.get("xn")) else min(height, ROWS_TOGETHER)
    return Launch(
        kernels.column_sums_kernel,
        chunks * blocks,
        {
            "rows": Int(rows, wide=rows >= 2**31),
            "columns": _columns(desc),
            "each": Int(each, wide=each >= 2**31),
            "blocks": Int(blocks),
            **args,
        },
        {
            **constexprs,
            "ROWS": together,
            "BLOCK": columns,
            "GROUPS": height // together,
            "ACC": TL[desc.element.compute],
        },
        overlaps=True,
    )


def cost_us(desc: GemmBackwardDescriptor) -> float:
    """Estimated microseconds of ``launches``."""
    if not desc.wants_dbias:
        return 0.0
    nbytes = desc.m * desc.n * desc.element.itemsize + 2 * workspace(desc)
    count = 2 if _chunks(desc)[0] > 1 else 1
    return OVERLAPPED_LAUNCH_US * count + GAPS_US + nbytes / BYTES_PER_US
