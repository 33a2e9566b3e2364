"""Run launches in Triton's interpreter, on CPU tensors.

Relies on a ``@triton.jit`` function, if defined under ``TRITON_INTERPRET=1``, being callable as ``fn[grid](**kwargs)``.
numpy >= 2.4 breaks run-time loops in Triton 3.6.

``_repair`` replaces parts of the interpreter of Triton 3.6 to 3.9, so that the guarantees hold here too, and in less
time:

- ``_convert_float`` truncates f32 to bf16, where the hardware rounds to nearest even. It turns some NaNs into
  infinities, and converts subnormal numbers of bf16 to wrong ones of f32.
- ``InterpreterBuilder.create_dot`` reads the bits of bf16 as integers. It lets BLAS multiply, whose sums depend on the
  number of threads and on the row's position in the product.
- ``InterpreterBuilder.create_fma`` rounds the product of f32.
- ``_patch_lang`` patches all of ``triton.language`` for each function that a kernel calls, and restores it afterwards.
  That takes more than half of the interpreter's time. ``_hasten`` halves the rest, and
  ``_hasten_calls`` shortens every operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from triplan.backends.runtime.launch import Arg, Counter, Float, Int, Launch, Ptr, Scalar, Scratch, Stride, TensorMap
from triplan.errors import Unsupported
from triplan.sku import interpreting


def interpret(
    launches: Sequence[Launch], args: Any, workspace: torch.Tensor | None, storage: torch.Tensor | None = None
) -> None:
    """Run ``launches`` on the tensors of ``args``. ``storage``: the storage of prepared indices.

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
        number = arg.default if given is None else given
        # The interpreter would divide an integer of 32 bits in f32, where the kernel divides numbers of f64.
        return float(number) if arg.element.is_floating_point else number
    assert not isinstance(arg, Counter)  # of Gluon's kernels, which the interpreter does not run
    tensor = getattr(args, arg.operand)
    if isinstance(arg, TensorMap):
        tensor = tensor.t() if arg.transposed else tensor
        return TensorDescriptor(tensor.detach(), list(tensor.shape), list(tensor.stride()), list(arg.block))
    if arg.item is not None:
        tensor = tensor[arg.item]
    if isinstance(arg, Stride):
        return tensor.stride(arg.axis)
    assert isinstance(arg, Ptr)
    if arg.element.itemsize != tensor.element_size():  # stands in for an address that the kernel does not use
        return torch.empty(1, dtype=arg.element.torch)
    return tensor.detach().view(arg.element.torch)


#: numpy's names of libdevice's functions that have another name there.
_NUMPY = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "atan2": "arctan2", "asinh": "arcsinh",
          "acosh": "arccosh", "atanh": "arctanh", "pow": "power"}  # fmt: skip
#: Constants that are kept, of all kernels and shapes.
_MOST_CONSTANTS = 2048


def _give_libdevice() -> None:
    """Let numpy and math compute libdevice's functions, which the interpreter lacks."""
    import math

    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import TensorHandle

    def interpreted(function: Any) -> Any:
        def call(*args: Any) -> Any:
            found = function(*np.broadcast_arrays(*(a.handle.data for a in args)))
            first = max(args, key=lambda a: a.numel.value if hasattr(a.numel, "value") else a.numel)
            return tl.tensor(TensorHandle(found.astype(first.handle.data.dtype), first.dtype.scalar), first.type)

        return call

    names = "exp exp2 expm1 log log1p log2 log10 pow hypot sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    for name in (names + "atan2 rint trunc fmod copysign").split():
        setattr(libdevice, name, interpreted(getattr(np, _NUMPY.get(name, name))))
    libdevice.fast_dividef, libdevice.fast_log2f = interpreted(np.divide), interpreted(np.log2)
    for name in ("erf", "erfc"):
        setattr(libdevice, name, interpreted(np.vectorize(getattr(math, name), otypes=[np.float64])))


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
        # One thread computes every element in the same way, wherever it stands.
        return interpreter.TensorHandle(np.einsum("...ik,...kj->...ij", *factors) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        # numpy would round the product. Of f32 that in f64 is exact; of f64 that in long double has 64 bits on x86,
        # which suffices to reduce angles, and is rounded where long double is f64.
        wide = np.longdouble if z.data.dtype == np.float64 else np.float64
        found = x.data.astype(wide) * y.data + z.data
        return interpreter.TensorHandle(found.astype(z.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma
    patch = interpreter._patch_lang
    #: What has been patched, by the modules of the language that a function refers to.
    patched: set[frozenset[int]] = set()

    @cache
    def languages(function: Any) -> frozenset[int]:
        return frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)

    def patch_once(function: Any) -> Any:
        modules = languages(function)
        if modules not in patched:
            patched.add(modules)
            patch(function)
        return interpreter._LangPatchScope()  # nothing to restore: a process that interprets never compiles

    interpreter._patch_lang = patch_once
    _give_libdevice()
    _hasten()
    _hasten_calls()


def _hasten() -> None:
    """Compute once what the interpreter computes again for each operation: types, their shapes and numpy's dtypes.

    Operands of one shape, which is one object then, are not broadcast; nor are types compared with themselves. Blocks
    of one rank are broadcast by numpy at once, without Triton's comparisons of one extent after the other.

    Sums of integers are computed a second time in i64 to find overflows, but outside debug mode nobody reads what is
    found: this is left out. Reductions by other functions than sums and extrema call the function for one element after
    the other; here neighbours are combined, all pairs at once, until one element is left. (Blocks are powers of two.)
    """
    import dataclasses

    import numpy as np
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    make_block, make_tensor, find_dtype = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    dtypes: dict[str, Any] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        extents = tuple(getattr(n, "value", n) for n in getattr(shape, "values", shape))
        key = (element_ty.name, getattr(element_ty, "address_space", None), extents)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = {**vars(self), "extents": extents}
        vars(self).update(blocks[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        extents = getattr(type, "extents", ())  # a scalar's type has none
        if extents not in shapes:
            make_tensor(self, handle, type)
            shapes[extents] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[extents]

    def dtype_of(type: Any) -> Any:
        name = type.scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(type.scalar)
        return dtypes[name]

    tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype = init_block, init_tensor, dtype_of
    broadcast, equal = interpreter.TritonSemantic.broadcast_impl_value, tl.dtype.__eq__
    types: dict[Any, Any] = {}

    def block_of(element: Any, extents: tuple[int, ...]) -> Any:
        key = element.name, getattr(element, "address_space", None), extents
        if key not in types:
            types[key] = tl.block_type(element, list(extents))
        return types[key]

    def filled(value: Any, like: Any) -> Any:
        """A block of the shape of ``like``, each of whose elements is the scalar ``value``."""
        data = np.full(like.type.extents, value.handle.data, dtype_of(value.dtype))
        return tl.tensor(interpreter.TensorHandle(data, value.dtype), like.type.with_element_ty(value.dtype))

    def stretched(value: Any, extents: tuple[int, ...]) -> Any:
        """A block of ``extents`` that repeats the block ``value``."""
        if value.type.extents == extents:
            return value
        data = np.broadcast_to(value.handle.data, extents)
        return tl.tensor(interpreter.TensorHandle(data, value.dtype), block_of(value.dtype, extents))

    def broadcast_once(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:  # equal shapes are one object since init_tensor
            return lhs, rhs
        if not rhs.type.is_block():
            return lhs, filled(rhs, lhs)
        if not lhs.type.is_block():
            return filled(lhs, rhs), rhs
        pairs = tuple(zip(lhs.type.extents, rhs.type.extents, strict=False))
        if len(lhs.shape) != len(rhs.shape) or any(a != b and 1 not in (a, b) for a, b in pairs):
            return broadcast(self, lhs, rhs)
        extents = tuple(max(pair) for pair in pairs)
        return stretched(lhs, extents), stretched(rhs, extents)

    tl.block_type.with_element_ty = lambda self, element: block_of(element, self.extents)
    interpreter.TritonSemantic.broadcast_impl_value = broadcast_once
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)

    def reduce(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
        parts = [
            t.handle.data.ravel() if self.axis is None else np.moveaxis(t.handle.data, self.axis, 0) for t in inputs
        ]
        types = [t.dtype for t in inputs]
        while len(parts[0]) > 1:
            halves = [self.to_tensor(d[i::2], dtype) for i in (0, 1) for d, dtype in zip(parts, types, strict=True)]
            found = self.combine_fn.fn(*halves)
            parts = [t.handle.data for t in (found if isinstance(found, tuple) else (found,))]
        results = [d[0] for d in parts]
        if self.keep_dims:
            shape = inputs[0].handle.data.shape
            kept = [1 if self.axis in (None, i) else n for i, n in enumerate(shape)]
            results = [r.reshape(kept) for r in results]
        return [self.to_tensor(r, dtype) for r, dtype in zip(results, types, strict=True)]

    interpreter.ReduceOps.generic_reduce = reduce


def _hasten_calls() -> None:
    """Skip what Triton's semantics do for an operation whose result is known from its operands' types alone.

    Two operands of one type are not converted. A number beside a tensor whose type holds it becomes a constant of that
    type at once. Constants and sizes of elements are computed once and kept in tables. Operators of a tensor and such
    an operand call numpy at once.
    """
    import numpy as np
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    semantic = interpreter.TritonSemantic
    integers = (tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64)
    ranges = {t.name: (t.get_int_min_value(), t.get_int_max_value()) for t in integers}
    widths = {t.name: t.int_bitwidth for t in integers if t.is_int_signed()}
    floats = {tl.float32.name, tl.float64.name}
    alike = {*ranges, *floats, tl.int1.name}  # two operands of such a type keep it; quotients of f16 are f32
    plain = {tl.tensor, tl.dtype, int, float, bool, str, type(None)}
    sizes: dict[str, float] = {}
    constants: dict[Any, Any] = {}
    check, cast, unwrap = semantic.binary_op_type_checking_impl, semantic.cast, tl.core._unwrap_if_constexpr
    to_tensor, post_init = semantic.to_tensor, interpreter.TensorHandle.__post_init__

    def holds(name: str, value: Any) -> bool:
        """Whether an operand of type ``name`` beside the number ``value`` decides the type of both."""
        if type(value) is int:
            low, high = ranges.get(name, (-(2**63), 2**63 - 1))
            return low <= value <= high and (name in ranges or name in floats)
        return type(value) is float and name in floats

    def constant(self: Any, number: int | float, like: Any) -> Any:
        """``number`` as a tensor of the type of ``like``; nothing writes into what a tensor holds."""
        key = repr(number), like.dtype.name, getattr(like.type, "extents", ())  # 0.0 equals -0.0
        if key not in constants:
            if len(constants) >= _MOST_CONSTANTS:  # a loop may count through thousands
                constants.clear()
            _, constants[key] = self.broadcast_impl_value(like, self.scalar_constant(number, dtype=like.dtype))
        return constants[key]

    def init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if not fits(data, dtype):
            post_init(self)  # raises

    def check_once(
        self: Any,
        lhs: Any,
        rhs: Any,
        left: bool = False,
        right: bool = False,
        arithmetic: bool = True,
        *div: bool,
        **by: bool,
    ) -> Any:
        tensors = type(lhs) is tl.tensor, type(rhs) is tl.tensor
        if tensors == (True, True):
            of = lhs.dtype.name, rhs.dtype.name
            if (of[0] == of[1] and of[0] in alike) or (left and of[1] in ranges and lhs.dtype.is_ptr()):
                return self.broadcast_impl_value(lhs, rhs)
            if arithmetic and of[0] in widths and of[1] in widths:
                wide = (lhs if widths[of[0]] > widths[of[1]] else rhs).dtype
                return self.broadcast_impl_value(self.cast(lhs, wide), self.cast(rhs, wide))
        elif tensors == (True, False) and arithmetic and holds(lhs.dtype.name, rhs):
            return lhs, constant(self, rhs, lhs)
        elif tensors == (False, True) and arithmetic and holds(rhs.dtype.name, lhs):
            return constant(self, lhs, rhs), rhs
        return check(self, lhs, rhs, left, right, arithmetic, *div, **by)

    def cast_once(self: Any, value: Any, to: Any, *rounding: Any, **named: Any) -> Any:
        scalar = to.scalar
        if value.dtype is scalar:
            return value
        if value.dtype.name in widths and scalar.name in widths:
            found = value.type.with_element_ty(scalar) if value.type.is_block() else scalar
            return self.tensor(self.builder.create_int_cast(value.handle, found.to_ir(self.builder), True), found)
        return cast(self, value, to, *rounding, **named)

    def fits(array: Any, type: Any) -> bool:
        """Whether an array's elements are no wider than ``type``, of at least a byte; pointers are not looked at."""
        if type.name not in sizes:
            sizes[type.name] = float("inf") if type.is_ptr() else max(type.primitive_bitwidth // 8, 1)
        return bool(array.itemsize <= sizes[type.name])

    interpreter._validate_np_data_size = fits
    semantic.binary_op_type_checking_impl, semantic.cast = check_once, cast_once
    interpreter.TensorHandle.__init__ = init_handle
    semantic.to_tensor = lambda self, x, *known: x if type(x) is tl.tensor else to_tensor(self, x, *known)
    tl.core._unwrap_if_constexpr = lambda o: o if type(o) in plain else unwrap(o)

    shared, wrapper = semantic(interpreter.interpreter_builder), tl.core.builtin(lambda: None).__code__
    arithmetic = {"__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply}
    comparisons = {"__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal}
    bitwise = {"__and__": np.bitwise_and, "__or__": np.bitwise_or, "__xor__": np.bitwise_xor}

    def operator(name: str, otherwise: Any) -> Any:
        """The operator of a tensor and one of its type, or a number that its type holds; ``otherwise`` of all else."""
        compute = (arithmetic | comparisons | bitwise)[name]
        kinds = {*ranges, tl.int1.name} if name in bitwise else {*ranges, *floats}

        def call(x: Any, y: Any) -> Any:
            of = x.dtype.name
            if of in kinds:
                other = constant(shared, y, x) if name not in bitwise and holds(of, y) else y
                if type(other) is tl.tensor and other.dtype.name == of:
                    a, b = shared.broadcast_impl_value(x, other)
                    handle = interpreter.TensorHandle(compute(a.handle.data, b.handle.data), a.dtype)
                    return shared.tensor(handle, shared._bool_like(a) if name in comparisons else a.type)
            return otherwise(x, y)

        return call

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        # What @builtin adds is a check that _semantic is there.
        function = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = shared
            return function(*args, **named)

        known = obj is tl.tensor and name in arithmetic | comparisons | bitwise
        scope.set_attr(obj, name, operator(name, call) if known else call)

    interpreter._patch_attr = patch_attr
