"""Descriptors of optimizer steps, and of clipping: one op updates a list of tensors of any sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator
from typing_extensions import Self

from triplan.descriptors.base import Descriptor, PlannedBy
from triplan.descriptors.expressions.expression import Expr, flattened, operand
from triplan.descriptors.expressions.inputs import Input, Nodes, Results, as_tuples, check_inputs
from triplan.descriptors.expressions.tree import Tree, checked
from triplan.descriptors.fields import Extents
from triplan.descriptors.operand import Operand, OperandKind, Role
from triplan.errors import InvalidProblem, shown
from triplan.sku import Element, ElementKind, OpCategory, OptionalElement, field
from triplan.sku.facts import cached_property

if TYPE_CHECKING:
    from triplan.facade.optim import AdamPlan, ClipPlan, LionPlan, ListExpressionPlan, SGDPlan, TotalNormPlan
    from triplan.sku.model import Converted

__all__ = [
    "AdamDescriptor",
    "ClipDescriptor",
    "LionDescriptor",
    "ListExpressionDescriptor",
    "SGDDescriptor",
    "TotalNormDescriptor",
]

#: JSON has no infinity: pydantic writes these words.
_INFINITE = ("Infinity", "-Infinity", "inf", "-inf")
if TYPE_CHECKING:
    Order = Converted[float, str]
    Kinds = Sequence[tuple[str, Any, str]]
else:
    Order = Annotated[float, BeforeValidator(lambda x: float(x) if x in _INFINITE else x)]
    Kinds = Annotated[tuple[tuple[str, Element, Literal["list", "one", "number"]], ...], BeforeValidator(as_tuples)]
F32, F64 = ElementKind.F32, ElementKind.F64


def _check_list(sizes: tuple[int, ...], **elements: ElementKind | None) -> None:
    for name, found in elements.items():
        if found is not None and (not found.is_floating_point or found is F64):
            raise ValueError(f"{name} = {shown(found)}: updates take f32, bf16 and f16")
    if len(sizes) >= 2**31:
        raise ValueError(f"sizes: {len(sizes)} tensors; must be fewer than 2**31")


class UpdateDescriptor(Descriptor):
    """Fields of all optimizer steps. Parameters, gradients and states are vectors of ``sum(sizes)`` elements.

    Args hold each vector as one tensor, or as a list of contiguous tensors of ``sizes`` elements, anywhere in memory.
    Elements are computed in f32. ``steps`` (one number a tensor) counts updates: a run adds 1 to it, and the new count
    is the t of the formulas. ``hyper`` is a tensor of the hyperparameters on the device, so that they may change
    between replays of a CUDA graph.

    Attributes:
        element: element of the parameters.
        sizes: elements of each tensor.
        grad_element: element of the gradients; None: that of the parameters.
        state_element: element of the states; None: that of the parameters.
        maximize: whether the gradients are negated.
        scaled: whether Args have ``grad_scale``, by which gradients are divided, and ``found_inf``: if it is not 0, the
            whole update is skipped, and ``steps`` stays as it is (torch.amp.GradScaler).
        copy_element: element of ``copy``, to which updated parameters are rounded too: a model's, whose f32 masters are
            updated. None: there is none.
        stochastic: whether parameters, which are bf16, are rounded up or down at random, so that they are exact on
            average: f32's upper half after a uniform number below one unit of it is added. The numbers are those of
            Philox4x32-10 of the key ``seed``; the counter's words are, from the first, the element's place in its
            tensor over 8, 0, t, and the tensor's place in the list. Element i takes 16 bits, the i % 8-th of the draw.
    """

    category: ClassVar[OpCategory] = OpCategory.OPTIM
    #: The operands that are vectors of ``sizes``, besides the parameters and gradients.
    states: ClassVar[tuple[str, ...]] = ()
    #: How many of ``states``, from the first, every problem has.
    always: ClassVar[int] = 1
    #: What ``hyper`` holds, in order.
    hyper: ClassVar[tuple[str, ...]] = ()

    op: str
    element: Element
    sizes: Extents
    grad_element: OptionalElement = field(default=None)
    state_element: OptionalElement = field(default=None)
    maximize: bool = False
    scaled: bool = False
    copy_element: OptionalElement = field(default=None)
    stochastic: bool = False

    @property
    def kept(self) -> tuple[str, ...]:
        """The states that this problem has."""
        return self.states

    @property
    def streams(self) -> tuple[str, ...]:
        """The operands that may be given as lists of tensors."""
        return ("param", "grad", *self.kept, *(("copy",) if self.copy_element else ()))

    def check_problem(self) -> None:
        elements = ("element", "grad_element", "state_element", "copy_element")
        _check_list(self.sizes, **{n: getattr(self, n) for n in elements})
        if self.stochastic and (self.element is not ElementKind.BF16 or self.copy_element):
            raise ValueError(f"stochastic = True: takes bf16 parameters without a copy, not element = {self.element}")

    def declare_operands(self) -> tuple[Operand, ...]:
        shape, state = (sum(self.sizes),), self.state_element or self.element
        states = [Operand(name, Role.IN_OUT, state, shape, batch_axes=(0,)) for name in self.kept]
        scales = ("grad_scale", "found_inf") if self.scaled else ()
        return (
            Operand("param", Role.IN_OUT, self.element, shape, batch_axes=(0,)),
            Operand("grad", Role.INPUT, self.grad_element or self.element, shape, batch_axes=(0,)),
            *states[: self.always],
            Operand("steps", Role.IN_OUT, F32, (len(self.sizes),), batch_axes=(0,)),
            Operand("hyper", Role.INPUT, F64, (len(self.hyper),)),
            *states[self.always :],
            *(Operand(name, Role.INPUT, F32, (1,)) for name in scales),
            *((Operand("copy", Role.IN_OUT, self.copy_element, shape, batch_axes=(0,)),) if self.copy_element else ()),
            *((Operand("seed", Role.INPUT, ElementKind.I64, (1,)),) if self.stochastic else ()),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        listed = isinstance(args.param, (list, tuple))
        params, grads = (list(x) if listed else [x] for x in (args.param, args.grad))
        states = next((getattr(args, name) for name in cls.states if getattr(args, name) is not None), None)
        first, copy = ((x[0] if x else None) if listed else x for x in (states, args.copy))
        found = {
            "element": params[0].dtype if params else "f32",
            "grad_element": grads[0].dtype if grads else None,
            "state_element": None if first is None else first.dtype,
            "sizes": tuple(p.numel() for p in params),
            "scaled": args.grad_scale is not None,
            "copy_element": None if copy is None else copy.dtype,
            "stochastic": args.seed is not None,
        }
        return {**found, **options}

    @classmethod
    def example(cls, element: ElementKind) -> Self:
        """A problem of ``element`` with an empty tensor, one of one element, one of odd size and a longer one."""
        return cls(op=cls.ops()[0], element=element, sizes=(0, 1, 77, 300))


class AdamDescriptor(UpdateDescriptor, PlannedBy["AdamPlan"]):
    """``m = b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * g**2; p -= lr * (m / (1 - b1**t)) / (sqrt(v / (1 - b2**t)) + eps)``.

    Kingma and Ba, "Adam: a method for stochastic optimization", 2015. ``decoupled`` weight decay multiplies p by
    ``1 - lr * weight_decay`` first (AdamW: Loshchilov and Hutter, 2019); otherwise ``weight_decay * p`` is added to g.
    ``hyper``: lr, beta1, beta2, eps, weight_decay. The tolerance holds while v stays below half of the largest f32.

    Attributes:
        decoupled: whether weight decay is decoupled from the gradient.
        amsgrad: whether the largest v so far takes the place of v (Reddi et al., 2018); kept in ``max_exp_avg_sq``.
    """  # noqa: E501 (OPS.md shows the first line as one formula)

    states = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    always = 2
    hyper = ("lr", "beta1", "beta2", "eps", "weight_decay")

    op: Literal["adam"] = "adam"
    decoupled: bool = True
    amsgrad: bool = False

    @property
    def kept(self) -> tuple[str, ...]:
        return self.states if self.amsgrad else self.states[:2]

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return super().fields_from_args(args, amsgrad=args.max_exp_avg_sq is not None, **options)


class SGDDescriptor(UpdateDescriptor, PlannedBy["SGDPlan"]):
    """``b = momentum * b + (1 - dampening) * g; p -= lr * b``, with ``weight_decay * p`` added to g.

    The first update of a tensor has ``b = g``. ``nesterov``: ``p -= lr * (g + momentum * b)`` (Sutskever et al., 2013).
    ``hyper``: lr, momentum, dampening, weight_decay.

    Attributes:
        momentum: whether there is a momentum buffer; without one, ``p -= lr * g``.
        nesterov: whether the momentum is Nesterov's.
    """

    states = ("momentum_buffer",)
    always = 0
    hyper = ("lr", "momentum", "dampening", "weight_decay")

    op: Literal["sgd"] = "sgd"
    momentum: bool = True
    nesterov: bool = False

    @property
    def kept(self) -> tuple[str, ...]:
        return self.states if self.momentum else ()

    def check_problem(self) -> None:
        super().check_problem()
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov = True: needs momentum = True")

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return super().fields_from_args(args, momentum=args.momentum_buffer is not None, **options)


class LionDescriptor(UpdateDescriptor, PlannedBy["LionPlan"]):
    """``p = (1 - lr * weight_decay) * p - lr * sign(b1 * m + (1 - b1) * g); m = b2 * m + (1 - b2) * g``.

    Chen et al., "Symbolic discovery of optimization algorithms", 2023. ``hyper``: lr, beta1, beta2, weight_decay.
    """

    states = ("exp_avg",)
    hyper = ("lr", "beta1", "beta2", "weight_decay")

    op: Literal["lion"] = "lion"


class ListProblem(Descriptor):
    """Fields of what is computed of one list. ``x`` is a vector of ``sum(sizes)`` elements.

    Args hold it as one tensor, or as a list of contiguous tensors of ``sizes`` elements, anywhere in memory.

    Attributes:
        element: element of x.
        sizes: elements of each tensor.
    """

    category: ClassVar[OpCategory] = OpCategory.OPTIM
    #: The operands that may be given as lists of tensors.
    streams: ClassVar[tuple[str, ...]] = ("x",)

    op: str
    element: Element
    sizes: Extents

    def check_problem(self) -> None:
        _check_list(self.sizes, element=self.element)

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        tensors = list(args.x) if isinstance(args.x, (list, tuple)) else [args.x]
        return {"element": tensors[0].dtype if tensors else "f32", "sizes": [t.numel() for t in tensors], **options}

    @classmethod
    def example(cls, element: ElementKind) -> Self:
        """A problem of ``element`` with an empty tensor, one of one element, one of odd size and a longer one."""
        return cls(op=cls.ops()[0], element=element, sizes=(0, 1, 77, 300))


class TotalNormDescriptor(ListProblem, PlannedBy["TotalNormPlan"]):
    """``norm = (sum |x|**order) ** (1 / order)`` over all elements of a list (torch.nn.utils.get_total_norm).

    With ``each``, over those of each tensor, a norm a tensor (torch._foreach_norm). Accumulated in f64. The largest
    magnitude for the order inf, the smallest for -inf; NaN if there is one. Of no elements the norm is 0, of a negative
    order inf.

    Attributes:
        order: any number but 0.
        each: whether there is a norm of each tensor, instead of one of all.
    """

    op: Literal["total_norm"] = "total_norm"
    order: Order = field(default=2.0)
    each: bool = False

    def check_problem(self) -> None:
        super().check_problem()
        if self.order == 0 or math.isnan(self.order):
            raise ValueError(f"order = {shown(self.order)}: must be a number other than 0")

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            Operand("x", Role.INPUT, self.element, (sum(self.sizes),)),
            Operand("norm", Role.OUTPUT, F64, (len(self.sizes) if self.each else 1,)),
        )


class ClipDescriptor(ListProblem, PlannedBy["ClipPlan"]):
    """``clip_norm``: ``x *= min(1, limit / (norm + 1e-6))``; ``clip_value``: ``x = min(max(x, -limit), limit)``.

    As torch.nn.utils.clip_grads_with_norm_ and clip_grad_value_. NaN stays NaN; a norm that is NaN makes all of x NaN.
    """

    op: Literal["clip_norm", "clip_value"]

    def declare_operands(self) -> tuple[Operand, ...]:
        norm = (Operand("norm", Role.INPUT, F64, (1,)),) if self.op == "clip_norm" else ()
        return (
            Operand("x", Role.IN_OUT, self.element, (sum(self.sizes),), batch_axes=(0,)),
            Operand("limit", Role.INPUT, F64, kind=OperandKind.HOST_SCALAR),
            *norm,
        )


class ListExpressionDescriptor(Descriptor, PlannedBy["ListExpressionPlan"]):
    """Expressions of lists of tensors: every result is a tree of functions of the elements at one place.

    A list is a vector of ``sum(sizes)`` elements. Args hold it as one tensor, or as a list of contiguous tensors of
    ``sizes`` elements, anywhere in memory. ``of`` builds the descriptor from expressions of ``tp.expr`` and operand
    specifications.

    Attributes:
        sizes: elements of each tensor.
        inputs: (name, element, kind) of each operand that is read; its kind is "list", "one" (an element on the device,
            of shape (), for all tensors) or "number" (in Args).
        nodes: the nodes of the trees, as in ``ExpressionDescriptor``.
        results: (name, position of its node, element) of each result; element None: by torch's type promotion. A
            result with the name and element of a list that is read takes its place.
    """

    category: ClassVar[OpCategory] = OpCategory.OPTIM

    op: Literal["list_expression"] = "list_expression"
    sizes: Extents
    inputs: Kinds
    nodes: Nodes
    results: Results

    @classmethod
    def example(cls, element: ElementKind) -> Self:
        """With an empty tensor, one of one element, one of odd size and a longer one."""
        x, y = operand("x"), operand("y")
        return cls.of({"x": x * y + x}, (0, 1, 77, 300), x=(element, "list"), y=(element, "list"))

    @classmethod
    def of(
        cls,
        results: Mapping[str, Expr],
        sizes: Sequence[int],
        elements: Mapping[str, Any] | None = None,
        /,
        **inputs: tuple[Any, str],
    ) -> Self:
        """The problem of ``results``, with ``inputs`` as (element, kind) by name.

        ``elements``: those of results by name; by default of the list of that name, else by torch's type promotion.
        Raises ``InvalidProblem``.
        """
        for name, root in results.items():
            if not isinstance(root, Expr):
                raise InvalidProblem(f"{name}: {shown(root)} is not an expression")
        nodes, roots = flattened(results.values())
        known = {name: element for name, (element, kind) in inputs.items() if kind == "list"} | dict(elements or {})
        return cls(
            sizes=tuple(sizes),
            inputs=[(name, *spec) for name, spec in inputs.items()],
            nodes=nodes,
            results=[(name, at, known.get(name)) for name, at in zip(results, roots, strict=True)],
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        results: Mapping[str, Expr] = options.pop("results")
        nodes, roots = flattened(results.values())
        names, inputs, sizes = [str(n[1]) for n in nodes if n[0] == "operand"], [], None

        def listed(name: str) -> list[Any]:
            value = getattr(args, name)
            return list(value) if isinstance(value, (list, tuple)) else [value]

        real = (
            "f64" if any(str(getattr(t, "dtype", "")) == "torch.float64" for n in names for t in listed(n)) else "f32"
        )
        for name in names:
            value = getattr(args, name)
            if isinstance(value, (bool, int, float)):
                inputs.append((name, real if isinstance(value, float) else "i64", "number"))
            elif not isinstance(value, (list, tuple)) and not value.dim():
                inputs.append((name, value.dtype, "one"))
            else:
                tensors = listed(name)
                sizes = [t.numel() for t in tensors] if sizes is None else sizes
                inputs.append((name, tensors[0].dtype if tensors else "f32", "list"))
        outs = []
        for name, at in zip(results, roots, strict=True):
            first = next(iter(listed(name)), None)
            outs.append((name, at, "f32" if first is None else first.dtype))
        return {"sizes": sizes or (), "inputs": inputs, "nodes": nodes, "results": outs, **options}

    def inputs_read(self) -> tuple[Input, ...]:
        """The operands that are read, in order."""
        shapes = {"list": self.shape, "one": (), "number": None}
        return tuple(Input(name, element, shapes[kind]) for name, element, kind in self.inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of every list."""
        return (sum(self.sizes),)

    @property
    def streams(self) -> tuple[str, ...]:
        """The operands that may be given as lists of tensors: those that are read, then others that are written."""
        read = tuple(name for name, _, kind in self.inputs if kind == "list")
        return (*read, *(name for name, _, _ in self.results if name not in read))

    @property
    def element(self) -> ElementKind:
        """The element of the first result."""
        return self.tree.results[0][1]

    @cached_property
    def tree(self) -> Tree:
        """The checked tree."""
        operands = {i.name: (i.element, i.rank) for i in self.inputs_read()}
        return checked(self.nodes, operands, [(at, element) for _, at, element in self.results])

    def check_problem(self) -> None:
        if len(self.sizes) >= 2**31:
            raise ValueError(f"sizes: {len(self.sizes)} tensors; must be fewer than 2**31")
        lists = {name: element for name, element, kind in self.inputs if kind == "list"}
        if not lists or not self.results:
            raise ValueError("no operand is a list, or there is no result; at least one of each must be")
        check_inputs(self.inputs_read(), [name for name, _, _ in self.results if name not in lists], 0)
        stated = list(zip(self.results, self.tree.results, strict=True))
        if len({name for name, _, _ in self.results}) < len(self.results):
            raise ValueError("names of results must be distinct")
        for (name, _, _), (_, element) in stated:
            if name in lists and element is not lists[name]:
                raise ValueError(f"{name}: a result of {element} cannot take the place of a list of {lists[name]}")
        # Elements are filled in, so that equal problems have equal keys.
        self.__dict__["results"] = tuple((name, at, element) for (name, at, _), (_, element) in stated)

    def declare_operands(self) -> tuple[Operand, ...]:
        written = {name: element for (name, _, _), (_, element) in zip(self.results, self.tree.results, strict=True)}
        found = []
        for i in self.inputs_read():
            own = i.operand((0,) if i.shape else ())
            replaced = i.name in written and i.shape
            found.append(Operand(i.name, Role.IN_OUT, i.element, self.shape, batch_axes=(0,)) if replaced else own)
        names = {o.name for o in found}
        outs = [Operand(n, Role.OUTPUT, e, self.shape, batch_axes=(0,)) for n, e in written.items() if n not in names]
        return (*found, *outs)
