"""Rotary position embedding of the heads of queries and keys, optionally after an RMSNorm of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from triplan.descriptors.base import Descriptor, PlannedBy, check_bad_index
from triplan.descriptors.fields import Epsilon, Extent, Extents, OutOfBounds, ShapeField
from triplan.descriptors.operand import Operand, OperandKind, Role
from triplan.errors import shown
from triplan.sku import Element, ElementKind, IndexElement, IndexElementKind, OpCategory, field

if TYPE_CHECKING:
    from triplan.facade.rotary import CachedRotaryPlan, NormedRotaryPlan, RotaryPlan

__all__ = ["CachedRotaryDescriptor", "NormedRotaryDescriptor", "RotaryDescriptor"]


class _Rotary(Descriptor):
    """Fields that all ops share: tensors of heads, and angles from tables or frequencies.

    Attributes:
        element: element of q and k; f16 and bf16 are computed in f32.
        q_shape: (batch, sequence, heads, head_dim) of ``q`` and ``q_out``. Another order in memory is a matter of
            strides.
        k_heads: heads of ``k`` and ``k_out``, whose other extents are those of q; None: there is no k.
        rotary_dim: number of leading elements of a head that are rotated, even; None: all. The rest is copied.
        pairs: "half": element i and element i + rotary_dim / 2 are a pair; "interleaved": 2 * i and 2 * i + 1.
        table_rows: rows of ``cos`` and ``sin``, of shape (batch, table_rows, rotary_dim / 2). Tables that the whole
            batch shares have stride 0 along the batch. None: ``inv_freq``, of shape (rotary_dim / 2,), replaces them.
        table_element: element of the tables: ``element`` or f32.
        positions: whether there is an operand ``positions``, of shape (batch, sequence).
        index_element: element of the positions, i32 or i64.
        out_of_bounds: what happens at a position outside the tables: ``skip`` takes cos and sin as 0, ``clamp`` takes
            the nearest row, ``error`` does as ``skip`` and records the lowest such token in ``status``.
    """

    category: ClassVar[OpCategory] = OpCategory.ROWWISE

    element: Element
    q_shape: Annotated[Extents, ShapeField(4, 4)]
    k_heads: Extent | None = None
    rotary_dim: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    pairs: Literal["half", "interleaved"] = "half"
    table_rows: Extent | None = None
    table_element: Element = field(default=ElementKind.F32)
    positions: bool = False
    index_element: IndexElement = field(default=IndexElementKind.I64)
    out_of_bounds: OutOfBounds = "skip"

    @property
    def half(self) -> int:
        """Pairs per head."""
        return (self.q_shape[3] if self.rotary_dim is None else self.rotary_dim) // 2

    @property
    def normed(self) -> bool:
        """Whether each head is normalised first, with ``eps``."""
        return getattr(self, "eps", None) is not None

    def check_problem(self) -> None:
        length = self.q_shape[3]
        rotated = length if self.rotary_dim is None else self.rotary_dim
        if rotated % 2 or rotated > length:
            raise ValueError(
                f"rotary_dim = {shown(self.rotary_dim)}: {rotated} of {length} elements of a head: must be even and at "
                f"most {length}"
            )
        if self.table_element not in (self.element, ElementKind.F32):
            raise ValueError(f"table_element = {self.table_element}: must be {self.element} (element) or f32")
        if self.table_rows is not None and not self.positions and self.table_rows < self.q_shape[1]:
            raise ValueError(
                f"table_rows = {shown(self.table_rows)}: fewer than the {self.q_shape[1]} tokens of a sequence"
            )

    def declare_operands(self) -> tuple[Operand, ...]:
        batch, sequence, _, length = self.q_shape

        def heads(name: str, role: Role, count: int) -> tuple[Operand, ...]:
            return (Operand(name, role, self.element, (batch, sequence, count, length), batch_axes=(0, 1, 2)),)

        compute, rows = self.element.compute, self.table_rows
        tables = tuple(
            Operand(name, Role.INPUT, self.table_element, (batch, rows, self.half), batch_axes=(0,))
            for name in ("cos", "sin")
            if rows is not None
        )
        angles = (
            Operand("inv_freq", Role.INPUT, compute, (self.half,)),
            Operand("scale", Role.INPUT, compute, kind=OperandKind.HOST_SCALAR, optional=True),
        )
        positions = Operand(
            "positions",
            Role.INPUT,
            ElementKind(self.index_element.value),
            (batch, sequence),
            batch_axes=(0, 1),
            index_extents=() if rows is None else (rows,),
        )
        status = Operand("status", Role.OUTPUT, ElementKind.I64, (1,))
        return (
            *heads("q", Role.INPUT, self.q_shape[2]),
            *heads("q_out", Role.OUTPUT, self.q_shape[2]),
            *(() if self.k_heads is None else heads("k", Role.INPUT, self.k_heads)),
            *self._key_operands(),
            *self._norm_operands(),
            *(tables or angles),
            *((positions,) if self.positions else ()),
            *((status,) if self.out_of_bounds == "error" else ()),
        )

    def _key_operands(self) -> tuple[Operand, ...]:
        """What follows ``k``: where its heads are written."""
        if self.k_heads is None:
            return ()
        shape = (*self.q_shape[:2], self.k_heads, self.q_shape[3])
        return (Operand("k_out", Role.OUTPUT, self.element, shape, batch_axes=(0, 1, 2)),)

    def _norm_operands(self) -> tuple[Operand, ...]:
        return ()

    def check_status(self, args: Any) -> None:
        check_bad_index(self, self.out_of_bounds, args)

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        table, positions = (getattr(args, name, None) for name in ("cos", "positions"))
        k = getattr(args, "k", None)
        rotated = 2 * (args.inv_freq if table is None else table).shape[-1]
        found: dict[str, Any] = {
            "element": args.q.dtype,
            "q_shape": tuple(args.q.shape),
            "k_heads": None if k is None else k.shape[2],
            "rotary_dim": None if rotated == args.q.shape[3] else rotated,
            "positions": positions is not None,
        }
        if table is not None:
            found |= {"table_rows": table.shape[1], "table_element": table.dtype}
        if positions is not None:
            found["index_element"] = positions.dtype
        return {**found, **options}


class RotaryDescriptor(_Rotary, PlannedBy["RotaryPlan"]):
    """Each pair (x, y) of a head of token (b, s) becomes ``(x * cos - y * sin, y * cos + x * sin)``, with one cos and
    sin for each pair of the token (Su et al., "RoFormer", 2021). ``q`` and ``k`` are rotated in one launch.

    The position of token (b, s) is ``positions[b, s]``, or s without ``positions``. With ``table_rows``, cos and sin
    are row ``position`` of the tables. Without it, they are those of the angle ``position * inv_freq``, times ``scale``
    (None: 1). The position and the angle are rounded to f32 (f64 for f64); the tolerance holds while angles, and their
    sines times ``scale``, are 0 or normal numbers. The inverse is the backward op.

    Attributes:
        inverse: whether sin is negated, which rotates back.
    """

    op: Literal["rotary"] = "rotary"
    inverse: bool = False


class NormedRotaryDescriptor(_Rotary, PlannedBy["NormedRotaryPlan"]):
    """rotary of ``x * rstd * weight`` with ``rstd = 1 / sqrt(mean(x**2) + eps)`` for each head x of q and k: RMSNorm of
    each head, then rotary, with no rounding between them.

    ``q_rstd`` and ``k_rstd`` (one value a head, in f32, or f64 for f64) are written for the backward, which is the
    inverse of rotary followed by rms_norm_backward. The tolerance holds where those of rms_norm and rotary both hold.

    Attributes:
        eps: the number added to the mean square.
    """

    op: Literal["normed_rotary"] = "normed_rotary"
    eps: Epsilon = 1e-6

    def _norm_operands(self) -> tuple[Operand, ...]:
        batch, sequence, count, length = self.q_shape
        found: list[Operand] = []
        for name, heads in (("q", count), ("k", self.k_heads)):
            if heads is not None:
                shape = (batch, sequence, heads)
                found.append(Operand(f"{name}_weight", Role.INPUT, self.element, (length,)))
                rstd = Operand(f"{name}_rstd", Role.OUTPUT, self.element.compute, shape, batch_axes=(0, 1, 2))
                found.append(rstd)
        return tuple(found)


class CachedRotaryDescriptor(_Rotary, PlannedBy["CachedRotaryPlan"]):
    """rotary for inference: k and v of token (b, s) are written to row ``slots[b, s]`` of paged caches, in the same
    launch. With ``eps``, each head of q and k is normalised first, as in normed_rotary.

    The caches are (pages, page_size, k_heads, head_dim or v_dim); slot i is row ``i % page_size`` of page
    ``i // page_size``. Tokens with a negative slot (padding), or with one beyond the end (which is bad), are not
    written. Other rows keep their bits; v is copied bit by bit. Written tokens should have slots of their own: of those
    that share one, the guarantee's ``duplicates`` says which stays, of each element by itself. ``status`` is the lowest
    token of a bad slot; without any, the lowest of a bad position, plus the number of tokens.

    Attributes:
        k_heads: heads of ``k`` and ``v``.
        pages: pages of the caches.
        page_size: tokens of a page.
        v_dim: elements of a head of ``v``; None: as many as of q.
        slot_element: element of the slots, i32 or i64.
        eps: the number added to the mean square; None: no norm, and no weights.
    """

    op: Literal["cached_rotary"] = "cached_rotary"
    k_heads: Extent
    pages: Extent
    page_size: Extent
    v_dim: Extent | None = None
    slot_element: IndexElement = field(default=IndexElementKind.I64)
    eps: Epsilon | None = None

    @property
    def slots(self) -> int:
        """Rows of each cache."""
        return self.pages * self.page_size

    def _key_operands(self) -> tuple[Operand, ...]:
        batch, sequence, _, length = self.q_shape
        v_dim = length if self.v_dim is None else self.v_dim
        v = Operand("v", Role.INPUT, self.element, (batch, sequence, self.k_heads, v_dim), batch_axes=(0, 1, 2))
        # (Tokens are no batch of the slots: two of them may meet in one.)
        slots = Operand(
            "slots",
            Role.INPUT,
            ElementKind(self.slot_element.value),
            (batch, sequence),
            index_extents=(self.slots,),
        )
        caches = (
            Operand(name, Role.IN_OUT, self.element, (self.pages, self.page_size, self.k_heads, n), batch_axes=(2,))
            for name, n in (("k_cache", length), ("v_cache", v_dim))
        )
        return (v, slots, *caches)

    def _norm_operands(self) -> tuple[Operand, ...]:
        names = ("q_weight", "k_weight") if self.normed else ()
        return tuple(Operand(name, Role.INPUT, self.element, (self.q_shape[3],)) for name in names)

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        pages, page_size = args.k_cache.shape[:2]
        found = {"pages": pages, "page_size": page_size, "slot_element": args.slots.dtype}
        found["v_dim"] = None if args.v.shape[3] == args.q.shape[3] else args.v.shape[3]
        return {**super().fields_from_args(args), **found, **options}


#: A descriptor of an op of this family.
AnyRotaryDescriptor: TypeAlias = RotaryDescriptor | NormedRotaryDescriptor | CachedRotaryDescriptor
