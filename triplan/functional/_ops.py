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
``triplan::op``. Ops for inference that write arguments are ``Writing``.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import Function
from torch.compiler import is_dynamo_compiling

from triplan.facade.check import check_storage, is_injective, may_overlap
from triplan.functional._forward import Linearity, derivative, refuse_forward_mode, save_for_forward
from triplan.functional._replay.recording import recording, unwatched
from triplan.functional._replay.replay import Replays
from triplan.functional._sharding import announce, any_dtensor, dispatched, make_known, write
from triplan.functional._sharding.axes import Axes
from triplan.functional._watching import needs_grad, tensors_in, transformed

Tensor = torch.Tensor
Grads = tuple[Any, ...]


@cache
def _library(namespace: str) -> Any:
    library: Callable[..., Any] = torch.library.Library  # untyped in torch
    return library(namespace, "FRAGMENT")


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


def _register_mutating(name: str, signature: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    op = _register(name, signature, kernel, fake)
    namespace, bare = _qualified(name)

    def refuse_grad(keyset: Any, *args: Any) -> Any:
        if needs_grad(args):
            raise RuntimeError(
                f"{namespace}::{bare} writes its argument and records no gradient, but one of its arguments requires "
                "grad; call the function that it belongs to (triplan's are in triplan.functional)"
            )
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    _library(namespace).impl(bare, refuse_grad, "Autograd", with_keyset=True)
    return op


class Differentiable:
    """An op that autograd records in eager calls of plain tensors; call it with every positional argument."""

    #: Shape and dtype of the results, as new tensors. An op without is never called under vmap.
    fake: Callable[..., Any]
    #: A short way for forward mode. None: by the backward of the backward.
    linearity: Linearity | None = None

    def __init__(
        self,
        name: str,
        kernel: Callable[..., Any],
        *,
        setup: Callable[[Any, Any, Any], None],
        backward: Callable[..., Grads],
    ) -> None:
        """``kernel`` returns new tensors; ``setup`` and ``backward`` are as torch.autograd.Function has them."""
        self.name, self._kernel, self.setup, self.backward = name, kernel, setup, backward
        self.function = _function(self, setup, backward)

    def __call__(self, *args: Any) -> Any:
        result = self.function.apply(*args)
        if (record := recording()) is not None:
            record.differentiated.append((self, args, result))
        return result

    def below_autograd(self, *args: Any) -> Any:
        """The call without autograd."""
        return self._kernel(*args)


#: Ops by name: a family's formula may contain another family's op, which it must not import.
RECORDED: dict[str, Recorded] = {}


class Recorded(Differentiable):
    """A registered op that autograd records: call it with every positional argument of its signature.

    It can be differentiated as many times as ``backward`` can, also under torch.func's grad and vmap (one example at a
    time). In forward mode too, but in compiled graphs, which refuse it.
    """

    def __init__(
        self,
        name: str,
        signature: str,
        kernel: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        axes: Axes,
        setup: Callable[[Any, Any, Any], None],
        backward: Callable[..., Grads],
        linearity: Linearity | None = None,
    ) -> None:
        """``signature`` is in the schema language; ``kernel`` and ``fake`` return its results: new tensors. ``axes``:
        how ranks can divide its tensors (see ``_sharding.axes``)."""
        super().__init__(name, kernel, setup=setup, backward=backward)
        self.fake, self.linearity = fake, linearity
        #: Of calls through torch's dispatcher, such as those of a DTensor's local tensors and of compiled graphs.
        self.replays = Replays(kernel)

        def dispatched_kernel(*args: Any) -> Any:
            return self.replays.call(args)

        self.overload = _register(name, signature, dispatched_kernel, fake)
        RECORDED[name] = self
        announce(self.overload, axes)

        def exact(ctx: Any, *grads: Any) -> Grads:
            # The dispatcher leaves out arguments that are at their defaults.
            return backward(ctx, *grads)[: len(ctx.needs_input_grad)]

        namespace, bare = _qualified(name)
        library = _library(namespace)
        torch.library.register_autograd(f"{namespace}::{bare}", exact, setup_context=setup, lib=library)

    def __call__(self, *args: Any) -> Any:
        if is_dynamo_compiling():
            refuse_forward_mode(self.name)
        if torch.compiler.is_compiling():
            make_known()
            return self.overload(*args)
        if transformed() or needs_grad(args):
            return super().__call__(*args)
        return self.below_autograd(*args)

    def below_autograd(self, *args: Any) -> Any:
        """The call without autograd: of the kernel itself if nothing watches, else through torch's dispatcher."""
        return self._kernel(*args) if unwatched(args) else dispatched(self.overload, args)


class Op(Recorded):
    """One out-of-place op with one result, ``out=`` and perhaps in place."""

    def __init__(
        self,
        name: str,
        parameters: str,
        *,
        axes: Axes,
        shape: Callable[..., Sequence[int]],
        fill: Callable[..., object] | None = None,
        update: Callable[..., object] | None = None,
        setup: Callable[[Any, Any, Any], None],
        backward: Callable[..., Grads],
        linearity: Linearity | None = None,
        keeps_strides: bool = False,
    ) -> None:
        """``parameters`` is in the schema language; the first is a Tensor whose dtype and device the result has, with
        ``keeps_strides`` its strides, too, as ``torch.empty_like`` has them (else the result is contiguous).

        Ops that change a copy of their first argument have ``update(out, *args)`` instead of ``fill``, and get ``op_``.
        """
        self.shape, self.update, self._keeps_strides = shape, update, keeps_strides
        self.fill = fill or self._copy_and_update

        def fake(like: Tensor, *args: Any) -> Tensor:
            size = shape(like, *args)
            return torch.empty_like(like) if keeps_strides else like.new_empty(size)

        def check(*args: Any) -> None:
            shape(*args)

        def check_into(out: Tensor, *args: Any) -> None:
            shape(*args)

        signature = f"({parameters}) -> Tensor"
        how: dict[str, Any] = {"axes": axes, "setup": setup, "backward": backward, "linearity": linearity}
        super().__init__(name, signature, self._compute, fake, **how)
        self.out_overload = _register_mutating(
            f"{name}_out", f"(Tensor(a!) out, {parameters}) -> ()", self._compute_into, check_into
        )
        if update is not None:
            signature = f"({parameters.replace('Tensor ', 'Tensor(a!) ', 1)}) -> ()"
            self.in_place_overload = _register_mutating(f"{name}_", signature, self._compute_in_place, check)
            self.in_place_function = _in_place_function(self, setup, backward)

    # --- kernels: below autograd, on real tensors ---

    def _compute(self, like: Tensor, *args: Any) -> Tensor:
        size = self.shape(like, *args)
        plain = None if self._keeps_strides else torch.empty(size, dtype=like.dtype, device=like.device)
        out = torch.empty_like(like) if plain is None else plain
        self.fill(out, like, *args)
        return out

    def _copy_and_update(self, out: Tensor, target: Tensor, *args: Any) -> None:
        assert self.update is not None
        self._check_storage(target, *args)
        out.copy_(target)
        self.update(out, *args)

    def _check_storage(self, *args: Any) -> None:
        """Before torch's copies, which do not look."""
        for t in tensors_in(args):
            check_storage(self.name, "an argument", t)

    def _compute_into(self, out: Tensor, *inputs: Any) -> None:
        self._check_storage(out, *inputs)
        _refuse_unwritable(self.name, out)
        if any(may_overlap(out, t) for t in tensors_in(inputs)):
            out.copy_(self._compute(*inputs))
        else:
            self.shape(*inputs)
            self.fill(out, *inputs)

    def _compute_in_place(self, out: Tensor, *args: Any) -> None:
        assert self.update is not None
        self.shape(out, *args)
        _refuse_unwritable(f"{self.name}_", out)
        self._check_storage(out, *args)
        # An input that shares memory with the result is copied, as if all inputs were read before the first write.
        self.update(out, *[a.clone() if isinstance(a, Tensor) and may_overlap(out, a) else a for a in args])

    # --- calls ---

    def __call__(self, *args: Any) -> Tensor:
        result: Tensor = super().__call__(*args)
        return result

    def into(self, out: Tensor | None, *args: Any) -> Tensor:
        """The call with torch's ``out=``: resized to the result's shape, never differentiated."""
        if out is None:
            result: Tensor = self(*args)
            return result
        if is_dynamo_compiling():
            refuse_forward_mode(self.name)
        if not torch.compiler.is_compiling() and any_dtensor((out, *args)):
            check_out(self.name, out, args, lambda: out.shape)  # what is known without a result
            return write(self.name, out, self(*args))
        check_out(self.name, out, args, lambda: self.shape(*args))
        if not is_dynamo_compiling() and out.is_neg():  # the dispatcher has no lazy negation for tensors it writes
            return out.copy_(self(*args))
        if torch.compiler.is_compiling() or not unwatched((out, *args)):
            self.out_overload(out, *args)
        else:
            self._compute_into(out, *args)
        return out

    def in_place(self, target: Tensor, *args: Any) -> Tensor:
        """The call that updates ``target`` and returns it."""
        given = (target, *args)
        if is_dynamo_compiling():
            refuse_forward_mode(self.name)
        grad = needs_grad(given)
        if not torch.compiler.is_compiling() and any_dtensor(given):
            if grad:
                refuse_leaf(target)
            return write(f"{self.name}_", target, self(target, *args))
        if transformed() or (grad and torch.compiler.is_compiling()):
            return target.copy_(self(target, *args))
        if grad:
            refuse_leaf(target)
            result: Tensor = self.in_place_function.apply(target, *args)
            return result
        if torch.compiler.is_compiling() or not unwatched(given):
            self.in_place_overload(*given)
        else:
            self._compute_in_place(*given)
        return target


class Writing:
    """A registered op that writes some of its arguments, and has no gradient: call it with every positional argument.

    It refuses arguments that require grad, transforms and DTensors, and to write what torch would not.
    """

    def __init__(self, name: str, signature: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
        """``signature``, in the schema language, says what is written; ``kernel`` and ``fake`` return new tensors."""
        self.name, self._compute = name, kernel
        self.overload = _register_mutating(name, signature, self._kernel, fake)
        arguments = enumerate(self.overload._schema.arguments)
        self._written = [i for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]

    def _kernel(self, *args: Any) -> Any:
        for i in self._written:
            _refuse_unwritable(self.name, args[i])
        return self._compute(*args)

    def __call__(self, *args: Any) -> Any:
        if is_dynamo_compiling():
            refuse_forward_mode(self.name)
        if torch.compiler.is_compiling():
            return self.overload(*args)
        if needs_grad(args):
            raise RuntimeError(
                f"{self.name}(): writes its arguments and has no gradient, but one of them requires grad; call it "
                "under torch.no_grad()"
            )
        if transformed():
            raise RuntimeError(f"{self.name}(): is not supported within torch.func transforms or forward AD")
        if any_dtensor(args):
            raise RuntimeError(f"{self.name}(): takes no DTensors; pass each rank's part (DTensor.to_local)")
        return self._kernel(*args) if unwatched(args) else self.overload(*args)


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
    if transformed():
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


def _function(op: Differentiable, setup: Callable[..., None], backward: Callable[..., Grads]) -> Any:
    class OutOfPlace(Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return op.below_autograd(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            setup(ctx, inputs, output)
            if forward_ad._current_level >= 0:
                save_for_forward(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Grads:
            return _without_lists(backward(ctx, *grads))

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            return derivative(op, op.linearity, ctx, tangents)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
            if info.batch_size == 0:
                result = op.fake(*(_slice_of_none(a, d) for a, d in zip(args, in_dims, strict=True)))
                if isinstance(result, Tensor):
                    return result.new_empty((0, *result.shape)), 0
                return tuple(r.new_empty((0, *r.shape)) for r in result), (0,) * len(result)
            each = [op(*(_slice(a, d, b) for a, d in zip(args, in_dims, strict=True))) for b in range(info.batch_size)]
            if isinstance(each[0], Tensor):
                return torch.stack(each), 0
            return tuple(map(torch.stack, zip(*each, strict=True))), (0,) * len(each[0])

    forward: Any = OutOfPlace.forward
    forward.__signature__ = inspect.signature(forward)  # torch asks at each call
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


def _slice_of_none(value: Any, dim: Any) -> Any:
    """As ``_slice`` of a batch of 0: a tensor of the shape that an example would have."""
    if isinstance(dim, (list, tuple)):
        return [_slice_of_none(v, d) for v, d in zip(value, dim, strict=True)]
    return value if dim is None else value.new_empty([n for d, n in enumerate(value.shape) if d != dim % value.dim()])


def refuse_leaf(target: Tensor) -> None:
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


def overwritten(target: Tensor, source: Tensor) -> Tensor:
    """``target`` with the values of ``source``, by the op of copies; recorded by autograd."""
    copy: Any = RECORDED["copy"]
    found: Tensor = copy.in_place(target, source)
    return found
