"""Replay of functional calls: repeat what a call did, for calls that differ from it in addresses and scalars alone.

The second call of a signature runs as it is written, under a ``Recording``. From then on such calls are repeated by the
code that a ``Program`` makes of it. Calls that read a value of a tensor on the host run as they are written each time.

A call that autograd records is repeated by an autograd.Function (``node``). Its backward is a functional call of the
gradients and saved tensors, recorded and replayed in the same way. Where a backward is itself recorded (for a second
derivative), or transformed, it runs the op's own formula, which is differentiable.

An op's author writes nothing for this. What an op reads besides its arguments and torch's deterministic mode, it reads
by ``setting``. Floats that a kernel takes at run time may differ, except for 0, 1 and -1, if all comparisons that the
op makes of them come out the same (``Noted``). docs/replay.md describes what is kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.autograd import profiler
from torch.compiler import is_dynamo_compiling
from torch.overrides import _get_overloaded_args, handle_torch_function

from triplan.backends.runtime.launcher import is_capturing
from triplan.functional._replay.composed import Composition
from triplan.functional._replay.node import hooks, node
from triplan.functional._replay.numbers import SPECIAL, Noted, plain
from triplan.functional._replay.program import NotRepeatable, Program, Repeat, expression
from triplan.functional._replay.recording import Drawn, Recording, TorchOp, View, geometry, recording
from triplan.functional._watching import nothing_watches, on_gpu, tensors_in, transformed

Tensor = torch.Tensor
F = TypeVar("F", bound=Callable[..., Any])
#: The most replays of one function: shapes may change at every call, and memory is bounded. Untuned.
_MAX_REPLAYS = 1024
#: The most replays of calls of equal shapes, which differ in strides, dtypes or alignment.
_MAX_ALIKE = 8


def _repeat(
    function: Callable[..., Any], args: tuple[Any, ...], result: Any, record: Recording, learn: Callable[..., None]
) -> Repeat | None:
    """How to repeat a recorded call of ``function`` that returned ``result``; None if it cannot be repeated."""
    results = result if isinstance(result, tuple) else (result,)
    if not record.is_repeatable or not all(t is None or isinstance(t, Tensor) for t in results):
        return None
    try:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in results):
            args = plain(args)
            try:
                return _Recipe(args, result, record).repeat
            except NotRepeatable:
                return _Composed(function, args, result, record).repeat
        program = Program(args, record, [t for t in results if t is not None])
        learn(program, results)
        return program.repeat([*program.lines, f"return {expression(result, program.name)}"], {})
    except NotRepeatable:
        return None


class Replays:
    """The replays of one function, by what its calls have in common."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """``function`` is called with all arguments, by position."""
        self._function = function
        #: Gets the program of a call that was recorded, and its results; not of calls that autograd records.
        self.learn: Callable[[Program, tuple[Any, ...]], None] = lambda program, results: None
        self.forget()

    def forget(self) -> None:
        """Drop all replays."""
        self._alike: dict[tuple[Any, ...], list[Repeat]] = {}
        self._count = 0
        #: By the facts of a call that has been made: how many more such calls may be recorded.
        self._came: dict[tuple[Any, ...], int] = {}
        #: The replay that was taken last. Callers try it first.
        self.last: Repeat = _no_repeat

    def call(self, args: tuple[Any, ...]) -> Any:
        """The result of the call: by a replay, or as it is written, which leaves a replay if it can."""
        if not (torch.compiler.is_compiling() or recording() is not None or transformed()) and on_gpu(args):
            try:
                alike = self._alike.get(key := _key(args), ())
            except (TypeError, RuntimeError):  # not hashable, or a nested tensor, which has no shape
                return self._function(*args)
            for repeat in alike:
                if (found := repeat(*args)) is not None:
                    self.last = repeat
                    return found
            # So that tensors have addresses; a profiler's marks would be among what is repeated.
            if nothing_watches(args) and hooks(False) is None and not profiler._is_profiler_enabled:
                # Recorded when it comes the second time: shapes that never come again should not pay for it.
                # What a capture cannot repeat, eager calls may.
                if came := self._came.get(facts := (is_capturing(), *_facts(args))):
                    return self._record(args, key, facts)
                if came is None:
                    if len(self._came) >= _MAX_REPLAYS:
                        self._came = {}
                    self._came[facts] = _MAX_ALIKE
        return self._function(*args)

    def _record(self, args: tuple[Any, ...], key: tuple[Any, ...], facts: tuple[Any, ...]) -> Any:
        args = tuple([_own(a) for a in args])
        with Recording() as record:
            result = self._function(*args)
        repeat = _repeat(self._function, args, result, record, self.learn)
        if repeat is None:
            self._came[facts] = 0
            return result
        # The guard of some replays refuses even the call they are of: with NaN as a scale, or tensors that overlap.
        self._came[facts] = self._came.get(facts, _MAX_ALIKE) - 1
        if self._count >= _MAX_REPLAYS:
            self.forget()
        self._count += 1
        # Replaced whole: other threads may be reading it.
        self._alike[key] = [repeat, *self._alike.get(key, ())][:_MAX_ALIKE]
        self.last = repeat
        return result


def _no_repeat(*args: Any) -> None:
    return None


def _own(a: Any) -> Any:
    """A copy of a list or a float: a caller may change its list, and floats are told apart by identity."""
    return list(a) if type(a) is list else Noted(a) if type(a) is float else a


def _key(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Shapes, and the other arguments; floats that may be scales as one."""
    return tuple([a.shape if isinstance(a, Tensor) else _hashable(a) for a in args])


def _hashable(a: Any) -> Any:
    if isinstance(a, (list, tuple)):
        return _key(tuple(a))
    return float if type(a) is float and a not in SPECIAL else a


def _facts(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that decides whether a call can be repeated."""
    grad = torch.is_grad_enabled()
    return tuple(
        (type(a), a.dtype, a.shape, a.stride(), a.data_ptr() & 15, a.requires_grad and grad)
        if isinstance(a, Tensor)
        else _facts(tuple(a))
        if isinstance(a, (list, tuple))
        else _hashable(a)
        for a in args
    )


def _overrides(args: tuple[Any, ...]) -> bool:
    """Whether the type of a tensor among ``args`` overrides torch's functions, whatever modes are active."""
    return bool(_get_overloaded_args(args))


def _with_axis(function: Callable[..., Any], axis: int | None, required: list[str], /, **given: Any) -> Any:
    """``function`` of ``given``, of which one of ``required`` is missing or ``axis`` is given."""
    absent = [name for name in required if given[name] is None]
    if axis is None or absent != ["dim"]:
        raise TypeError(
            f"{function.__name__}() misses {', '.join(absent)}" if absent else "dim and axis are one argument"
        )
    return function(**{**given, "dim": axis})


def replayed(function: F) -> F:
    """``function``, repeated by replays. Its parameters have names: no ``*args``.

    Where torch has a method of that name, ``axis=`` is taken for a ``dim`` without a default, as torch does.
    """
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty]
    at = required.index("dim") if "dim" in required and hasattr(Tensor, function.__name__) else len(required)
    required = required[at:]
    scope: dict[str, Any] = {"compiling": is_dynamo_compiling, "function": function}
    # Subclasses of Tensor that override torch's functions, or by default keep their type, see this one as torch's own.
    scope |= {"watched": torch._C._has_torch_function, "overrides": _overrides, "override": handle_torch_function}
    declared, is_named = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not is_named:
            declared.append("*")
            is_named = True
        if p.default is p.empty:
            declared.append(f"{p.name}=None" if p.name in required else p.name)
        else:
            scope[f"default_{p.name}"] = p.default
            declared.append(f"{p.name}=default_{p.name}")
    by_axis = ""
    if required:
        declared += ["axis=None"] if is_named else ["*", "axis=None"]
        scope |= {"with_axis": _with_axis}
        values = ", ".join(f"{p.name}={p.name}" for p in parameters)
        absent = " or ".join(f"{name} is None" for name in required)
        by_axis = f"if {absent} or axis is not None: return with_axis(this, axis, {required}, {values})"
    names = ", ".join(p.name for p in parameters)
    given = ", ".join(f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in parameters)
    source = f"""
def plain({names}):
    return function({given})
def {function.__name__}({", ".join(declared)}):
    {by_axis}
    if compiling():
        return function({given})
    found = replays.last({names})
    if found is not None:
        return found
    call = ({names},)
    if not watched(call):
        return replays.call(call)
    return override(this, call, {given}) if overrides(call) else function({given})
"""
    exec(compile(source, f"<replays of {function.__name__}>", "exec"), scope)
    scope["this"] = scope[function.__name__]  # whose name may be a parameter's, too: pad(input, pad)
    scope["plain"].__name__ = function.__name__
    replays = scope["replays"] = Replays(scope["plain"])
    made: Any = update_wrapper(scope[function.__name__], function)
    made.replays = replays
    return cast(F, made)


def repeats(inner: Any) -> Callable[[F], F]:
    """Decorates a function that only names the results of ``inner``: its replays are those."""

    def mark(function: F) -> F:
        function.__dict__["replays"] = inner.replays
        return function

    return mark


# --- calls that autograd records ---


class _Context:
    """Stands for autograd's ctx in an op's ``setup`` and ``backward``."""

    def __init__(self, **attributes: Any) -> None:
        self.saved_tensors: tuple[Tensor | None, ...] = ()
        self.constant_results: tuple[Tensor, ...] = ()
        self.materializes = True
        self.__dict__.update(attributes)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.constant_results = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materializes = value


class _Argument(NamedTuple):
    """An argument of an op: the tensor of the call that it is a view of, and the views."""

    tensor: int
    views: list[View]


class _Result(NamedTuple):
    """A result of an op: the output of the node that is a view of it, and the views."""

    output: int
    views: list[View]


class _Saved(NamedTuple):
    """A tensor that an op saved, made from one that the node saved."""

    at: int  # the position of the node's
    views: list[View]
    is_inverse: bool = False  # the node's is the view
    part: tuple[Any, ...] | None = None  # (dtype, shape, strides, elements from the start), of the hidden buffer

    def of(self, saved: Sequence[Tensor | None]) -> Tensor | None:
        t = saved[self.at]
        if t is not None and self.part is not None:
            dtype, *where = self.part
            return t.view(dtype).as_strided(*where)
        for view in reversed(self.views) if self.is_inverse else self.views:
            t = None if t is None else view.pull_back(t) if self.is_inverse else view.apply(t)
        return t


class _Recipe:
    """How to repeat a call that autograd records: one op of views of the call's tensors, whose results are viewed."""

    def __init__(self, args: tuple[Any, ...], result: Any, record: Recording) -> None:
        if len(record.differentiated) != 1:
            raise NotRepeatable
        self.op, op_args, op_result = record.differentiated[0]
        op_results: tuple[Tensor, ...] = op_result if isinstance(op_result, tuple) else (op_result,)
        ctx = _Context()
        self.op.setup(ctx, op_args, op_result)
        self._attributes = {k: plain(v) for k, v in vars(ctx).items() if k not in ("saved_tensors", "constant_results")}
        if any(isinstance(v, Drawn) for a in self._attributes.values() for v in (a if isinstance(a, list) else (a,))):
            raise NotRepeatable  # other numbers in each call
        saved = ctx.saved_tensors
        constant = [geometry(t) for t in ctx.constant_results]
        outputs = [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]
        self._results = _results(op_args, op_results, saved, outputs, record)
        self._outputs = len(outputs)
        self._shapes = [None if geometry(t) in constant else (t.shape, t.dtype) for t in op_results]
        returned = [geometry(t) for t, found in zip(op_results, self._results, strict=True) if found is not None]
        fresh = [s for s in saved if s is not None and s.untyped_storage()._cdata in record.fresh]
        fresh = [s for s in fresh if geometry(s) not in returned]
        touched = {t.untyped_storage()._cdata for op in record.steps if isinstance(op, TorchOp) for t in op.tensors()}
        #: Saved tensors that torch's ops work on, such as a seed that torch draws: no part of another tensor.
        apart = [s for s in fresh if s.untyped_storage()._cdata in touched]
        hidden = [s for s in fresh if s.untyped_storage()._cdata not in touched]
        program = Program(args, record, (*outputs, *apart), hidden, scales=False)
        if any(program.written) or not all(program.is_new(t) for t in outputs):
            raise NotRepeatable
        for t in outputs:
            program.own(t)  # a node's result that is a view could not be written in place
        self._arguments = [self._argument(a, program) for a in op_args]
        self._tensors, self._differentiable = len(program.tensors), program.differentiable
        self._needs = tuple(isinstance(a, Tensor) and a.requires_grad for a in op_args)
        kept: list[str] = []
        self._saved = [self._keep(s, kept, op_results, outputs, hidden, apart, program) for s in saved]
        self._again = _again(op_args, op_results, saved, hidden)
        self.backwards = Replays(self.formula)
        constant_outputs = [t for t in outputs if not t.requires_grad or geometry(t) in constant]
        given = [how for how in self._saved if how is not None]
        self.repeat = node(
            self.formula,
            self.backwards,
            self.op.name,
            program,
            kept,
            outputs,
            constant_outputs,
            result,
            saves_alike=len({how.at for how in given}) == len(given)
            and not any(how.views or how.part for how in given),
        )

    def _argument(self, a: Any, program: Program) -> _Argument | None:
        if isinstance(a, (list, tuple)) and any(isinstance(t, Tensor) and t.requires_grad for t in a):
            raise NotRepeatable
        if not isinstance(a, Tensor) or not a.requires_grad:
            return None
        tensor, views = program.source(a)
        if not all(view.is_bijective for view in views):
            raise NotRepeatable
        return _Argument(tensor, views)

    def _keep(
        self,
        s: Tensor | None,
        kept: list[str],
        op_results: Sequence[Tensor],
        outputs: Sequence[Tensor],
        hidden: Sequence[Tensor],
        apart: Sequence[Tensor],
        program: Program,
    ) -> _Saved | None:
        """How ``s``, which the op saved, follows from what the node saves, which ``kept`` lists as expressions."""

        def at(name: str) -> int:
            if name not in kept:
                kept.append(name)
            return kept.index(name)

        if s is None:
            return None
        if not program.is_new(s):
            tensor, views = program.source(s)
            return _Saved(at(f"x{tensor}"), views)
        for t, offset in zip(hidden, program.offsets, strict=True):
            if t is s:
                return _Saved(at("hidden"), [], part=(s.dtype, s.shape, s.stride(), offset // s.element_size()))
        for t, found in zip(op_results, self._results, strict=True):
            if found is not None and geometry(t) == geometry(s):
                return _Saved(at(program.name(outputs[found.output])), found.views, True)
        if any(t is s for t in apart):
            return _Saved(at(program.name(s)), [])
        raise NotRepeatable

    def formula(self, *call: Tensor | None) -> tuple[Any, ...]:
        """The gradients, from those of the node's outputs and its saved tensors, by the op's own backward."""
        grads, saved = call[: self._outputs], call[self._outputs :]
        ctx = _Context(**self._attributes, needs_input_grad=self._needs)
        found_saved = [None if how is None else how.of(saved) for how in self._saved]
        if self._again is not None and torch.is_grad_enabled():
            results = self.op(*[a[0] if isinstance(a, tuple) else found_saved[a] for a in self._again[0]])
            for position, j in self._again[1]:
                found_saved[position] = results[j]
        ctx.saved_tensors = tuple(found_saved)
        given: list[Tensor | None] = []
        for found, zeros in zip(self._results, self._shapes, strict=True):
            grad = None if found is None else grads[found.output]
            if grad is not None and found is not None:
                for view in reversed(found.views):
                    grad = view.pull_back(grad)
            elif ctx.materializes and zeros is not None:
                like = next(t for t in call if t is not None)
                grad = torch.zeros(zeros[0], dtype=zeros[1], device=like.device)
            given.append(grad)
        total: list[Tensor | None] = [None] * self._tensors
        for argument, grad in zip(self._arguments, self.op.backward(ctx, *given), strict=False):
            if argument is None or grad is None:
                continue
            for view in reversed(argument.views):
                grad = view.pull_back(grad)
            known = total[argument.tensor]
            total[argument.tensor] = grad if known is None else known + grad
        return None, *[total[i] for i in self._differentiable]


def _results(
    op_args: Sequence[Any],
    op_results: Sequence[Tensor],
    saved: Sequence[Tensor | None],
    outputs: list[Tensor],
    record: Recording,
) -> list[_Result | None]:
    """Which of ``outputs`` is a view of each of the op's results; None of one that stays within the node.

    Adds outputs: second derivatives need saved results as functions of the op's arguments. If all arguments are saved
    too, the backward runs the op again; if not, the node returns those results.
    """
    count, saved_by_op = len(outputs), [geometry(s) for s in saved if s is not None]
    runs_again = all(
        geometry(a) in saved_by_op if isinstance(a, Tensor) else not isinstance(a, (list, tuple)) for a in op_args
    )
    results: list[_Result | None] = []
    for t in op_results:
        paths = [(k, path) for k in range(count) if (path := record.path(t, outputs[k])) is not None]
        if len(paths) > 1 or any(not view.is_bijective for _, path in paths for view in path):
            raise NotRepeatable
        if not paths and not runs_again and t.requires_grad and t.numel() and geometry(t) in saved_by_op:
            outputs.append(t)
            paths = [(len(outputs) - 1, [])]
        results.append(_Result(*paths[0]) if paths else None)
    if sorted(r.output for r in results if r is not None) != list(range(len(outputs))):
        raise NotRepeatable
    return results


def _again(
    op_args: Sequence[Any], op_results: Sequence[Tensor], saved: Sequence[Tensor | None], hidden: Sequence[Tensor]
) -> tuple[list[Any], list[tuple[int, int]]] | None:
    """To run the op again: its arguments, or where they are saved; and which results are saved where.

    None if its backward never has to.
    """
    if not any(s.requires_grad and s.numel() for s in hidden):
        return None
    positions = {geometry(s): i for i, s in enumerate(saved) if s is not None}
    args = [positions[geometry(a)] if isinstance(a, Tensor) else (a,) for a in op_args]
    return args, [(positions[geometry(t)], j) for j, t in enumerate(op_results) if any(t is s for s in hidden)]


class _Composed:
    """How to repeat a call that autograd records, of any ops."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], result: Any, record: Recording) -> None:
        outputs = list(tensors_in(result if isinstance(result, tuple) else (result,)))
        program = Program(args, record, outputs, scales=False)
        # A view of a new tensor could not be written in place, as what the function returns can.
        names = {program.name(t) for t in outputs if program.is_new(t)}
        if len(names) != len(outputs) or not all(map(str.isidentifier, names)):
            raise NotRepeatable
        composition = Composition(function, args, outputs, program)
        self.formula = composition.formula
        self.backwards = Replays(self.formula)
        kept = [f"x{i}" if is_saved else "None" for i, is_saved in enumerate(composition.saves)]
        kept = kept if any(composition.saves) else []
        constant = [t for t in outputs if not t.requires_grad]
        self.repeat = node(self.formula, self.backwards, function.__name__, program, kept, outputs, constant, result)
