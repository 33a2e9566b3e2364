"""Running launches in Triton's interpreter, on CPU tensors.

Relies on: a ``@triton.jit`` function defined under ``TRITON_INTERPRET=1`` being callable as ``fn[grid](**kwargs)``, and
on ``triton.runtime.interpreter._convert_float`` doing its conversions. From 3.6 to 3.9 that function truncates f32 to
bf16 where the hardware rounds to nearest even (and turns some NaNs into infinities), and takes subnormals of bf16 for
other ones of f32; and ``InterpreterBuilder.create_dot`` takes the bits of bf16 for integers, and lets BLAS multiply,
whose sums depend on the number of threads and on where in a product a row stands. ``_repair`` replaces all of these, so
that the guarantees hold here too. It also spares half of the time: each call of a function within a kernel would patch
all of ``triton.language`` anew. numpy >= 2.4 breaks run-time loops in Triton 3.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from triplan.backends.runtime.launch import Arg, Float, Int, Launch, Ptr, Scalar, Scratch, Stride, TensorMap
from triplan.errors import Unsupported
from triplan.sku import interpreting


def interpret(
    launches: Sequence[Launch], args: Any, workspace: torch.Tensor | None, storage: torch.Tensor | None = None
) -> None:
    """Run ``launches`` on the tensors of ``args``; ``storage`` is that of prepared indices.

    Raises ``Unsupported`` outside interpreter mode.
    """
    if not interpreting():
        raise Unsupported("interpreting needs TRITON_INTERPRET=1, set before triplan is imported")
    _repair()
    for launch in launches:
        values = {name: _value(arg, args, workspace, storage) for name, arg in launch.args.items()}
        launch.kernel[(launch.grid,)](**values, **launch.constexprs)


def _value(arg: Arg, args: Any, workspace: torch.Tensor | None, storage: torch.Tensor | None) -> Any:
    if arg is None:
        return None
    if isinstance(arg, tuple):
        return tuple(_value(a, args, workspace, storage) for a in arg)
    if isinstance(arg, (Int, Float)):
        return arg.value
    if isinstance(arg, Scratch):
        memory = storage if arg.stored else workspace
        assert memory is not None
        return memory[arg.offset :].view(arg.element.torch)
    if isinstance(arg, Scalar):
        given = getattr(args, arg.operand)
        return arg.default if given is None else given
    tensor = getattr(args, arg.operand)
    if isinstance(arg, TensorMap):
        tensor = tensor.t() if arg.transposed else tensor
        return TensorDescriptor(tensor.detach(), list(tensor.shape), list(tensor.stride()), list(arg.block))
    if arg.item is not None:
        tensor = tensor[arg.item]
    if isinstance(arg, Stride):
        return tensor.stride(arg.axis)
    assert isinstance(arg, Ptr)
    return tensor.detach().view(arg.element.torch)


@cache
def _repair() -> None:
    import numpy as np
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    original = interpreter._convert_float

    def convert(data: Any, source: Any, to: Any, rounding: Any) -> Any:
        if source == tl.float32 and to == tl.bfloat16:
            values = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).to(torch.bfloat16)
            return values.view(torch.int16).numpy().view(np.uint16)
        if source == tl.bfloat16 and to == tl.float32:
            return np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16  # the upper half of an f32
        return original(data, source, to, rounding)

    interpreter._convert_float = convert
    dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if any(x.dtype.scalar.is_fp8() for x in (a, b)):
            return dot(self, a, b, d, *rest)
        factors = []
        for x in (a, b):
            bits = x.dtype.scalar == tl.bfloat16
            values = convert(x.data, tl.bfloat16, tl.float32, None).view(np.float32) if bits else x.data
            factors.append(values.astype(d.data.dtype, order="C", copy=False))
        # Each element alike, by one thread.
        return interpreter.TensorHandle(np.einsum("...ik,...kj->...ij", *factors) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
    patch, start = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[frozenset[int]] = set()  # for the kernel that runs, by what its functions see of the language

    @cache
    def languages(function: Any) -> frozenset[int]:
        return frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)

    def patch_once(function: Any) -> Any:
        seen = languages(function)
        if seen in patched:
            return interpreter._LangPatchScope()
        patched.add(seen)
        return patch(function)

    def start_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        start(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, start_anew
