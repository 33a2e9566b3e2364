"""Sampling of tokens from the logits of a language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from triplan.descriptors.base import Descriptor, PlannedBy
from triplan.descriptors.fields import Extent
from triplan.descriptors.operand import Operand, Role
from triplan.sku import Element, ElementKind, OpCategory

if TYPE_CHECKING:
    from triplan.facade.sampling import SamplePlan

__all__ = ["SampleDescriptor"]

#: Bits after the binary point of a mass, and tokens at most: sums of masses stay below 2**62.
MASS_BITS, MOST_TOKENS = 40, 2**22
#: The filters, in the order in which they are applied.
FILTERS = ("top_k", "top_p", "min_p")


class SampleDescriptor(Descriptor, PlannedBy["SamplePlan"]):
    """``out = first i with mass[0] + ... + mass[i] > u * sum(mass)``, where ``mass = exp((x - max(x)) / temperature)``
    of the tokens that the filters keep, else 0, and ``u`` in [0, 1) follows from the row's seed and position.

    A mass is an integer, ``floor(2**40 * exp(...))``: sums do not depend on their order. ``u`` is a 64-bit word of
    Philox4x32-10 (docs/sampling.md): a row's token depends on no other row, nor on its place. Filters, in this order,
    each of what the one before keeps:

    - top_k: a token stays if fewer than ``top_k`` logits are greater. So ties of the last one stay. 0: all stay.
    - top_p: a token stays if the mass of greater logits is less than ``top_p`` of all. 1 or more: all stay.
    - min_p: a token stays if its mass is at least ``min_p`` of the largest.

    A largest logit always stays. A temperature of 0 or less: the first of the largest logits. Logits of +inf share all
    the mass. A row that holds a NaN, or nothing but -inf, gets -1.

    Attributes:
        element: element of ``logits``.
        rows, vocabulary: extents of ``logits``.
        top_k, top_p, min_p: whether there is an operand of that name, with one value a row.
    """

    category: ClassVar[OpCategory] = OpCategory.SAMPLING

    op: Literal["sample"] = "sample"
    element: Element
    rows: Extent
    vocabulary: Extent
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False

    def check_problem(self) -> None:
        if self.element not in (ElementKind.F16, ElementKind.BF16, ElementKind.F32):
            raise ValueError(f"element = {self.element}: logits are f16, bf16 or f32")
        if self.vocabulary > MOST_TOKENS:
            raise ValueError(f"vocabulary = {self.vocabulary}: at most {MOST_TOKENS}")

    def declare_operands(self) -> tuple[Operand, ...]:
        i64, f32 = ElementKind.I64, ElementKind.F32

        def each(name: str, element: ElementKind, role: Role = Role.INPUT) -> Operand:
            return Operand(name, role, element, (self.rows,), batch_axes=(0,))

        return (
            Operand("logits", Role.INPUT, self.element, (self.rows, self.vocabulary), batch_axes=(0,)),
            each("temperature", f32),
            *(each(name, i64 if name == "top_k" else f32) for name in FILTERS if getattr(self, name)),
            each("seed", i64),
            each("position", i64),
            each("out", i64, Role.OUTPUT),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        rows, vocabulary = args.logits.shape
        given = {name: getattr(args, name, None) is not None for name in FILTERS}
        return {"element": args.logits.dtype, "rows": rows, "vocabulary": vocabulary, **given, **options}
