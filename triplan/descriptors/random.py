"""Descriptors of random numbers: element i of a stream is a function of seed, offset and i alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from triplan.descriptors.base import Descriptor, PlannedBy
from triplan.descriptors.fields import AnyShape
from triplan.descriptors.operand import Operand, OperandKind, Role
from triplan.errors import shown
from triplan.sku import Element, ElementKind, OpCategory

if TYPE_CHECKING:
    from triplan.facade.random import RandomPlan

__all__ = ["RandomDescriptor"]

#: The parameters of each op, as host scalars: integers for randint, floats for the others.
PARAMETERS = {
    "uniform": ("low", "high"),
    "normal": ("mean", "std"),
    "exponential": ("lambd",),
    "randint": ("low", "high"),
    "bernoulli_p": ("p",),
    "bernoulli": (),
    "dropout": ("p",),
}
#: Ops that read an input ``x``, which has the shape and element of the result.
READING = ("bernoulli", "dropout")
#: Ops whose results may be integers and bool.
INTEGERS = ("randint", "bernoulli_p")


class RandomDescriptor(Descriptor, PlannedBy["RandomPlan"]):
    """``out[i] = f(word(seed, offset, first + i))``, where the words are those of Philox4x32-10 (docs/random.md).

    - uniform: in [low, high), rounded down to the element.
    - normal: mean ``mean`` and standard deviation ``std``, by the Box-Muller transform.
    - exponential: rate ``lambd``; positive before it is rounded.
    - randint: integers in [low, high); their probabilities differ by a relative (high - low) / 2**64 at most.
    - bernoulli_p: 1 with probability ``p`` (to within 2**-32), else 0. bernoulli: the same, with probabilities ``x``.
    - dropout: 0 with probability ``p``, whatever x is, else ``x / (1 - p)``. Its backward is dropout of the gradient.

    The index i is row-major in ``out``. ``first`` (None: 0) makes ``out`` a part of a larger tensor: it gets the same
    bits as that part of the whole, on any GPU.

    Attributes:
        element: element of ``out`` and ``x``.
        out_shape: shape of ``out`` and ``x``.
        global_shape: shape of the larger tensor of which ``out`` is a block, with as many axes. Element 0 of ``out`` is
            element ``first`` of that tensor, counted row-major. None: ``out`` is consecutive elements of a stream.
        state: "host": ``seed`` and ``offset`` are Python numbers, below 2**63 in magnitude. "device": ``state`` is a
            tensor (seed, offset), so that each replay of a captured graph can draw new numbers; ``offset`` (None: 0),
            a Python number, is added to its second element, modulo 2**64, so that several draws can share it.
        keeps_state: for dropout with state "host": whether (seed, offset) is written to ``kept``, so that the backward
            draws the same numbers.
    """

    category: ClassVar[OpCategory] = OpCategory.RANDOM

    op: Literal["uniform", "normal", "exponential", "randint", "bernoulli_p", "bernoulli", "dropout"]
    element: Element
    out_shape: AnyShape
    global_shape: AnyShape | None = None
    state: Literal["host", "device"] = "host"
    keeps_state: bool = False

    @property
    def is_wide(self) -> bool:
        """Whether an element takes two words of the stream."""
        return self.op == "randint" or (
            self.element is ElementKind.F64 and self.op in ("uniform", "normal", "exponential")
        )

    def check_problem(self) -> None:
        if not self.element.is_floating_point and self.op not in INTEGERS:
            raise ValueError(f"element = {self.element}: {self.op} takes floats")
        if self.keeps_state and (self.op != "dropout" or self.state != "host"):
            raise ValueError(f"keeps_state = True: of dropout with state 'host', not of {self.op} with {self.state!r}")
        if self.global_shape is not None and (
            len(self.global_shape) != len(self.out_shape)
            or any(n > whole for n, whole in zip(self.out_shape, self.global_shape, strict=True))
        ):
            raise ValueError(f"global_shape = {shown(self.global_shape)}: out_shape {self.out_shape} is no part of it")

    def declare_operands(self) -> tuple[Operand, ...]:
        axes = tuple(range(len(self.out_shape)))
        i64, scalar = ElementKind.I64, OperandKind.HOST_SCALAR
        state = (Operand("state", Role.INPUT, i64, (2,)),) if self.state == "device" else ()
        names = ("offset",) if state else ("seed", "offset")
        given = tuple(Operand(name, Role.INPUT, i64, kind=scalar, optional=bool(state)) for name in names)
        over: tuple[str, ...] = ()
        read = list[Operand]()
        if self.op in READING:
            over, read = ("x",), [Operand("x", Role.INPUT, self.element, self.out_shape, batch_axes=axes)]
        parameter = i64 if self.op == "randint" else ElementKind.F64
        return (
            *read,
            Operand("out", Role.OUTPUT, self.element, self.out_shape, batch_axes=axes, over=over),
            *((Operand("kept", Role.OUTPUT, i64, (2,)),) if self.keeps_state else ()),
            *state,
            *(Operand(name, Role.INPUT, parameter, kind=scalar) for name in PARAMETERS[self.op]),
            *given,
            Operand("first", Role.INPUT, i64, kind=scalar, optional=True),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        state = "host" if getattr(args, "state", None) is None else "device"
        keeps = getattr(args, "kept", None) is not None
        fields = {"element": args.out.dtype, "out_shape": tuple(args.out.shape), "state": state, "keeps_state": keeps}
        return {**fields, **options}
