"""Modules of other libraries that have an equal here, known by what they compute."""

from __future__ import annotations

import dis
import inspect
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial, wraps
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Module, Parameter

from triplan import expr, functional
from triplan.errors import Unsupported
from triplan.nn._modules import parameter
from triplan.nn.attention import transformers_attention
from triplan.nn.batch_norm import BatchNorm2d, normalised

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NO_EQUAL = "no equal in triplan.nn"


def unsuited(module: Module) -> str:
    """Why a module of any type cannot change its class, or nothing."""
    if "forward" in vars(module):
        return "its forward was replaced on the object"
    for name, t in (*module._parameters.items(), *module._buffers.items()):
        if t is not None and type(t) not in (Tensor, Parameter, torch.nn.Buffer):
            return f"{name} is a {type(t).__name__}"
        if t is not None and t.dtype not in _DTYPES and name != "num_batches_tracked":
            return f"{name} is {t.dtype}: ours take f16, bf16, f32 and f64"
    return ""


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


def _plain(first: Any, *others: Any) -> bool:
    """Whether all are plain tensors of one dtype that ours take."""
    return all(type(t) is Tensor and t.dtype in _DTYPES and t.dtype == first.dtype for t in (first, *others))


def _hides(mask: Any, query: Tensor) -> bool:
    """Whether ours take ``mask`` (or None) with ``query``: what it hides, as bools, or what it adds."""
    return mask is None or (type(mask) is Tensor and mask.dtype in (torch.bool, query.dtype))


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


# --- gated MLPs ---

#: By the name of the activation of the first tensor, which the second is multiplied by.
_GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "GELU": functional.geglu,
    "GELU(approximate='tanh')": partial(functional.expression, lambda x, y: expr.gelu_tanh(x) * y),
    "ReLU": functional.reglu,
    "SiLU": functional.swiglu,
}
_OF_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _gated(m: Any, name: str, input: Tensor) -> Any:
    """``down(act(gate) * up)``, whose product is one launch, unless somebody listens to ``act``."""
    gate, up, act = m.gate_proj(input), m.up_proj(input), m.act_fn
    if _hooked(act):
        return m.down_proj(act(gate) * up)
    return m.down_proj(_GATED[name](gate, up))


def _gate_of(module: Module) -> str:
    """The activation of a module that is a gated MLP, or nothing."""
    points, curves = _curves()
    stubs = {"gate_proj": lambda x: x, "up_proj": lambda x: x + 3, "down_proj": lambda x: 1 - x}
    found = _called(module, points, {}, _modules={**module._modules, **stubs})
    return next((name for name in _GATED if _close(found, 1 - curves[name] * (points + 3))), "")


# --- residual blocks of convolutions ---


def _hooked(module: Module) -> bool:
    return any(getattr(module, hooks) for hooks in _HOOKS)


def _residual(m: Any, layers: int, input: Tensor) -> Any:
    """``relu(bn(conv(input)))`` for each of ``layers``, in the last with the block's input, or ``downsample``'s result
    of it, added before relu: one op for each norm, unless somebody listens to what it takes the place of."""
    own = m._modules
    norms = [own[f"bn{i}"] for i in range(1, layers + 1)]
    if _hooked(own["relu"]) or any(type(norm) is not BatchNorm2d or _hooked(norm) for norm in norms):
        kind: Any = type(m).__mro__[1]
        return kind.forward(m, input)
    out, along = input, own.get("downsample")
    for i, norm in enumerate(norms[:-1], 1):
        out = normalised(norm, own[f"conv{i}"](out), functional.batch_norm_relu)
    out = own[f"conv{layers}"](out)
    added = input if along is None else along(input)
    if (added.shape, added.dtype) != (out.shape, out.dtype):
        return functional.relu(normalised(norms[-1], out) + added)
    return normalised(norms[-1], out, functional.batch_norm_relu, added)


def _layers_of(module: Module) -> int:
    """The layers of a module that is a residual block of torchvision's ResNets, or 0."""
    own = module._modules
    layers = 3 if "conv3" in own else 2
    names = [f"{part}{i}" for i in range(1, layers + 1) for part in ("conv", "bn")]
    if own.keys() - {"downsample"} != {*names, "relu"}:
        return 0
    points, _ = _curves()
    stubs: dict[str, Any] = {name: partial(torch.add, (-1) ** i * i / 2) for i, name in enumerate(names, 1)}
    along = {"downsample": lambda x: 3 - x} if own.get("downsample") is not None else {}
    out = points
    for i in range(1, layers + 1):
        out = stubs[f"bn{i}"](stubs[f"conv{i}"](out))
        out = (out if i < layers else out + (along["downsample"](points) if along else points)).relu()
    return layers if _close(_called(module, points, {}, _modules={**own, **stubs, **along}), out) else 0


# --- what attention calls ---

#: How transformers' models call their function of queries, keys, cosines and sines.
_ROTARY = "apply_rotary_pos_emb"
#: Where they look for the function of queries, keys and values, and its key and its name, if it is torch's.
_REGISTRY, _SDPA, _SDPA_NAME = "ALL_ATTENTION_FUNCTIONS", "sdpa", "sdpa_attention_forward"
#: What that passes on or refuses, and ours does not.
_PASSED_ON = ("head_mask", "position_bias", "s_aux", "softcap", "output_attentions")


class _Here(threading.local):
    #: The patched module whose forward runs.
    module: Module | None = None


_here = _Here()
#: Whether the tables that a module got hold each value twice. Asked once: the answer makes the host wait.
_repeated: WeakKeyDictionary[Module, bool] = WeakKeyDictionary()


def _by_ours(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, in whose place ``ours`` is asked within the forward of a patched module: it may give None."""

    @wraps(original)
    def call(*given: Any, **options: Any) -> Any:
        # (Compiled code fuses what the original does.)
        if not is_dynamo_compiling() and _here.module is not None:
            found = ours(_here.module, *given, **options)
            if found is not None:
                return found
        return original(*given, **options)

    call.__dict__["by_ours"] = ours
    return call


def _is_by_ours(function: Any) -> bool:
    return "by_ours" in getattr(function, "__dict__", {})


def _rotated(here: Module, *given: Any, **options: Any) -> tuple[Tensor, Tensor] | None:
    """Queries and keys (batch, heads, sequence, width), rotated by tables (batch or 1, sequence, width) in one launch.

    None where ours would not give what the module's own function gives.
    """
    if options or len(given) != 4:
        return None
    q, k, cos, sin = given
    if not _plain(*given):
        return None
    if cos.requires_grad or sin.requires_grad or q.dim() != 4 or k.dim() != 4 or cos.dim() != 3:
        return None
    sequence = q.shape[2:]
    if not k.shape[2:] == cos.shape[1:] == sin.shape[1:] == sequence or q.size(0) != k.size(0):
        return None
    if cos.shape != sin.shape or cos.size(0) not in (1, q.size(0)) or sequence[1] % 2 or not q.numel():
        return None
    twice = _repeated.get(here)
    if twice is None:
        if q.device.type not in ("cpu", "cuda") or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        twice = _repeated[here] = all(torch.equal(*t.chunk(2, -1)) for t in (cos, sin))
    return functional.rotary(q, k, cos, sin) if twice else None


def _attended(
    here: Module, module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *given: Any, **options: Any
) -> tuple[Tensor, None] | None:
    """As ``transformers_attention``; None where that would not give what torch's function gives."""
    passed = [options.get(name) for name in _PASSED_ON]
    if module is not here or any(option is not None and option is not False for option in passed):
        return None
    if not _plain(query, key, value) or not _hides(attention_mask, query):
        return None
    try:
        return transformers_attention(module, query, key, value, attention_mask, *given, **options)
    except Unsupported:
        return None


def _turned(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = q.chunk(2, -1)
    return q * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)


def _rotates(function: Any) -> bool:
    """Whether ``function`` rotates as ours does, of tables that hold each value twice."""
    q, k, cos, sin = (_line(-1, 2, math.prod(s)).view(s).sin() for s in ((2, 3, 4, 6), (2, 1, 4, 6), *((2, 4, 6),) * 2))
    sin = sin.flip(1)
    try:
        found = function(q, k, cos, sin)
    except Exception:  # of code that is not ours
        return False
    return type(found) is tuple and all(map(_close, found, (_turned(q, cos, sin), _turned(k, cos, sin))))


class _Scope(dict[str, Any]):
    """The globals of a function, some of which are others."""

    def __init__(self, whole: dict[str, Any], others: dict[str, Any]) -> None:
        super().__init__(others, __builtins__=whole["__builtins__"])
        self._whole = whole

    def __missing__(self, name: str) -> Any:
        return self._whole[name]


def _attend(query: Any, key: Any, value: Any, attn_mask: Any = None, *given: Any, **options: Any) -> Tensor:
    """torch's scaled_dot_product_attention; by ours, where that gives the same."""
    if _plain(query, key, value) and _hides(attn_mask, query):
        with suppress(Unsupported):
            return functional.scaled_dot_product_attention(query, key, value, attn_mask, *given, **options)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, *given, **options)


def _by_itself(forward: Any) -> FunctionType | None:
    """A copy of ``forward`` that calls ``_attend`` where that calls torch's scaled_dot_product_attention, or None.

    Other code sees no change: the copy has globals of its own. (So one that assigns globals gets none.)
    """
    name = torch.nn.functional.scaled_dot_product_attention.__name__
    if type(forward) is not FunctionType or hasattr(forward, "__wrapped__") or name not in forward.__code__.co_names:
        return None
    if any(i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for i in dis.get_instructions(forward)):
        return None
    others, its = dict[str, Any](), torch.nn.functional
    for used in forward.__code__.co_names:
        value = forward.__globals__.get(used)
        if value is its:
            others[used] = ModuleType(its.__name__)
            vars(others[used]).update(vars(its), **{name: _attend})
        elif value is getattr(its, name):
            others[used] = _attend
    if not others:
        return None
    scope = _Scope(forward.__globals__, others)
    made = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


@cache
def _attention_of(kind: Any) -> tuple[type[Module], str] | None:
    """A subclass of ``kind``, a class of attention, for whose calls ours are asked, and what these are; None if none.

    The functions that it calls are then bound to ones that ask ours within the forward of such a subclass alone.
    """
    forward = inspect.unwrap(kind.forward)
    called = getattr(getattr(forward, "__code__", None), "co_names", ())
    scope, asked = getattr(forward, "__globals__", {}), list[str]()
    if _ROTARY in called and (_is_by_ours(scope.get(_ROTARY)) or _rotates(scope.get(_ROTARY))):
        if not _is_by_ours(scope[_ROTARY]):
            scope[_ROTARY] = _by_ours(scope[_ROTARY], _rotated)
        asked.append("rotary")
    registry: Any = scope.get(_REGISTRY, {}) if _REGISTRY in called else {}
    if _SDPA in registry and getattr(registry[_SDPA], "__name__", "") == _SDPA_NAME:
        if not _is_by_ours(registry[_SDPA]):
            registry[_SDPA] = _by_ours(registry[_SDPA], _attended)
        asked.append("attention")
    run = kind.forward
    if (copied := _by_itself(run)) is not None:
        run = copied
        asked.append("attention")
    if not asked:
        return None

    def patched(self: Module, *given: Any, **options: Any) -> Any:
        if is_dynamo_compiling():
            return kind.forward(self, *given, **options)
        before, _here.module = _here.module, self
        try:
            return run(self, *given, **options)
        finally:
            _here.module = before

    made = {"forward": patched, "__doc__": kind.__doc__, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), made), ", ".join(dict.fromkeys(asked))


def known(module: Any) -> tuple[type[Module] | None, str]:
    """The class for a module of another library that has an equal, and what is ours in it.

    An RMSNorm, an activation, a linear layer with a transposed weight (GPT-2's), a gated MLP, a residual block of
    convolutions, attention.
    """
    kind: Any = type(module)
    if not kind.__module__.startswith("torch.") and not unsuited(module):
        if module._modules.keys() == _OF_GATED and (name := _gate_of(module)):
            return _derived(kind, _gated, name), f"gated {name}"
        if "bn1" in module._modules and (layers := _layers_of(module)):
            return _derived(kind, _residual, layers), "batch_norm_relu"
        if (attention := _attention_of(kind)) is not None:
            return attention
    own, name = module._parameters, kind.__name__
    sizes = {n: t.dim() for n, t in own.items() if t is not None}
    if module._modules or module._buffers or unsuited(module) or kind.__module__.startswith("torch."):
        return None, NO_EQUAL
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
    return None, NO_EQUAL
