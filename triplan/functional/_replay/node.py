"""A call that autograd records, repeated as one node of its graph."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import Function

from triplan.facade.replay import generate
from triplan.functional._replay.program import Program, Repeat, expression

Tensor = torch.Tensor
#: What saved tensors are handed to, if anything; asked for that of tracers too.
hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracers: None)


def node(
    formula: Callable[..., tuple[Any, ...]],
    replays: Any,
    name: str,
    program: Program,
    kept: Sequence[str],
    outputs: Sequence[Tensor],
    constant: Sequence[Tensor],
    result: Any,
    *,
    saves_alike: bool = False,
) -> Repeat:
    """A call repeated by ``program`` as one node of autograd's graph, ``kept`` saved for the backward, ``formula``.

    ``outputs`` are the node's, those of ``constant`` without a gradient; the first of them are in ``result``.
    ``saves_alike``: whether ``kept`` are the tensors that the call saves where it is not repeated, in the same order.
    """
    if not saves_alike:
        # Checkpoints compare what two calls save, of which one may be a replay and one not.
        program.refused.append("hooks(False) is not None")  # takes 0.2 us with torch 2.11
        program.constants["hooks"] = hooks
    # What need not run within autograd's forward is faster outside.
    lines, then = (list(program.lines), []) if program.calls_torch else ([], list(program.lines))
    # What autograd's ctx does in save_for_backward and so on, without the calls.
    if kept:
        lines.append(f"ctx.to_save = ({''.join(f'{name}, ' for name in kept)})")
    if len(outputs) > 1:
        lines.append("ctx.materialize_grads = False")
    if constant:
        lines.append(f"ctx.non_differentiable = ({''.join(f'{program.name(t)}, ' for t in constant)})")
    lines.append(f"return {expression(outputs[0] if len(outputs) == 1 else tuple(outputs), program.name)}")
    # Autograd looks at each tensor among its arguments. All but those with a gradient come in a tuple.
    inputs = ", ".join(f"x{i}" for i in program.differentiable)
    outside = r"\b[tx]\d+\b" if program.calls_torch else r"\b(?:[xn]\d+|hidden)\b"
    used = dict.fromkeys(re.findall(outside, " ".join(lines)))
    others = "".join(f"{v}, " for v in used if v not in inputs.split(", ") and v not in program.constants)
    if others:
        lines.insert(0, f"{others}= others")
    forward = generate(f"ctx, others, {inputs}", lines, {**program.constants, "index": outputs[0].get_device()})
    then.append(f"results = apply(({others}), {inputs})")
    if isinstance(result, tuple):
        numbers = itertools.count()
        part = "results" if len(outputs) == 1 else "results[{}]"
        then.append(f"return {expression(result, lambda t: 'None' if t is None else part.format(next(numbers)))}")
    else:
        then.append("return results" if len(outputs) == 1 else "return results[0]")
    return program.repeat(then, {"apply": _apply(name, forward, formula, replays, len(outputs), len(kept))})


#: What autograd asks a Function's class for at every call, by names that miss Python's cache of attributes: found in
#: less time in the class itself than in one that it inherits from.
_INHERITED = {
    name: value
    for cls in reversed(Function.__mro__[:-1])
    for name, value in vars(cls).items()
    if not name.startswith("__") and cls is not torch._C._FunctionBase and name != "_backward_cls"
}


def _apply(
    name: str,
    forward: Callable[..., Any],
    formula: Callable[..., tuple[Any, ...]],
    replays: Any,
    outputs: int,
    saved: int,
) -> Callable[..., Any]:
    """``apply`` of an autograd.Function, whose inputs are other values and the tensors with a gradient."""

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return formula(*grads, *ctx.saved_tensors)

    grads, kept = (", ".join(f"{letter}{i}" for i in range(n)) for letter, n in (("g", outputs), ("s", saved)))
    call = f"{grads}, {kept}" if saved else grads
    lines = [
        f"{kept}, = ctx.saved_tensors" if saved else "",
        f"if is_grad_enabled(): return formula({call})",
        f"found = replays.last({call})",
        f"return replays.call(({call},)) if found is None else found",
    ]
    constants = {"replays": replays, "formula": formula, "is_grad_enabled": torch.is_grad_enabled}
    node: Any = type(
        f"triplan_{name}",
        (Function,),
        {**_INHERITED, "forward": staticmethod(forward), "backward": staticmethod(backward)},
    )
    # Autograd calls this method of the node; compiled autograd traces ``backward``.
    node._backward_cls.apply = generate(f"ctx, {grads}", lines, constants)

    def learn(program: Program, results: tuple[Any, ...]) -> None:
        """Ask no guard where a gradient is passed on as it is: to whichever gradient that applies."""
        changed = (
            saved
            or program.lines
            or program.record.settings
            or any(t is not None and t is not program.tensors[0] for t in results)
        )
        if outputs == 1 and not changed:
            found = expression(results, lambda t: "None" if t is None else "g0")
            node._backward_cls.apply = generate("ctx, g0", [f"return {found}"], {})

    replays.learn = learn
    # Without the Python around it, which looks for functorch and dead wrappers: the guard has excluded them.
    apply: Callable[..., Any] = vars(torch._C._FunctionBase)["apply"].__get__(None, node)
    return apply
