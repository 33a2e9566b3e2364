"""The gradients of a product as matrix products of other operands, so that gemm's kernels compute them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from triplan.backends.runtime.launch import Arg, Launch, Ptr, Stride, TensorMap
from triplan.backends.triton.gemm.matrices import stride_multiple, unit_axis
from triplan.descriptors import GemmBackwardDescriptor, GemmDescriptor, Layout, Operand
from triplan.sku.facts import fact


class View(NamedTuple):
    """An operand of an op, as it is or transposed."""

    operand: Operand
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.operand.shape[::-1] if self.transposed else self.operand.shape

    @property
    def layout(self) -> Layout:
        return _transposed(self.operand) if self.transposed else self.operand.layout

    @property
    def flipped(self) -> View:
        return View(self.operand, not self.transposed)


@dataclass(frozen=True, slots=True)
class Product:
    """A gradient, or a transposed product, as ``c = a @ b``: its descriptor, and what a, b and c are views of."""

    desc: GemmDescriptor
    views: Mapping[str, View]

    @property
    def fixed(self) -> Literal["a", "b"]:
        """The factor of da that does not hold da's rows: b, or a where the product computes da transposed."""
        return "a" if self.views["c"].transposed else "b"

    def on_operands(self, launch: Launch) -> Launch:
        """A launch of ``desc`` with the op's operands as arguments."""
        return replace(launch, args={name: self.argument(arg) for name, arg in launch.args.items()})

    def argument(self, arg: Arg) -> Arg:
        """An argument of ``desc``, taken from the operand that it is a view of."""
        if not isinstance(arg, (Ptr, Stride, TensorMap)):
            return arg
        operand, transposed = self.views[arg.operand]
        if isinstance(arg, Stride):
            return replace(arg, operand=operand.name, axis=1 - arg.axis if transposed else arg.axis)
        if isinstance(arg, TensorMap) and arg.copy is None:  # a copy lies as the product sees it
            return replace(arg, operand=operand.name, transposed=arg.transposed != transposed)
        return replace(arg, operand=operand.name)


def _transposed(o: Operand) -> Layout:
    """What the layout of a matrix promises of its transpose."""
    if o.layout.packed:
        return Layout.strided(unit_axis=0, alignment=o.layout.alignment, stride_multiple=min(stride_multiple(o), 16))
    unit = o.layout.unit_axis
    return Layout.strided(
        unit_axis=None if unit is None else 1 - unit,
        alignment=o.layout.alignment,
        zero_axes=sorted(1 - axis for axis in o.layout.zero_axes),
        stride_multiple=o.layout.stride_multiple,
    )


def transposed(desc: GemmDescriptor) -> Product:
    """c.T = b.T @ a.T, for a product whose epilogue is an activation."""
    names = {"a": "b", "b": "a", "c": "c", **({"c0": "c0"} if desc.reads_c0 else {})}
    views = {name: View(desc.operand(other), True) for name, other in names.items()}
    return Product(desc.replace(m=desc.n, n=desc.m, layouts=_layouts(views)), views)


def _layouts(views: Mapping[str, View]) -> tuple[tuple[str, Layout], ...]:
    """The field ``layouts`` of a product's descriptor."""
    return tuple((name, view.layout) for name, view in views.items())


def _product(desc: GemmBackwardDescriptor, a: View, b: View, result: Operand) -> Product:
    """``result = a @ b``. A column-major result is computed as its transpose, b.T @ a.T: kernels then write rows."""
    c = View(result, unit_axis(result) == 0)
    if c.transposed:
        a, b = b.flipped, a.flipped
    views = {"a": a, "b": b, "c": c}
    (m, k), (_, n) = a.shape, c.shape
    product = GemmDescriptor(
        m=m,
        n=n,
        k=k,
        element=desc.element,
        out_element=desc.out_element,
        math=desc.math,
        layouts=_layouts(views),
    )
    return Product(product, views)


@fact
def gradient_products(desc: GemmBackwardDescriptor) -> dict[str, Product]:
    """The products that are wanted, by gradient: da = dc @ b.T and db = a.T @ dc."""
    found: dict[str, Product] = {}
    dc = View(desc.operand("dc"), False)
    if desc.wants_da:
        found["da"] = _product(desc, dc, View(desc.operand("b"), True), desc.operand("da"))
    if desc.wants_db:
        found["db"] = _product(desc, View(desc.operand("a"), True), dc, desc.operand("db"))
    return found
