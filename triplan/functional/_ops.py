"""How a functional call reaches its kernels: registration with torch.library, autograd, ``out=`` and in-place calls.

An op is made from ``shape(*args)``, which validates the arguments and returns the result's shape; ``fill(out, *args)``,
which writes the result (or ``update(out, *args[1:])``, which changes a copy of the first argument); and for gradients
``setup`` and ``backward``, as torch.autograd.Function has them. The library ``triplan`` (or ``acme``, if the name is
``acme::op``) then has:

- ``triplan::op``, out of place, with a fake kernel and registered gradients: compiled graphs contain it;
- ``triplan::op_out``, which writes a tensor of the caller's, and ``triplan::op_``, which updates its first argument.
  A registered op that mutates cannot carry autograd, so these two refuse tensors that require grad. In-place calls
  on such tensors are an autograd.Function with ``mark_dirty`` over ``op_``.

Ops with several results, or whose result's dtype is not their first argument's, are ``Recorded``: they have only
``triplan::op``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import Function
from torch.compiler import is_dynamo_compiling

from triplan.facade.check import is_injective, may_overlap
from triplan.facade.replay import CallReplays, Ran
from triplan.sku.facts import fact

Tensor = torch.Tensor
Grads = tuple[Any, ...]


@cache
def _library(namespace: str) -> Any:
    library: Callable[..., Any] = torch.library.Library  # untyped in torch
    return library(namespace, "FRAGMENT")


def tensors_in(args: Sequence[Any]) -> Iterator[Tensor]:
    """Every tensor among ``args``, those in lists too."""
    for a in args:
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from (t for t in a if isinstance(t, Tensor))


def needs_grad(args: Sequence[Any]) -> bool:
    """Whether autograd would record a call with ``args``."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args))


# --- registration ---


def _qualified(name: str) -> tuple[str, str]:
    """The namespace of torch.library, and the name in it; ``triplan`` for a name without a namespace."""
    namespace, _, bare = name.rpartition("::")
    return namespace or "triplan", bare


def _register(name: str, signature: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    namespace, bare = _qualified(name)
    library = _library(namespace)
    library.define(f"{bare}{signature}", tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        library.impl(bare, kernel, key)
    torch.library.register_fake(f"{namespace}::{bare}", fake, lib=library)
    return getattr(getattr(torch.ops, namespace), bare).default


def _register_mutating(name: str, signature: str, kernel: Callable[..., None], validate: Callable[..., Any]) -> Any:
    def fake(*args: Any) -> None:
        validate(*args)

    op = _register(name, signature, kernel, fake)
    namespace, bare = _qualified(name)

    def refuse_grad(keyset: Any, *args: Any) -> None:
        if needs_grad(args):
            raise RuntimeError(
                f"{namespace}::{bare} writes its argument and records no gradient, but one of its arguments requires "
                "grad; call the function that it belongs to (triplan's are in triplan.functional)"
            )
        with torch._C._AutoDispatchBelowAutograd():
            op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    _library(namespace).impl(bare, refuse_grad, "Autograd", with_keyset=True)
    return op


class Recorded:
    """A registered op that autograd records: call it with every positional argument of its signature.

    It can be differentiated as many times as ``backward`` can, also under torch.func's grad and vmap (one example at a
    time). Forward mode is refused.
    """

    def __init__(
        self,
        name: str,
        signature: str,
        kernel: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        setup: Callable[[Any, Any, Any], None],
        backward: Callable[..., Grads],
    ) -> None:
        """``signature`` is in the schema language; ``kernel`` and ``fake`` return its results: new tensors."""
        self.name, self._kernel = name, kernel
        self.overload = _register(name, signature, kernel, fake)

        def exact(ctx: Any, *grads: Any) -> Grads:
            # The dispatcher leaves out arguments that are at their defaults.
            return backward(ctx, *grads)[: len(ctx.needs_input_grad)]

        namespace, bare = _qualified(name)
        library = _library(namespace)
        torch.library.register_autograd(f"{namespace}::{bare}", exact, setup_context=setup, lib=library)
        self.function = _function(self, setup, backward)

    def __call__(self, *args: Any) -> Any:
        if is_dynamo_compiling():
            _refuse_forward_mode(self.name)
        if torch.compiler.is_compiling():
            return self.overload(*args)
        if _transformed() or needs_grad(args):
            return self.function.apply(*args)
        return self.below_autograd(*args)

    def below_autograd(self, *args: Any) -> Any:
        """The call without autograd: of the kernel itself if nothing watches, else through torch's dispatcher."""
        return self._kernel(*args) if _nothing_watches(args) else self.overload(*args)


class Op(Recorded):
    """One out-of-place op with one result, ``out=`` and perhaps in place."""

    def __init__(
        self,
        name: str,
        parameters: str,
        *,
        shape: Callable[..., Sequence[int]],
        fill: Callable[..., Ran | None] | None = None,
        update: Callable[..., Ran | None] | None = None,
        setup: Callable[[Any, Any, Any], None],
        backward: Callable[..., Grads],
    ) -> None:
        """``parameters`` is in the schema language; the first is a Tensor whose dtype and device the result has.

        Ops that change a copy of their first argument have ``update(out, *args)`` instead of ``fill``, and get ``op_``.
        """
        self.shape, self.update = shape, update
        self.fill = fill or self._copy_and_update
        # Replays compare no lists of tensors; and launches alone do not copy what is then updated.
        single = "[]" not in parameters
        self._new, self._given, self._in_place = (
            CallReplays(single and makes) for makes in (fill is not None, fill is not None, update is not None)
        )

        def fake(like: Tensor, *args: Any) -> Tensor:
            return like.new_empty(shape(like, *args))

        super().__init__(name, f"({parameters}) -> Tensor", self._compute, fake, setup=setup, backward=backward)
        self.out_overload = _register_mutating(
            f"{name}_out", f"(Tensor(a!) out, {parameters}) -> ()", self._compute_into, lambda out, *args: shape(*args)
        )
        if update is not None:
            signature = f"({parameters.replace('Tensor ', 'Tensor(a!) ', 1)}) -> ()"
            self.in_place_overload = _register_mutating(f"{name}_", signature, self._compute_in_place, shape)
            self.in_place_function = _in_place_function(self, setup, backward)

    # --- kernels: below autograd, on real tensors ---

    def _run(self, like: Tensor, *args: Any) -> tuple[Tensor, Ran | None]:
        out = torch.empty(self.shape(like, *args), dtype=like.dtype, device=like.device)
        return out, self.fill(out, like, *args)

    def _compute(self, like: Tensor, *args: Any) -> Tensor:
        return self._run(like, *args)[0]

    def _copy_and_update(self, out: Tensor, target: Tensor, *args: Any) -> None:
        assert self.update is not None
        out.copy_(target)
        self.update(out, *args)

    def _run_into(self, out: Tensor, *inputs: Any) -> tuple[Tensor, Ran | None]:
        _refuse_unwritable(self.name, out)
        if any(may_overlap(out, t) for t in tensors_in(inputs)):
            return out.copy_(self._compute(*inputs)), None
        self.shape(*inputs)
        return out, self.fill(out, *inputs)

    def _compute_into(self, out: Tensor, *inputs: Any) -> None:
        self._run_into(out, *inputs)

    def _run_in_place(self, out: Tensor, *args: Any) -> tuple[Tensor, Ran | None]:
        assert self.update is not None
        self.shape(out, *args)
        _refuse_unwritable(f"{self.name}_", out)
        # An input that shares memory with the result is copied, as if all inputs were read before the first write.
        separate = [a.clone() if isinstance(a, Tensor) and may_overlap(out, a) else a for a in args]
        return out, self.update(out, *separate)

    def _compute_in_place(self, out: Tensor, *args: Any) -> None:
        self._run_in_place(out, *args)

    # --- calls ---

    def forget(self) -> None:
        """Drop the replays of its calls."""
        for replays in (self._new, self._given, self._in_place):
            replays.forget()

    def __call__(self, *args: Any) -> Tensor:
        if is_dynamo_compiling():
            _refuse_forward_mode(self.name)
            result: Tensor = self.overload(*args)
            return result
        if (found := self._new.last(args)) is not None:
            return found
        if torch.compiler.is_compiling():
            result = self.overload(*args)
        elif _transformed() or needs_grad(args):
            result = self.function.apply(*args)
        else:
            result = self.below_autograd(*args)
        return result

    def below_autograd(self, *args: Any) -> Tensor:
        if not _nothing_watches(args):
            result: Tensor = self.overload(*args)
            return result
        return self._new.call(args, self._run)

    def into(self, out: Tensor | None, *args: Any) -> Tensor:
        """The call with torch's ``out=``: resized to the result's shape, never differentiated."""
        if out is None:
            return self(*args)
        given = (out, *args)
        if is_dynamo_compiling():
            _refuse_forward_mode(self.name)
        elif (found := self._given.last(given)) is not None:
            return found
        check_out(self.name, out, args, lambda: self.shape(*args))
        if not is_dynamo_compiling() and out.is_neg():  # the dispatcher has no lazy negation for tensors it writes
            return out.copy_(self(*args))
        if torch.compiler.is_compiling() or not _nothing_watches(given):
            self.out_overload(*given)
            return out
        return self._given.call(given, self._run_into)

    def in_place(self, target: Tensor, *args: Any) -> Tensor:
        """The call that updates ``target`` and returns it."""
        given = (target, *args)
        if is_dynamo_compiling():
            _refuse_forward_mode(self.name)
        elif (found := self._in_place.last(given)) is not None:
            return found
        grad = needs_grad(given)
        if _transformed() or (grad and torch.compiler.is_compiling()):
            return target.copy_(self(target, *args))
        if not grad:
            if torch.compiler.is_compiling() or not _nothing_watches(given):
                self.in_place_overload(*given)
                return target
            return self._in_place.call(given, self._run_in_place)
        _refuse_leaf(target)
        result: Tensor = self.in_place_function.apply(target, *args)
        return result


def check_out(name: str, out: Tensor, args: Sequence[Any], shape: Callable[[], Sequence[int]]) -> None:
    """torch's rules for ``out=``: no gradient, the first argument's dtype and device; resized to the result's shape.

    Whatever raises does so before ``out`` is touched. Stricter than torch, which in some functions resizes a tensor
    whose elements overlap, and then overwrites what it was a view of.
    """
    if needs_grad((out, *args)):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, but one of the "
            "arguments requires grad."
        )
    if _transformed():
        raise RuntimeError(f"{name}(): out=... is not supported within torch.func transforms or forward AD")
    result, like = tuple(shape()), args[0]
    if out.dtype != like.dtype:
        raise RuntimeError(f"{name}(): Expected out tensor to have dtype {like.dtype}, but got {out.dtype}")
    if out.device != like.device:
        raise RuntimeError(f"{name}(): Expected out tensor to be on device {like.device}, but got {out.device}")
    _refuse_unwritable(name, out)
    if tuple(out.shape) != result:
        if out.numel():
            warnings.warn(
                f"An output with one or more elements was resized since it had shape {tuple(out.shape)}, which does "
                f"not match the required output shape {result}.",
                stacklevel=4,
            )
        out.resize_(result)


def composed(name: str, out: Tensor | None, args: Sequence[Any], compute: Callable[[], Tensor]) -> Tensor:
    """``compute()``, a composition of other ops, with torch's ``out=``: ``args`` as for ``check_out``."""
    if out is None:
        return compute()
    if needs_grad((out, *args)):
        check_out(name, out, args, lambda: out.shape)  # refuses before anything is computed
    result = compute()
    check_out(name, out, args, lambda: result.shape)
    return out.copy_(result)


# --- autograd ---


def _function(op: Recorded, setup: Callable[..., None], backward: Callable[..., Grads]) -> Any:
    class OutOfPlace(Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return op.below_autograd(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            setup(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Grads:
            return _without_lists(backward(ctx, *grads))

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
            if info.batch_size == 0:
                raise RuntimeError(f"{op.name}: vmap over a batch of 0 is not supported")
            each = [op(*(_slice(a, d, b) for a, d in zip(args, in_dims, strict=True))) for b in range(info.batch_size)]
            if isinstance(each[0], Tensor):
                return torch.stack(each), 0
            return tuple(map(torch.stack, zip(*each, strict=True))), (0,) * len(each[0])

    OutOfPlace.__name__ = OutOfPlace.__qualname__ = "_".join(_qualified(op.name))
    return OutOfPlace


def _in_place_function(op: Op, setup: Callable[..., None], backward: Callable[..., Grads]) -> Any:
    class InPlace(Function):
        @staticmethod
        def forward(target: Tensor, *args: Any) -> Tensor:
            op.in_place_overload(target, *args)
            return target

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.mark_dirty(inputs[0])
            setup(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Grads:
            return _without_lists(backward(ctx, *grads))

    InPlace.__name__ = InPlace.__qualname__ = "_".join(_qualified(f"{op.name}_"))
    return InPlace


def _without_lists(grads: Grads) -> Grads:
    """torch.library wants a list for a list of tensors; a Function wants None."""
    return tuple(None if isinstance(g, list) else g for g in grads)


def _slice(value: Any, dim: Any, at: int) -> Any:
    """One example of a vmapped argument."""
    if isinstance(dim, (list, tuple)):
        return [_slice(v, d, at) for v, d in zip(value, dim, strict=True)]
    return value if dim is None else value.select(dim, at)


def _transformed() -> bool:
    """Whether functorch or forward-mode AD is active. A Function says what it supports, a registered op cannot."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _refuse_forward_mode(name: str) -> None:
    """In a compiled graph the registered op would silently drop tangents."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError(f"{name} has no jvp: forward-mode AD is not supported")


def _nothing_watches(args: Sequence[Any]) -> bool:
    """Whether the dispatcher would go straight to the kernel, so that it can be skipped.

    True for plain CPU and CUDA tensors (no subclass, no lazy view) with no mode, tracer or autocast. Callers handle
    functorch and gradients.
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack() or torch._C._get_tracing_state():
        return False
    return all(
        torch._C._dispatch_keys(t).raw_repr() == _plain_keys(t.device.type)
        and not torch.is_autocast_enabled(t.device.type)
        for t in tensors_in(args)
    )


@fact
def _plain_keys(device_type: str) -> int:
    if device_type not in ("cpu", "cuda"):
        return -1
    with torch.inference_mode(False):
        return int(torch._C._dispatch_keys(torch.empty(0, device=device_type)).raw_repr())


def _refuse_leaf(target: Tensor) -> None:
    # mark_dirty raises this too, but only after the tensor has been written.
    if target.requires_grad and target.is_leaf:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    base = target._base
    if base is not None and base.requires_grad and base.is_leaf:
        raise RuntimeError("a view of a leaf Variable that requires grad is being used in an in-place operation.")


def _refuse_unwritable(name: str, out: Tensor) -> None:
    # Dynamo knows no inference tensors; in a compiled graph the kernel refuses them.
    if not is_dynamo_compiling() and out.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{name}(): Inplace update to inference tensor outside InferenceMode is not allowed. You can make a clone "
            "to get a normal tensor before doing inplace update."
        )
    if not is_injective(out):
        raise RuntimeError(
            f"{name}(): unsupported operation: more than one element of the written-to tensor refers to a single "
            "memory location. Please clone() the tensor before performing the operation."
        )
