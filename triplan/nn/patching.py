"""A model of torch on our kernels: modules that have an equal in ``triplan.nn`` become it, in place, and back."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import Module

from triplan.backends.triton.attention.arguments import MOST_WIDTH
from triplan.errors import shown
from triplan.nn._known import NO_EQUAL, known, unsuited

__all__ = ["Patched", "patch", "unpatch"]

#: Where a patched module keeps the class that it had, and ours.
_CLASSES = "_classes_of_patch"


@cache
def _equals() -> dict[type[Module], type[Module]]:
    """Ours by torch's of the same name, where ours is a subclass that adds no state: changing the class is enough."""
    ours = vars(sys.modules["triplan.nn"])
    pairs = ((getattr(torch.nn, name, None), ours[name]) for name in ours["__all__"])
    return {its: mine for its, mine in pairs if its is not None and issubclass(mine, its)}


def _refused(m: Any) -> str:
    """What ours would refuse when it runs, or nothing."""
    name = type(m).__name__
    if name.startswith("Conv") and m.padding_mode != "zeros":
        return f"padding_mode = {shown(m.padding_mode)}: ours pads by zeros only"
    if name.startswith("Embedding") and m.sparse:
        return "sparse = True: our gradients are dense"
    if name in ("LogSoftmax", "Softmax") and m.dim is None:
        return "dim = None: ours guesses no axis"
    if name.startswith("Adaptive"):
        sizes = m.output_size if isinstance(m.output_size, (tuple, list)) else (m.output_size,)
        return f"output_size = {shown(m.output_size)}: ours has at least one element" if 0 in sizes else ""
    if name == "Upsample" and m.mode in ("bicubic", "trilinear"):
        return f"mode = {shown(m.mode)}: ours are nearest, nearest-exact, linear, bilinear and area"
    wide = name == "MultiheadAttention" and m.head_dim > MOST_WIDTH
    return f"heads are {m.head_dim} wide: ours have at most {MOST_WIDTH}" if wide else ""


# --- the tree ---


@dataclass(frozen=True)
class Patched:
    """What ``patch`` did, by the paths of modules: (its type, ours) or, left as it was, (its type, the reason).

    ``str`` shows a table.
    """

    replaced: dict[str, tuple[str, str]]
    left: dict[str, tuple[str, str]]

    def __str__(self) -> str:
        count = len(self.replaced)
        lines = [f"{count} of {count + len(self.left)} modules replaced"]
        for title, why, part in (("replaced", "by triplan.nn's", self.replaced), ("left", "because", self.left)):
            firsts = {entry: path or "(root)" for path, entry in reversed(part.items())}
            cells = [(kind, str(n), text, firsts[kind, text]) for (kind, text), n in Counter(part.values()).items()]
            cells = [(title, "count", why, "first"), *cells] if cells else []
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            lines += [f"  {a:{widths[0]}}  {b:>{widths[1]}}  {c:{widths[2]}}  {d}" for a, b, c, d in cells]
        return "\n".join(lines)


def _decided(module: Module) -> tuple[type[Module] | None, str]:
    """The class for ``module``, or None, and what the report says: ours, or the reason."""
    kind = type(module)
    if _CLASSES in vars(module) or kind in _equals().values():
        return None, "is triplan's already"
    if kind is torch.nn.modules.linear.NonDynamicallyQuantizableLinear:
        return None, "holds parameters that its parent reads"
    near = next((base for base in kind.__mro__ if base in _equals()), None)
    if near is None:
        return known(module)
    reason = f"a subclass of torch.nn.{near.__name__}, which may differ" if near is not kind else ""
    reason = reason or unsuited(module) or _refused(module)
    return (None, reason) if reason else (_equals()[near], near.__name__)


def patch(model: Module, *, skip: Callable[[str, Module], bool] | None = None) -> Patched:
    """Let each module in ``model`` that has an equal in ``triplan.nn`` compute by it, and report what was done.

    A module is replaced if its type is one of torch.nn that ``triplan.nn`` has too (not a subclass of one), or if it is
    an RMSNorm, an activation, a Conv1D, a gated MLP or attention that rotates as the transformers library has them, or
    a residual block as torchvision has them: of such names it is one that gives the same results when it, or what it
    calls, is called once, on the CPU, with other weights or stubs. It stays the same object, and only its class
    changes: parameters, buffers, state dicts, hooks, flags and tied weights stay as they are. What ours would refuse
    when it runs is left, with the reason. A module whose own forward calls torch's scaled_dot_product_attention calls
    ours; other functions of torch that a model calls are not replaced.

    ``skip(path, module)``: True leaves a module. The report does not list modules that only hold others or do nothing.
    Raises ``TypeError`` if ``model`` is no torch.nn.Module. ``unpatch`` undoes it.
    """
    if not isinstance(model, Module):
        raise TypeError(f"patch(): model must be a torch.nn.Module, not {type(model).__name__}")
    tensors = [*model.parameters(), *model.buffers()]
    places = sorted({t.device.type for t in tensors} - {"cpu", "cuda", "meta"})
    classes: list[tuple[Module, type[Module]]] = []
    done = Patched({}, {})
    for path, module in model.named_modules():
        ours, text = _decided(module)
        if ours is not None and (places or (skip is not None and skip(path, module))):
            ours, text = None, f"the model is on {', '.join(places)}" if places else "skipped"
        entry = (type(module).__name__, text)
        if ours is not None:
            classes.append((module, ours))
            done.replaced[path] = entry
        elif text != NO_EQUAL or module._parameters or not (module._modules or isinstance(module, torch.nn.Identity)):
            done.left[path] = entry
    for module, ours in classes:  # all is decided before anything changes
        vars(module)[_CLASSES] = (type(module), ours)
        module.__class__ = ours
    return done


def unpatch(model: Module) -> int:
    """Give each module in ``model`` the class back that ``patch`` found, and return how many there were.

    Modules that were created as those of ``triplan.nn`` stay. Copies of a patched model can be unpatched too. Raises
    ``RuntimeError``, and changes nothing, if the class of one was changed again since.
    """
    found = {path: module for path, module in model.named_modules() if _CLASSES in vars(module)}
    changed = [p for p, m in found.items() if type(m) is not vars(m)[_CLASSES][1]]
    if changed:
        raise RuntimeError(f"unpatch(): the classes of {shown(changed)} were changed since patch(): undo that first")
    for module in found.values():
        module.__class__ = vars(module).pop(_CLASSES)[0]
    return len(found)
