"""One registered op for all elementwise functions: a formula, its tensors and its numbers.

A formula is text, so that graphs hold it: ``"add tn"`` is the named op ``add`` of a tensor and a number; any other tree
is JSON (``Formula.text``). ``triplan::expression_{N}_{K}`` takes N tensors and gives K results. The gradients of a
formula are a formula again, which the same op computes in one launch, so that it has derivatives of any order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._prims_common import compute_elementwise_output_strides

from triplan.descriptors.elementwise.problems import NAMED, NAMES
from triplan.descriptors.expressions.derivatives import gradients
from triplan.descriptors.expressions.expression import Expr, flattened, operand, rebuilt
from triplan.descriptors.expressions.tree import NUMBER, POINT, TENSOR, checked
from triplan.facade import BinaryPlan, ExpressionPlan, TernaryPlan, UnaryPlan
from triplan.functional._ops import Recorded
from triplan.functional._plans import run
from triplan.functional._shapes import broadcast, check_same_device
from triplan.sku import ElementKind
from triplan.sku.facts import fact

Tensor = torch.Tensor
Number = bool | int | float
PLANS: tuple[Any, ...] = (UnaryPlan, BinaryPlan, TernaryPlan)
#: Descriptors have this many axes at most; operands of more are flattened.
_MAX_RANK = 8


@dataclass(frozen=True)
class Formula:
    """A tree over tensors and numbers, by their names in order, and its results with the elements that are asked for.

    Attributes:
        named: the op that it is, if every operand of a named op stands in its place and the first is a tensor.
    """

    tensors: tuple[str, ...]
    numbers: tuple[str, ...]
    results: tuple[tuple[str, Expr, ElementKind | None], ...]
    named: str | None = None

    @property
    def text(self) -> str:
        nodes, roots = flattened(root for _, root, _ in self.results)
        results = [
            (name, at, None if e is None else e.value) for (name, _, e), at in zip(self.results, roots, strict=True)
        ]
        return json.dumps([self.tensors, self.numbers, nodes, results], separators=(",", ":"))


@fact
def formula(text: str) -> Formula:
    """What ``text`` says."""
    if text.startswith("["):
        tensors, numbers, nodes, results = json.loads(text)
        values = rebuilt(nodes)
        found = tuple((name, values[at], None if e is None else ElementKind(e)) for name, at, e in results)
        return Formula(tuple(tensors), tuple(numbers), found)
    op, kinds = text.split()
    named = NAMED[op]
    operands = [*zip((*NAMES[: named.operands], *named.parameters), kinds, strict=False)]
    root: Expr = named.build(*(operand(name) for name, _ in operands))
    tensors = tuple(name for name, kind in operands if kind == "t")
    numbers = tuple(name for name, kind in operands if kind == "n")
    is_named = kinds[0] == "t" and "t" not in kinds[named.operands :]
    return Formula(tensors, numbers, (("out", root, None),), op if is_named else None)


@fact
def gradient(text: str, wrt: tuple[tuple[str, ElementKind], ...]) -> tuple[Formula, str, tuple[bool, ...]]:
    """The formula of the gradients of the operands ``wrt``, its text, and which of them are not 0 everywhere.

    Its first tensors are those of the formula, then the gradients of its results, as far as they are read.
    """
    of = formula(text)
    found = gradients({name: root for name, root, _ in of.results}, [name for name, _ in wrt])
    given = (*of.tensors, *(f"d{name}" for name, _, _ in of.results))
    results = tuple((_free(f"d{name}", given), found[f"d{name}"], element) for name, element in wrt)
    moving = tuple(root.name != "number" for _, root, _ in results)
    results = tuple(r for r, moves in zip(results, moving, strict=True) if moves)
    nodes, _ = flattened(root for _, root, _ in results)
    read = {str(n[1]) for n in nodes if n[0] == "operand"}
    made = Formula(tuple(n for n in given if n in read), tuple(n for n in of.numbers if n in read), results)
    return made, made.text, moving


def _free(name: str, taken: Sequence[str]) -> str:
    """``name``, longer if it or the name of its gradient is taken: dx is a result of gradients of gradients, too."""
    while name in taken or f"d{name}" in taken:
        name += "_"
    return name


@fact
def _passed_on(text: str) -> dict[str, str]:
    """The tensors whose gradient is that of a result, as those of a sum, and the name of that gradient."""
    of = formula(text)
    given = {f"d{name}" for name, _, _ in of.results}
    roots = _roots(of)
    return {name: root.args[0] for name, root in roots.items() if root.name == "operand" and root.args[0] in given}


@fact
def _are_read(text: str) -> tuple[bool, ...]:
    """For each tensor, whether gradients need it: read it, or are 0 of its shape."""
    roots = _roots(formula(text))
    nodes, _ = flattened(roots.values())
    read = {str(n[1]) for n in nodes if n[0] == "operand"}
    return tuple(name in read or root.name == "number" for name, root in roots.items())


def _roots(of: Formula) -> dict[str, Expr]:
    """The gradient of each tensor."""
    found = gradients({name: root for name, root, _ in of.results}, list(of.tensors))
    return {name: found[f"d{name}"] for name in of.tensors}


def _number(value: Number) -> ElementKind:
    return ElementKind.F32 if isinstance(value, float) else ElementKind.I64


@fact
def elements(text: str, operands: tuple[tuple[ElementKind, int], ...]) -> tuple[ElementKind, ...]:
    """The elements of the results for operands of these elements and ranks."""
    of = formula(text)
    names = (*of.tensors, *of.numbers)
    nodes, roots = flattened(root for _, root, _ in of.results)
    asked = [(at, e) for at, (_, _, e) in zip(roots, of.results, strict=True)]
    try:
        tree = checked(nodes, dict(zip(names, operands, strict=True)), asked)
    except ValueError as e:
        raise NotImplementedError(f"{of.named or 'expression'}(): {e}") from None
    return tuple(e for _, e in tree.results)


def dtypes(text: str, tensors: Sequence[Tensor], numbers: Sequence[Number]) -> list[torch.dtype]:
    """The dtypes of the results."""
    ranks = [(ElementKind.of(t.dtype), TENSOR if t.dim() else POINT) for t in tensors]
    return [e.torch for e in elements(text, (*ranks, *((_number(n), NUMBER) for n in numbers)))]


def new(text: str, tensors: Sequence[Tensor], numbers: Sequence[Number]) -> list[Tensor]:
    """The results, not yet written, with torch's strides."""
    check_same_device(formula(text).named or "expression", *tensors)
    shape = broadcast(*(t.shape for t in tensors))
    strides = compute_elementwise_output_strides(*(t.expand(shape) for t in tensors))
    return [tensors[0].new_empty_strided(shape, strides, dtype=d) for d in dtypes(text, tensors, numbers)]


def fill(outs: Sequence[Tensor], text: str, tensors: Sequence[Tensor], numbers: Sequence[Number]) -> None:
    """Write the results of the formula into ``outs``, by one launch."""
    of = formula(text)
    shape = outs[0].shape
    if len(shape) > _MAX_RANK:
        flat = [torch.empty(o.numel(), dtype=o.dtype, device=o.device) for o in outs]
        fill(flat, text, [t if not t.dim() else t.expand(shape).reshape(-1) for t in tensors], numbers)
        for o, f in zip(outs, flat, strict=True):
            o.copy_(f.view(shape))
        return
    operands = dict(zip(of.tensors, tensors, strict=True))
    scalars = dict(zip(of.numbers, numbers, strict=True))
    options: dict[str, Any]
    if of.named is not None:
        plan, options = PLANS[NAMED[of.named].operands - 1], {"op": of.named}
    else:
        plan, options = ExpressionPlan, {"results": tuple((name, root) for name, root, _ in of.results)}
    operands |= {name: out for (name, _, _), out in zip(of.results, outs, strict=True)}
    run(plan, operands, scalars=scalars, **options)


# --- the registered ops ---


def _compute(n: int, k: int, run_it: bool, *args: Any) -> Any:
    tensors, (text, numbers) = args[:n], args[n:]
    outs = new(text, tensors, numbers)
    if run_it:
        fill(outs, text, tensors, numbers)
    return outs[0] if k == 1 else tuple(outs)


#: Ops whose derivative at x is the one at their result. That is saved: the next layer of a network saves it too, x need
#: not be kept, and may be overwritten.
BY_RESULT = frozenset(("relu t", "relu6 t"))


def _setup(n: int, ctx: Any, inputs: Any, output: Any) -> None:
    tensors, (ctx.text, ctx.numbers) = inputs[:n], inputs[n:]
    if ctx.text in BY_RESULT:
        tensors = (output,)
    ctx.likes = [(t.shape, t.dtype) for t in tensors]
    ctx.save_for_backward(*(t if is_read else None for t, is_read in zip(tensors, _are_read(ctx.text), strict=True)))


def _backward(n: int, ctx: Any, *grads: Any) -> Any:
    wanted = [i for i in range(n) if ctx.needs_input_grad[i]]
    return (*pulled_back(ctx.text, ctx.saved_tensors, ctx.likes, ctx.numbers, grads, wanted), None, None)


def pulled_back(
    text: str,
    saved: Sequence[Tensor | None],
    likes: Sequence[tuple[Any, torch.dtype]],
    numbers: Sequence[Number],
    grads: Sequence[Any],
    needed: Sequence[int],
) -> list[Tensor | None]:
    """The gradients of the formula's tensors, by one launch: of those at ``needed``, and None for others.

    ``saved``: the tensors, as far as gradients need them, with shapes and dtypes ``likes``; ``grads``: those of its
    results, of their shape. One that is passed on as it is needs no launch.
    """
    of, passed_on = formula(text), _passed_on(text)
    shape = broadcast(*(size for size, _ in likes))
    # A gradient that is summed over broadcast axes is rounded to its operand's dtype after that.
    like = next(g for g in grads if g is not None).dtype
    computed = [i for i in needed if of.tensors[i] not in passed_on]
    wrt = tuple((of.tensors[i], ElementKind.of(likes[i][1] if likes[i][0] == shape else like)) for i in computed)
    made, of_gradients, moving = gradient(text, wrt)
    given: dict[str, Any] = dict(zip(of.tensors, saved, strict=True))
    given |= {f"d{name}": g for (name, _, _), g in zip(of.results, grads, strict=True)}
    scalars = dict(zip(of.numbers, numbers, strict=True))
    found: Any = ()
    if made.results:
        tensors = [given[name] for name in made.tensors]
        found = op(len(tensors), len(made.results))(*tensors, of_gradients, [scalars[name] for name in made.numbers])
    results = iter(found if isinstance(found, tuple) else (found,))
    total: list[Tensor | None] = [None] * len(saved)
    for i, moves in zip(computed, moving, strict=True):
        total[i] = next(results) if moves else torch.zeros_like(given[of.tensors[i]])
    for i in needed:
        if (name := passed_on.get(of.tensors[i])) is not None:
            total[i] = given[name]
    return [None if t is None else t.sum_to_size(size).to(dtype) for t, (size, dtype) in zip(total, likes, strict=True)]


#: Those that compiled code finds; others are registered when they are first called. torch.compile of torch 2.11 cannot
#: trace that: there an expression of more operands or results must have been called before.
_OPS: dict[tuple[int, int], Recorded] = {}


def op(n: int, k: int) -> Recorded:
    """The op of ``n`` tensors and ``k`` results."""
    found = _OPS.get((n, k))
    return _register(n, k) if found is None else found


def _register(n: int, k: int) -> Recorded:
    tensors = ", ".join(f"Tensor t{i}" for i in range(n))
    results = "Tensor" if k == 1 else f"({', '.join(['Tensor'] * k)})"
    made = Recorded(
        f"expression_{n}_{k}",
        f"({tensors}, str formula, Scalar[] numbers) -> {results}",
        partial(_compute, n, k, True),
        partial(_compute, n, k, False),
        axes=f"{', '.join('*' * n)} -> {', '.join('*' * k)}",
        setup=partial(_setup, n),
        backward=partial(_backward, n),
    )
    return _OPS.setdefault((n, k), made)


for _n in range(1, 9):
    for _k in range(1, 5):
        _register(_n, _k)
