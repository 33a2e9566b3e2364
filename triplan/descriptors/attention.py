"""Attention, ``out = softmax(scale * q @ k.T + mask) @ v`` for each head, and its gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from triplan.descriptors.base import Descriptor, PlannedBy
from triplan.descriptors.fields import Extent, NonNegative
from triplan.descriptors.operand import Operand, OperandKind, Role
from triplan.sku import Element, ElementKind, MathPrecision, OpCategory, OptionalElement, OptionalMath, field

if TYPE_CHECKING:
    from triplan.facade.attention import AttentionBackwardPlan, AttentionPlan

__all__ = ["AttendingDescriptor", "AttentionBackwardDescriptor", "AttentionDescriptor"]


class AttendingDescriptor(Descriptor):
    """Fields that attention and its backward op share.

    Query i stands at position ``i`` among the keys, or with ``align`` ``"end"`` at ``i + keys - queries``. It sees key
    j if ``j <= position`` (``causal``), ``j >= position - window_left``, ``j <= position + window_right``, and the mask
    allows it. A query that sees no key has the result 0 and the lse -inf; its gradients are 0.

    Attributes:
        batch: number of sequences.
        queries, keys: query rows and key rows of a sequence.
        heads: heads of q; a multiple of ``key_heads``. Consecutive heads share a head of k and v.
        key_heads: heads of k and v.
        head_dim: elements of a query and of a key.
        value_dim: elements of a value; by default ``head_dim``.
        element: of q, k, v, out and probabilities; f16 and bf16 are computed in f32.
        math: precision to which f32 factors are rounded before they are multiplied: f32 (None), tf32x3 or tf32.
        causal: whether a query sees no key after its position.
        align: ``start``: query 0 stands at key 0, as in torch; ``end``: the last at the last.
        window_left, window_right: keys seen before and after a query's position; None: all.
        softcap: c > 0 replaces each scaled score s by ``c * tanh(s / c)``; 0: none.
        mask: element of ``mask``: ``bool`` (True: seen), or f32 or ``element``, added to the score.
        sequences: number of sequences of any lengths packed into a batch of 1, or None. ``queries`` and ``keys`` count
            the rows of all, positions those of a sequence. No mask.
        slopes: whether ``slopes * (key - position)`` is added to a scaled score (ALiBi).
        dropout: whether probabilities are dropped, with probability ``dropout_p`` (docs/attention.md).
    """

    category: ClassVar[OpCategory] = OpCategory.ATTENTION

    batch: Extent
    queries: Extent
    keys: Extent
    heads: Extent
    key_heads: Extent
    head_dim: Extent
    value_dim: Extent | None = None
    element: Element
    math: OptionalMath = field(default=None)
    causal: bool = False
    align: Literal["start", "end"] = "end"
    window_left: NonNegative | None = None
    window_right: NonNegative | None = None
    softcap: Annotated[float, Field(ge=0, lt=1e30), AfterValidator(lambda cap: cap + 0.0)] = 0.0
    mask: OptionalElement = field(default=None)
    sequences: Extent | None = None
    slopes: bool = False
    dropout: bool = False

    def check_problem(self) -> None:
        if self.key_heads == 0 or self.heads % self.key_heads:
            raise ValueError(f"heads = {self.heads}: must be a multiple of key_heads = {self.key_heads}, above 0")
        if self.head_dim == 0 or self.values == 0:
            raise ValueError(f"head_dim, value_dim = {self.head_dim}, {self.values}: must be above 0")
        of_f32 = (MathPrecision.TF32X3, MathPrecision.TF32) if self.element is ElementKind.F32 else ()
        if self.math not in (None, *of_f32):
            raise ValueError(f"math = {self.math}: must be None, or tf32x3 or tf32 for f32")
        if self.causal and self.window_right is not None:
            raise ValueError(f"window_right = {self.window_right}: a causal query sees no key after its position")
        if self.mask not in (None, ElementKind.BOOL, ElementKind.F32, self.element):
            raise ValueError(f"mask = {self.mask}: must be bool, f32 or {self.element}")
        if self.sequences is not None and (self.batch != 1 or self.mask is not None):
            raise ValueError(f"sequences = {self.sequences}: needs batch = 1 (not {self.batch}) and no mask")

    @property
    def values(self) -> int:
        """Elements of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def group(self) -> int:
        """Query heads that share a head of k and v."""
        return self.heads // self.key_heads

    @property
    def shift(self) -> int:
        """The position of query 0 among the keys."""
        return self.keys - self.queries if self.align == "end" else 0

    @property
    def right(self) -> int | None:
        """Keys that a query sees after its position; None: all."""
        return 0 if self.causal else self.window_right

    @property
    def multiplicands(self) -> MathPrecision:
        """The precision to which the factors of products are rounded."""
        return self.math or MathPrecision(self.element.value)

    def _queries(self, name: str, role: Role, width: int) -> Operand:
        shape = (self.batch, self.queries, self.heads, width)
        return Operand(name, role, self.element, shape, batch_axes=(0, 1, 2))

    def _keys(self, name: str, role: Role, width: int) -> Operand:
        return Operand(name, role, self.element, (self.batch, self.keys, self.key_heads, width), batch_axes=(0,))

    def _lse(self, role: Role) -> Operand:
        return Operand("lse", role, self.element.compute, (self.batch, self.heads, self.queries), batch_axes=(0, 1, 2))

    def _others(self) -> tuple[Operand, ...]:
        shape = (self.batch, self.heads, self.queries, self.keys)
        starts = () if self.sequences is None else ("query_starts", "key_starts")
        return (
            *(() if self.mask is None else (Operand("mask", Role.INPUT, self.mask, shape, batch_axes=(0,)),)),
            Operand("scale", Role.INPUT, self.element.compute, kind=OperandKind.HOST_SCALAR, optional=True),
            *(Operand(name, Role.INPUT, ElementKind.I32, ((self.sequences or 0) + 1,)) for name in starts),
            *((Operand("slopes", Role.INPUT, self.element.compute, (self.heads,)),) if self.slopes else ()),
            *(self._draws() if self.dropout else ()),
        )

    def _draws(self) -> tuple[Operand, ...]:
        probability = Operand("dropout_p", Role.INPUT, ElementKind.F64, kind=OperandKind.HOST_SCALAR)
        return Operand("state", Role.INPUT, ElementKind.I64, (2,)), probability

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        batch, queries, heads, head_dim = args.q.shape
        _, keys, key_heads, values = args.v.shape
        mask, starts = getattr(args, "mask", None), getattr(args, "query_starts", None)
        return {
            "batch": batch,
            "queries": queries,
            "keys": keys,
            "heads": heads,
            "key_heads": key_heads,
            "head_dim": head_dim,
            "value_dim": None if values == head_dim else values,
            "element": args.q.dtype,
            "mask": None if mask is None else mask.dtype,
            "sequences": None if starts is None else starts.shape[0] - 1,
            "slopes": getattr(args, "slopes", None) is not None,
            "dropout": getattr(args, "state", None) is not None,
            **options,
        }


class AttentionDescriptor(AttendingDescriptor, PlannedBy["AttentionPlan"]):
    """``out = softmax(scale * q @ k.T + mask) @ v`` for each sequence and head, and ``lse``, the logarithm of each
    query's sum of exponentials (torch's scaled_dot_product_attention, FlashAttention).

    Operands: ``q`` and ``out`` (batch, queries, heads, head_dim or value_dim), ``k`` and ``v`` (batch, keys, key_heads,
    head_dim or value_dim), ``lse`` (batch, heads, queries) in f32 (f64 for f64), ``mask`` (batch, heads, queries,
    keys), ``query_starts`` and ``key_starts`` (sequences + 1,) in i32, ``slopes`` and ``sink`` (heads,) in lse's
    element, and ``state`` (2,), seed and offset of dropout, in i64. ``scale`` (None: ``head_dim ** -0.5``) and
    ``dropout_p`` are numbers in Args. Strides express any order of axes in memory, and 0 broadcasts.

    Attributes:
        sink: whether each query has one more score, ``sink``, for a key whose value is 0.
    """

    op: Literal["attention"] = "attention"
    sink: bool = False

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            self._queries("q", Role.INPUT, self.head_dim),
            self._keys("k", Role.INPUT, self.head_dim),
            self._keys("v", Role.INPUT, self.values),
            self._queries("out", Role.OUTPUT, self.values),
            self._lse(Role.OUTPUT),
            *self._others(),
            *((Operand("sink", Role.INPUT, self.element.compute, (self.heads,)),) if self.sink else ()),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return {"sink": getattr(args, "sink", None) is not None} | super().fields_from_args(args, **options)


class AttentionBackwardDescriptor(AttendingDescriptor, PlannedBy["AttentionBackwardPlan"]):
    """Gradients of attention: with scores s, ``p = exp(s - lse)`` and ``ds = p * (dout @ v.T - sum(dout * out))``,
    ``dq = scale * ds @ k``, ``dk = scale * ds.T @ q`` and ``dv = p.T @ dout``. The gradient of a head of k or v that
    several query heads share is the sum over these heads.

    Operands: ``dout`` has the shape of ``out``; ``dq``, ``dk`` and ``dv`` have those of q, k and v; the others are as
    in attention. A sink is no operand: ``lse`` holds all that is needed of it. With a softcap, ds is also multiplied
    by the derivative of the softcap. With dropout, p in dv and ``dout @ v.T`` are multiplied by what multiplied the
    probabilities: 0 or ``1 / (1 - dropout_p)``.
    """

    op: Literal["attention_backward"] = "attention_backward"

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            self._queries("dout", Role.INPUT, self.values),
            self._queries("q", Role.INPUT, self.head_dim),
            self._keys("k", Role.INPUT, self.head_dim),
            self._keys("v", Role.INPUT, self.values),
            self._queries("out", Role.INPUT, self.values),
            self._lse(Role.INPUT),
            self._queries("dq", Role.OUTPUT, self.head_dim),
            self._keys("dk", Role.OUTPUT, self.head_dim),
            self._keys("dv", Role.OUTPUT, self.values),
            *self._others(),
        )
