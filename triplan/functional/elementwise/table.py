"""How a line of the tables in ``maths`` and ``activations`` becomes a public function."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch._prims_common import can_safe_cast_to
from torch.autograd.function import Function
from torch.compiler import is_compiling

from triplan.descriptors.elementwise.problems import NAMED
from triplan.facade.check import check_storage, may_overlap
from triplan.functional._autocast import widened
from triplan.functional._ops import _refuse_unwritable, overwritten, refuse_leaf
from triplan.functional._replay.recording import setting, unwatched
from triplan.functional._replay.replay import replayed
from triplan.functional._shapes import NUMBERS, broadcast, plain_number
from triplan.functional._sharding import any_dtensor, write
from triplan.functional._watching import needs_grad, transformed
from triplan.functional.elementwise.docs import documented
from triplan.functional.elementwise.engine import BY_RESULT, Number, dtypes, fill, op, pulled_back

Tensor = torch.Tensor
#: What a line gives for a call: the named op, its operands and its parameters; or its result, which autograd records.
Line = Callable[..., tuple[Any, ...] | Tensor]
#: Ops by their text, with the signature.
TABLE: dict[str, Callable[..., Tensor]] = {}
#: Functions that torch's autocast computes in f32. (Of the others that it converts for, promotion does the same.)
_WIDENED = {
    *("acos", "asin", "cosh", "exp", "expm1", "log", "log10", "log1p", "log2", "pow", "reciprocal", "rsqrt", "sinh"),
    *("softplus", "tan"),
}


def of_python(value: Any) -> Any:
    """The number of Python that a number of numpy is; others unchanged, as arrays, which have a length."""
    is_other = isinstance(value, (Tensor, *NUMBERS)) or hasattr(value, "__len__")
    return value if is_other else plain_number(value)


def operands_of(name: str, operands: Sequence[Any]) -> tuple[str, list[Tensor], list[Number]]:
    """Of each operand ``t`` for a tensor or ``n`` for a number, then the tensors and the numbers.

    A bool becomes a tensor: no number that a kernel takes is one. A tensor without dimensions may be on the CPU.
    """
    given = [o for o in operands if isinstance(o, Tensor)]
    if not given:
        raise TypeError(f"{name}(): no operand is a tensor")
    device = next((t.device for t in given if t.dim()), given[0].device)
    kinds = ""
    tensors: list[Tensor] = []
    numbers: list[Number] = []
    for o in operands:
        if isinstance(o, Tensor):
            on_host = o.dim() == 0 and o.device != device and o.device.type == "cpu"
            tensors.append(o.to(device) if on_host else o)
        elif isinstance(o, bool):
            tensors.append(torch.full((), o, dtype=torch.bool, device=device))
        elif isinstance(o, NUMBERS):
            numbers.append(o)  # type: ignore[arg-type]
            kinds += "n"
            continue
        else:
            raise TypeError(f"{name}(): an operand is a Tensor or a number, not {type(o).__name__}")
        kinds += "t"
    return kinds, tensors, numbers


def run_line(
    name: str, line: tuple[Any, ...] | Tensor, out: Tensor | None = None, target: Tensor | None = None
) -> Tensor:
    """The result of a line: new, in ``out``, or in place of ``target``."""
    if isinstance(line, Tensor):
        if out is not None:
            _check_out(name, out, [line], line.shape)  # refuses what autograd records
        return line
    kinds, tensors, numbers = operands_of(name, line[1:])
    if name in _WIDENED:
        tensors = list(widened(name, *tensors))
    text = f"{line[0]} {kinds}"
    return call(name, text, _in_default_dtype(text, tensors, numbers), numbers, out, target)


def _in_default_dtype(text: str, tensors: list[Tensor], numbers: list[Number]) -> list[Tensor]:
    """``tensors``, converted to torch's default dtype if promotion gives it to them; for formulas it is float32."""
    if any(t.is_floating_point() for t in tensors):
        return tensors
    default = setting(torch.get_default_dtype)
    if default is torch.float32 or not (
        any(isinstance(n, (float, torch.SymFloat)) for n in numbers)
        or dtypes(text, tensors, numbers)[0].is_floating_point
    ):
        return tensors
    selects = text.startswith("where ")
    return [t if i == 0 and selects else t.to(default) for i, t in enumerate(tensors)]


def call(
    name: str, text: str, tensors: list[Tensor], numbers: list[Number], out: Tensor | None, target: Tensor | None
) -> Tensor:
    """The formula's only result: new, in ``out``, or in place of ``target``."""
    if out is None and target is None:
        found: Tensor = op(len(tensors), 1)(*tensors, text, numbers)
        return found
    written = out if target is None else target
    assert written is not None
    recorded = target is not None and (needs_grad((target, *tensors)) or transformed())
    # (Autograd gives a written view a new node, so a result saved before is another node's: second derivatives fail.)
    is_special = is_compiling() or transformed() or written._is_view() or any_dtensor(tensors)
    if recorded and text in BY_RESULT and not is_special:
        refuse_leaf(written)
        changed: Tensor = _InPlace.apply(written, text, numbers)  # type: ignore[no-untyped-call]
        return changed
    result: Tensor | None = None
    if is_compiling() or recorded:
        # What the backward reads must not be overwritten.
        kept = [t.clone() if t is target else t for t in tensors]
        result = op(len(kept), 1)(*kept, text, numbers)
        dtype, shape = result.dtype, result.shape
    else:
        (dtype,), shape = dtypes(text, tensors, numbers), broadcast(*(t.shape for t in tensors))
    if not is_compiling() and any_dtensor((written, *tensors)):
        return write(name, written, op(len(tensors), 1)(*tensors, text, numbers) if result is None else result)
    if not can_safe_cast_to(cast_from=dtype, cast_to=written.dtype):  # torch.can_cast breaks dynamo's graphs
        raise RuntimeError(f"{name}(): result type {dtype} can't be cast to the desired output type {written.dtype}")
    if target is None:
        _check_out(name, written, tensors, shape)
    elif written.shape != shape:
        raise RuntimeError(
            f"{name}(): output with shape {list(written.shape)} doesn't match the broadcast shape {list(shape)}"
        )
    if result is None and unwatched((written, *tensors)):
        _refuse_unwritable(name, written)
        for t in (written, *tensors):
            check_storage(name, "an argument", t)
        apart = all(_is_same(t, written) or not may_overlap(written, t) for t in tensors)
        # What is computed in f32 is rounded once, as by a copy of it.
        fits = dtype == written.dtype or (dtype == torch.float32 and written.dtype in (torch.float16, torch.bfloat16))
        if apart and fits and written.device == tensors[0].device:
            fill([written], text, tensors, numbers)
            return written
    if result is not None and not (is_compiling() or transformed()):
        refuse_leaf(written)
        return overwritten(written, result)
    return written.copy_(op(len(tensors), 1)(*tensors, text, numbers) if result is None else result)


@replayed
def _written(target: Tensor, text: str, numbers: list[Number]) -> Tensor:
    return call(text.split()[0], text, [target], numbers, None, target)


@replayed
def _to_target(grad: Tensor, result: Tensor, text: str, numbers: list[Number]) -> Tensor:
    (found,) = pulled_back(text, [result], [(result.shape, result.dtype)], numbers, [grad], [0])
    assert found is not None
    return found


class _InPlace(Function):
    """An op of ``BY_RESULT`` that writes its operand."""

    @staticmethod
    def forward(ctx: Any, target: Tensor, text: str, numbers: list[Number]) -> Tensor:
        ctx.mark_dirty(target)
        ctx.text, ctx.numbers = text, numbers
        ctx.save_for_backward(found := _written(target, text, numbers))
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (result,) = ctx.saved_tensors
        return _to_target(grad, result, ctx.text, ctx.numbers), None, None


def _is_same(t: Tensor, written: Tensor) -> bool:
    """Whether each element is read from where it is written."""
    return (t.data_ptr(), t.shape, t.stride(), t.dtype) == (
        written.data_ptr(),
        written.shape,
        written.stride(),
        written.dtype,
    )


def _check_out(name: str, out: Tensor, tensors: list[Tensor], shape: torch.Size) -> None:
    """torch's rules for ``out=`` of elementwise ops; resizes ``out``."""
    if needs_grad((out, *tensors)):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, but one of the "
            "arguments requires grad."
        )
    if transformed():
        raise RuntimeError(f"{name}(): out=... is not supported within torch.func transforms or forward AD")
    if out.device != tensors[0].device:
        raise RuntimeError(f"{name}(): Expected out tensor to be on device {tensors[0].device}, but got {out.device}")
    if out.shape != shape:
        if out.numel():
            warnings.warn(
                f"An output with one or more elements was resized since it had shape {list(out.shape)}, which does "
                f"not match the required output shape {list(shape)}.",
                stacklevel=5,
            )
        out.resize_(shape)


# --- public functions ---


def _plain(name: str) -> Line:
    """The line of the named op ``name``: its operands, then its parameters."""
    named, kind = NAMED[name], inspect.Parameter.POSITIONAL_OR_KEYWORD
    operands = [inspect.Parameter(n, kind) for n in ("input", "other")[: named.operands]]
    parameters = [inspect.Parameter(n, kind, default=value) for n, value in named.parameters.items()]

    def line(*args: Any) -> tuple[Any, ...]:
        return (name, *args)

    line.__signature__ = inspect.Signature([*operands, *parameters])  # type: ignore[attr-defined]
    return line


def _parameters(line: Line) -> list[inspect.Parameter]:
    given = inspect.signature(line).parameters.values()
    return [p.replace(annotation="Tensor") if p.default is p.empty else p for p in given]


def _named(function: Any, name: str, parameters: Sequence[inspect.Parameter], doc: str) -> Callable[..., Tensor]:
    function.__name__ = function.__qualname__ = name
    function.__module__ = "triplan.functional"
    function.__doc__ = doc
    function.__signature__ = inspect.Signature(list(parameters), return_annotation="Tensor")
    made: Callable[..., Tensor] = replayed(function)
    TABLE[name] = made
    return made


def _line(made: Line, args: Sequence[Any], options: dict[str, Any]) -> tuple[Any, ...] | Tensor:
    return made(*map(of_python, args), **{name: of_python(value) for name, value in options.items()})


def _of_floats(line: Line) -> Line:
    """``line``, which refuses what is no floating-point tensor."""

    @wraps(line)
    def checked(input: Tensor, *args: Any, **options: Any) -> tuple[Any, ...] | Tensor:
        found = line(input, *args, **options)
        if not isinstance(found, Tensor) and not input.is_floating_point():
            raise NotImplementedError(f"{found[0]}(): expected a floating-point tensor, but got {input.dtype}")
        return found

    return checked


def function(
    name: str, line: Line | None = None, *, inplace: bool = False, out: bool = True, floats: bool = False
) -> Callable[..., Tensor]:
    """The function ``name`` of a line of the table; without one, it is the named op ``name``.

    It has ``out=``, or ``inplace=`` as torch.nn.functional has it; ``floats``: it takes nothing else.
    """
    made, out = line or _plain(name), out and not inplace
    made = _of_floats(made) if floats else made
    given = _parameters(made)
    positional = [p for p in given if p.kind is not p.KEYWORD_ONLY]
    count, keywords = len(positional), given[len(positional) :]
    if inplace:
        positional.append(inspect.Parameter("inplace", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=False))
    if out:
        keywords.append(inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None))

    def call(*args: Any, out: Tensor | None = None, **options: Any) -> Tensor:
        target = args[0] if len(args) > count and args[count] else None
        return run_line(name, _line(made, args[:count], options), out, target)

    return _named(call, name, [*positional, *keywords], documented(name, [p.name for p in given], out, inplace))


def in_place(name: str, line: Line | None = None) -> Callable[..., Tensor]:
    """The function ``name_``, which writes its first argument and returns it."""
    made = line or _plain(name)

    def call(*args: Any, **options: Any) -> Tensor:
        if not isinstance(args[0], Tensor):
            raise TypeError(f"{name}_(): the first argument must be a Tensor")
        return run_line(name, _line(made, args, options), None, args[0])

    doc = f"``{name}`` in place of its first argument, as the method of torch's tensors."
    return _named(call, f"{name}_", _parameters(made), doc)


def both(name: str, line: Line | None = None) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """``name`` and ``name_``."""
    return function(name, line), in_place(name, line)
