"""A model of torch on our kernels: modules that have an equal in ``triplan.nn`` become it, in place, and back."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from triplan import functional
from triplan.backends.triton.attention.arguments import MOST_WIDTH
from triplan.errors import shown
from triplan.nn._modules import parameter

__all__ = ["Patched", "patch", "unpatch"]

#: Where a patched module keeps the class that it had, and ours.
_CLASSES = "_classes_of_patch"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NO_EQUAL = "no equal in triplan.nn"


@cache
def _equals() -> dict[type[Module], type[Module]]:
    """Ours by torch's of the same name, where ours is a subclass that adds no state: changing the class is enough."""
    ours = vars(sys.modules["triplan.nn"])
    pairs = ((getattr(torch.nn, name, None), ours[name]) for name in ours["__all__"])
    return {its: mine for its, mine in pairs if its is not None and issubclass(mine, its)}


def _unsuited(module: Module) -> str:
    """Why a module of any type cannot change its class, or nothing."""
    if "forward" in vars(module):
        return "its forward was replaced on the object"
    for name, t in (*module._parameters.items(), *module._buffers.items()):
        if t is not None and type(t) not in (Tensor, Parameter, torch.nn.Buffer):
            return f"{name} is a {type(t).__name__}"
        if t is not None and t.dtype not in _DTYPES and name != "num_batches_tracked":
            return f"{name} is {t.dtype}: ours take f16, bf16, f32 and f64"
    return ""


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


# --- modules of other libraries, known by their results ---


def _called(module: Any, rows: Tensor, parameters: dict[str, Tensor], **attributes: Any) -> Any:
    """What the forward of ``module``'s class gives for ``rows`` with other parameters, or None if it raises."""
    kind: type[Any] = type(module)
    twin, others = object.__new__(kind), {n: Parameter(t, requires_grad=False) for n, t in parameters.items()}
    vars(twin).update(vars(module), _parameters=others, **attributes)
    try:
        with torch.no_grad():
            return kind.forward(twin, rows.clone())
    except Exception:  # of code that is not ours, called as nobody may have meant
        return None


def _close(found: Any, expected: Tensor) -> bool:
    alike = isinstance(found, Tensor) and (found.shape, found.dtype) == (expected.shape, expected.dtype)
    return alike and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


#: On the CPU in f32, whatever torch's defaults are.
_line = partial(torch.linspace, device="cpu", dtype=torch.float32)


@cache
def _derived(kind: type[Module], call: Callable[..., Tensor], *more: Any) -> type[Module]:
    """A subclass of ``kind`` whose forward is ``call`` of the module, ``more`` and one tensor of the weight's dtype.

    Classes of one formula differ in what they return for other dtypes, and in further arguments: those they still do.
    """

    def forward(self: Any, *given: Any, **options: Any) -> Any:
        mixed = "weight" in self._parameters and given and given[0].dtype != self._parameters["weight"].dtype
        if len(given) != 1 or options or mixed:
            return kind.forward(self, *given, **options)
        return call(self, *more, given[0])

    return type(kind.__name__, (kind,), {"forward": forward, "__doc__": kind.__doc__, "__module__": kind.__module__})


def _rms_norm(m: Any, eps: str, offset: int, input: Tensor) -> Tensor:
    weight = parameter(m, "weight")
    return functional.rms_norm(input, weight.shape, weight, getattr(m, eps), weight_offset=offset)


def _transposed_linear(m: Any, input: Tensor) -> Tensor:
    weight = parameter(m, "weight")
    flat = functional.addmm(parameter(m, "bias"), input.reshape(-1, input.size(-1)), weight)
    return flat.view(*input.shape[:-1], weight.size(1))


def _activation(m: Any, name: str, input: Tensor) -> Tensor:
    return _ACTIVATIONS[name](input)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "GELU": functional.gelu,
    "GELU(approximate='tanh')": partial(functional.gelu, approximate="tanh"),
    "ReLU": functional.relu,
    "ReLUSquared": functional.relu_squared,
    "SiLU": functional.silu,
}


@cache
def _curves() -> tuple[Tensor, dict[str, Tensor]]:
    """Points, some of them so far out that a clamp shows, and the activations there."""
    points = torch.cat((_line(-8, 8, 65), _line(-3e4, 3e4, 2), _line(-100, 100, 6)))
    return points, {name: function(points) for name, function in _ACTIVATIONS.items()}


def _known(module: Any) -> tuple[type[Module] | None, str]:
    """The class for an RMSNorm, an activation or a linear layer with a transposed weight (GPT-2's), and its name."""
    kind: Any = type(module)
    own, name = module._parameters, kind.__name__
    sizes = {n: t.dim() for n, t in own.items() if t is not None}
    if module._modules or module._buffers or _unsuited(module) or kind.__module__.startswith("torch."):
        return None, _NO_EQUAL
    if not own and any(part in name for part in ("LU", "Activation")):
        points, curves = _curves()
        found = _called(module, points, {})
        for text, expected in curves.items():
            if _close(found, expected):
                return _derived(kind, _activation, text), text
    if name == "Conv1D" and sizes == {"weight": 2, "bias": 1}:
        rows, weight, bias = _line(-2, 5, 8).view(4, 2), _line(-1, 2, 6).view(2, 3), _line(1, 3, 3)
        if _close(_called(module, rows, {"weight": weight, "bias": bias}, nf=3, nx=2), rows @ weight + bias):
            return _derived(kind, _transposed_linear), "Linear"
    eps = next((n for n in ("variance_epsilon", "eps") if isinstance(getattr(module, n, None), float)), None)
    if eps is not None and "Norm" in name and sizes == {"weight": 1} and own["weight"].numel():
        # Names do not tell whether 1 is added to the weight. eps, wherever the class adds it, changes the second row.
        weight, value = _line(-1, 2, own["weight"].numel()), getattr(module, eps)
        row = 1 + _line(0, 7, weight.numel()).cos()
        rows = torch.stack((row, row * math.sqrt(abs(value) or 1.0)))
        normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + value)
        found = _called(module, rows, {"weight": weight})
        for offset, text in ((0, "RMSNorm"), (1, "RMSNorm(weight_offset=1)")):
            if _close(found, normed * (weight + offset)):
                return _derived(kind, _rms_norm, eps, offset), text
    return None, _NO_EQUAL


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
        return _known(module)
    reason = f"a subclass of torch.nn.{near.__name__}, which may differ" if near is not kind else ""
    reason = reason or _unsuited(module) or _refused(module)
    return (None, reason) if reason else (_equals()[near], near.__name__)


def patch(model: Module, *, skip: Callable[[str, Module], bool] | None = None) -> Patched:
    """Let each module in ``model`` that has an equal in ``triplan.nn`` compute by it, and report what was done.

    A module is replaced if its type is one of torch.nn that ``triplan.nn`` has too (not a subclass of one), or if it is
    an RMSNorm, an activation or a Conv1D as the transformers library has them: of such names it is one that gives the
    same results when it is called once, on the CPU, with another weight. It stays the same object, and only its class
    changes: parameters, buffers, state dicts, hooks, flags and tied weights stay as they are. What ours would refuse
    when it runs is left, with the reason. Functions of torch that a model calls are not replaced.

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
        elif text != _NO_EQUAL or module._parameters or not (module._modules or isinstance(module, torch.nn.Identity)):
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
