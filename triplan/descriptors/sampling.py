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

#: Bits after the binary point of a mass, and the largest vocabulary: sums of masses stay at or below 2**62.
MASS_BITS, MOST_TOKENS = 40, 2**22
#: The filters, in the order in which they are applied.
FILTERS = ("top_k", "top_p", "min_p")


class SampleDescriptor(Descriptor, PlannedBy["SamplePlan"]):
    """``out = first i with mass[0] + ... + mass[i] > u * sum(mass)``, where ``mass = exp((x - max(x)) / temperature)``
    for the tokens that the filters keep and 0 for the others; the row's seed and position determine ``u`` in [0, 1).

    A mass is an integer, the nearest to ``2**40 * exp(...)``, so that sums do not depend on their order. ``u`` is a
    64-bit word of Philox4x32-10 (docs/sampling.md). A row's token depends neither on other rows nor on where the row
    stands in the batch. The filters apply in this order, each to the tokens that the one before kept:

    - top_k: keeps a token if fewer than ``top_k`` logits are greater, so ties with the last one stay. 0 keeps all.
    - top_p: keeps a token if the mass of greater logits is less than ``top_p`` of the total. 1 or more keeps all.
    - min_p: keeps a token if its mass is at least ``min_p`` times the largest.

    The largest logits always stay. A temperature of 0 or less takes the first of the largest logits. If logits are
    +inf, they share all the mass equally. A row that holds a NaN, or only -inf, gets -1.

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
