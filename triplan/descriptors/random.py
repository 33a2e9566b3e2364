"""Descriptors of random numbers: element i of a stream follows from seed, offset and i alone."""

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

#: The parameters of each op, which are host scalars: integers of randint, else floats.
PARAMETERS = {
    "uniform": ("low", "high"),
    "normal": ("mean", "std"),
    "exponential": ("lambd",),
    "randint": ("low", "high"),
    "bernoulli_p": ("p",),
    "bernoulli": (),
    "dropout": ("p",),
}
#: Ops of an input ``x``, of the shape and element of the result.
READING = ("bernoulli", "dropout")
#: Ops whose results may be integers and bool.
INTEGERS = ("randint", "bernoulli_p")


class RandomDescriptor(Descriptor, PlannedBy["RandomPlan"]):
    """``out[i] = f(word(seed, offset, first + i))``, where the words are those of Philox4x32-10 (docs/random.md).

    - uniform: in [low, high), rounded down to the element.
    - normal: of mean ``mean`` and standard deviation ``std``, by Box and Muller.
    - exponential: of rate ``lambd``; above 0 before it is rounded.
    - randint: integers in [low, high), of probabilities that differ by at most (high - low) / 2**64 of themselves.
    - bernoulli_p: 1 with probability ``p``, to 2**-32; else 0. bernoulli: the same of probabilities ``x``.
    - dropout: ``x / (1 - p)``; 0 with probability ``p``, whatever x is. Its backward is itself, of the gradient.

    The index i is row-major in ``out``. ``first`` (None: 0) makes a tensor part of a larger one: it gets the bits that
    the whole has there, whoever draws it, on whatever GPU.

    Attributes:
        element: element of ``out`` and ``x``.
        out_shape: shape of ``out`` and ``x``.
        global_shape: shape of the tensor that ``out`` is a block of, with as many axes; element 0 of ``out`` is its
            element ``first``, counted row-major. None: ``out`` is consecutive elements of a stream.
        state: "host": ``seed`` and ``offset`` are Python numbers, below 2**63 in magnitude. "device": ``state`` is a
            tensor (seed, offset), so that a captured graph can draw anew.
        keeps_state: of dropout with state "host": ``kept`` gets (seed, offset), with which its backward draws again.
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
        state: tuple[Operand, ...] = (Operand("state", Role.INPUT, i64, (2,)),)
        over, read = None, list[Operand]()
        if self.op in READING:
            over, read = "x", [Operand("x", Role.INPUT, self.element, self.out_shape, batch_axes=axes)]
        parameter = i64 if self.op == "randint" else ElementKind.F64
        if self.state == "host":
            state = tuple(Operand(name, Role.INPUT, i64, kind=scalar) for name in ("seed", "offset"))
        return (
            *read,
            Operand("out", Role.OUTPUT, self.element, self.out_shape, batch_axes=axes, over=over),
            *((Operand("kept", Role.OUTPUT, i64, (2,)),) if self.keeps_state else ()),
            *(state if self.state == "device" else ()),
            *(Operand(name, Role.INPUT, parameter, kind=scalar) for name in PARAMETERS[self.op]),
            *(state if self.state == "host" else ()),
            Operand("first", Role.INPUT, i64, kind=scalar, optional=True),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        state = "host" if getattr(args, "state", None) is None else "device"
        keeps = getattr(args, "kept", None) is not None
        fields = {"element": args.out.dtype, "out_shape": tuple(args.out.shape), "state": state, "keeps_state": keeps}
        return {**fields, **options}
