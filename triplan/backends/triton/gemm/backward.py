"""From the adjoint of a product to launches: two products of other operands, and sums of columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import triton.language as tl

from triplan.backends.runtime.launch import Arg, Int, Launch, Ptr, Scratch, Stride, TensorMap
from triplan.backends.triton.gemm import backward_kernels as kernels
from triplan.backends.triton.gemm import launches as launching
from triplan.backends.triton.gemm.launches import Tile
from triplan.descriptors import GemmBackwardDescriptor, GemmDescriptor, Layout, Operand
from triplan.sku import ElementKind

#: Rows and columns that a program of the column sums adds up at a time; and columns where each element has an address
#: of its own, of two registers.
SUMMED = (32, 128)
SCATTERED = 32
#: Programs of the column sums: four for each of an H200's multiprocessors. One number for all targets, as tolerances
#: depend on it.
SUMMING = 528
#: Microseconds in which the sums of columns wait for the products, and the next launch for them (H200).
AROUND_US = 4.0

#: By a product's own names: whose operand of the adjoint each is, and whether transposed.
Roles = Mapping[str, tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class Product:
    """One gradient as a product: its descriptor, and whose operands it has."""

    desc: GemmDescriptor
    roles: Roles

    @property
    def fixed(self) -> str:
        """Of da's factors the one that its rows are not in: the first where da is column-major, and thus transposed."""
        return "a" if self.roles["c"][1] else "b"

    def recast(self, launch: Launch) -> Launch:
        """A launch of ``desc``, on the adjoint's operands."""
        return replace(launch, args={name: self.argument(arg) for name, arg in launch.args.items()})

    def argument(self, arg: Arg) -> Arg:
        if isinstance(arg, Ptr):
            return replace(arg, operand=self.roles[arg.operand][0])
        if isinstance(arg, Stride):
            name, transposed = self.roles[arg.operand]
            return replace(arg, operand=name, axis=1 - arg.axis if transposed else arg.axis)
        if isinstance(arg, TensorMap):
            name, transposed = self.roles[arg.operand]
            return replace(arg, operand=name, transposed=arg.transposed != transposed)
        return arg


def _transposed(o: Operand) -> Layout:
    """What the layout of a matrix promises of its transpose."""
    if o.layout.packed:
        multiple = min(launching.leading(o)[1], 16)
        return Layout.strided(unit_axis=0, alignment=o.layout.alignment, stride_multiple=multiple)
    unit = o.layout.unit_axis
    return Layout.strided(
        unit_axis=None if unit is None else 1 - unit,
        alignment=o.layout.alignment,
        zero_axes=sorted(1 - axis for axis in o.layout.zero_axes),
        stride_multiple=o.layout.stride_multiple,
    )


def _product(
    desc: GemmBackwardDescriptor, first: tuple[Operand, bool], second: tuple[Operand, bool], result: Operand
) -> Product:
    """``result`` = first @ second, each of an operand or (True) its transpose; and where ``result`` is column-major its
    transpose, which is second.T @ first.T, so that kernels write rows."""
    flipped = launching.leading(result)[0] == 0
    if flipped:
        first, second = (second[0], not second[1]), (first[0], not first[1])
    named = {"a": first, "b": second, "c": (result, flipped)}
    shapes = {name: o.shape[::-1] if turned else o.shape for name, (o, turned) in named.items()}
    layouts: Any = {name: _transposed(o) if turned else o.layout for name, (o, turned) in named.items()}
    product = GemmDescriptor(
        m=shapes["c"][0],
        n=shapes["c"][1],
        k=shapes["a"][1],
        element=desc.element,
        out_element=desc.out_element,
        math=desc.math,
        layouts=layouts,
    )
    return Product(product, {name: (o.name, turned) for name, (o, turned) in named.items()})


@lru_cache(maxsize=4096)
def products(desc: GemmBackwardDescriptor) -> dict[str, Product]:
    """The products that are wanted, by gradient: da = dc @ b.T and db = a.T @ dc."""
    o = {operand.name: operand for operand in desc.operands()}
    found: dict[str, Product] = {}
    if desc.wants_da:
        found["da"] = _product(desc, (o["dc"], False), (o["b"], True), o["da"])
    if desc.wants_db:
        found["db"] = _product(desc, (o["a"], True), (o["dc"], False), o["db"])
    return found


# --- sums of columns ---


def _columns(desc: GemmBackwardDescriptor) -> int:
    return SCATTERED if launching.leading(desc.operand("dc"))[0] is None else SUMMED[1]


def _lines(desc: GemmBackwardDescriptor) -> tuple[int, int]:
    """Lines of partial sums, and rows that are added up in each."""
    blocks = max(-(-desc.n // _columns(desc)), 1)
    lines = max(min(-(-desc.m // SUMMED[0]), -(-SUMMING // blocks)), 1)
    each = -(-desc.m // (lines * SUMMED[0])) * SUMMED[0]
    return max(-(-desc.m // max(each, 1)), 1), each


def sum_workspace(desc: GemmBackwardDescriptor) -> int:
    """Bytes of partial sums: none where one line is all."""
    lines, _ = _lines(desc)
    return lines * desc.n * desc.element.compute.itemsize if desc.wants_dbias and lines > 1 else 0


def sum_roundings(desc: GemmBackwardDescriptor) -> int:
    """The most additions that a row of dc goes through."""
    lines, each = _lines(desc)
    rows = SUMMED[0]
    return -(-each // rows) + -(-lines // rows) + 2 * rows


def sum_launches(desc: GemmBackwardDescriptor) -> list[Launch]:
    """dbias: partial sums of blocks of rows into the workspace, then their sum; at once where one line is all."""
    if not desc.wants_dbias or desc.n == 0:
        return []
    dc, dbias = desc.operand("dc"), desc.operand("dbias")
    lines, each = _lines(desc)
    acc = desc.element.compute
    place, place_known = launching.vector_stride(dbias, "out_n")
    steps, steps_known = launching.strides(dc, ("xm", "xn", "batch"))
    del steps["batch"]
    given: dict[str, Arg] = {"x": launching.pointer(dc), **steps}
    last: dict[str, Arg] = {"out": launching.pointer(dbias), "out_m": Int(0), **place}
    if lines == 1:
        return [_sums(desc, desc.m, each, 1, {**given, **last}, {**steps_known, **place_known})]
    parts = Scratch(0, acc)
    columns = launching.extent(desc.n, desc.element.itemsize)
    to_parts: dict[str, Arg] = {"out": parts, "out_m": columns}
    from_parts: dict[str, Arg] = {"x": parts, "xm": columns}
    return [
        _sums(desc, desc.m, each, lines, {**given, **to_parts}, {**steps_known, "out_n": 1}),
        _sums(desc, lines, lines, 1, {**from_parts, **last}, {"xn": 1, **place_known}),
    ]


def _sums(
    desc: GemmBackwardDescriptor,
    rows: int,
    each: int,
    lines: int,
    args: Mapping[str, Arg],
    constexprs: Mapping[str, int],
) -> Launch:
    blocks = -(-desc.n // _columns(desc))
    return Launch(
        kernels.column_sums_kernel,
        lines * blocks,
        {
            "rows": Int(rows, wide=rows >= 2**31),
            "columns": launching.extent(desc.n, desc.element.itemsize),
            "each": Int(each, wide=each >= 2**31),
            "blocks": Int(blocks),
            **args,
        },
        {
            **constexprs,
            "ROWS": SUMMED[0],
            "BLOCK": _columns(desc),
            "ACC": tl.float64 if desc.element.compute is ElementKind.F64 else tl.float32,
        },
    )


def sum_us(desc: GemmBackwardDescriptor) -> float:
    """Estimated microseconds of ``sum_launches``."""
    if not desc.wants_dbias:
        return 0.0
    nbytes = desc.m * desc.n * desc.element.itemsize + 2 * sum_workspace(desc)
    launches = 2 if _lines(desc)[0] > 1 else 1
    return launching.LAUNCH_US * launches + AROUND_US + nbytes / launching.BYTES_PER_US


# --- products by pointers ---


def tiles_launches(desc: GemmBackwardDescriptor, tile_of: Callable[[Product], Tile]) -> list[Launch]:
    """Every gradient that is wanted, by ``gemm``'s kernel in tiles of one's choice, and the sums of columns."""
    found = []
    for p in products(desc).values():
        found += [p.recast(x) for x in launching.tiles_launch(p.desc, tile_of(p))]
    return [*found, *sum_launches(desc)]
