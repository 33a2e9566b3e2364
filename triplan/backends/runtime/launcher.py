"""Launch compiled kernels with little host work.

What this module relies on (``tests/core/test_launcher.py`` fails if it changes):

- torch's ``_C._StaticCudaLauncher._launch_kernel(function, x, y, z, warps, shared, types, args, stream)``, with which
  inductor launches Triton kernels from torch 2.7 on. ``types`` has one letter for each kernel parameter, without
  constexprs. It compiles no launcher for a signature. It supports neither tensor maps nor hooks nor scratch memory.
  It holds Python's lock, also while it waits for room in the GPU's queue (docs/replay.md, "Limits"). Triton's launcher
  does not; its Python function takes 1.4 us more (H200).
- Triton 3.6 to 3.9 give a kernel two more parameters than its signature has. Both are pointers, and null if the kernel
  needs no scratch memory. ``_parameters`` counts the parameters in the PTX; loading fails on any other number.
- Triton's own launcher, in 3.6 to 3.9, for kernels with tensor maps, under a profiler, and where torch has no static
  launcher: ``run(x, y, z, stream, function, packed_metadata, launch_metadata, enter_hook, exit_hook, *args)``. It takes
  every parameter in the signature's order: constexprs too (ignored, so None), tuples nested, pointers as integers,
  tensor descriptors as objects. A change shows as a TypeError or as wrong results in every GPU test.
- In 3.6 alone, ``tma_maps`` calls the C function beneath ``run``, which takes encoded tensor maps.
- ``triton.knobs.runtime.launch_enter_hook`` and ``launch_exit_hook`` are ``HookChain`` in 3.6 to 3.9. ``add`` and
  ``remove`` change the list ``calls`` in place, so an empty list means that no profiler has installed a hook.
- No launcher checks anything. The plan checks alignment, integer widths and devices (``can_implement``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from types import CodeType, FunctionType
from typing import Any

import torch
import triton

from triplan.backends.runtime import tma_maps
from triplan.backends.runtime.counters import counter_address
from triplan.backends.runtime.launch import Arg, Counter, Float, Int, Launch, Ptr, Scalar, Scratch, Stride, TensorMap
from triplan.backends.runtime.modules import keep_loaded, load_binary
from triplan.errors import KernelInternal
from triplan.sku import ArchSku
from triplan.sku.facts import fact

#: Positions of a call's changing values in one flat tuple, by (operand, item of a list). See also ``WORKSPACE``; where
#: the address of a part of it is known, (*WORKSPACE, offset).
Places = Mapping[tuple[str, int | None] | tuple[str, int | None, int], int]
#: How a kernel's arguments are assembled, see ``Template``. None for an argument that is absent or compiled in.
Order = int | None | tuple["Order", ...]
#: The key of the workspace's address in ``Places``.
WORKSPACE = ("", None)
#: The key of the address of prepared indices.
STORAGE = ("", 0)
_HOOKS: Any = triton.knobs.runtime
#: The lists that a profiler fills. Looking them up at every launch would cost 0.1 us each time.
ENTER_HOOKS: list[Any] = _HOOKS.launch_enter_hook.calls
EXIT_HOOKS: list[Any] = _HOOKS.launch_exit_hook.calls
#: torch's static launcher; None where torch has none.
_STATIC: Any = getattr(getattr(torch._C, "_StaticCudaLauncher", None), "_launch_kernel", None)
#: Whether torch's current stream is being captured. Private, there since 2.0; public functions take half a us more.
is_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
#: The static launcher's letters for types.
_LETTERS = {"i32": "i", "i64": "l", "fp32": "f", "fp64": "d"}
#: Length of the static launcher's array of arguments.
_MAX_PARAMETERS = 120
#: From so many constants in a row on a replay joins one tuple instead of listing them: 37 arguments of pooling then
#: take 0.3 us less, 8 as long as before (CPU).
_FEW_CONSTANTS = 8
#: Filled launches that one template caches, one per set of buffers that a training loop cycles through. Untuned.
_MAX_FILLED = 64


class LoadedKernel:
    """The kernel of one launch, loaded on one device."""

    __slots__ = ("_encodes", "compiled", "device", "flat", "launch", "start")

    def __init__(self, launch: Launch, arch: ArchSku, device: int) -> None:
        self.launch, self.device, self.compiled = launch, device, load_binary(launch.source(), arch, device)
        metadata = self.compiled.metadata
        self._encodes = bool(tma_maps.ENCODED and metadata.tensordesc_meta)
        types = static_types(self.compiled)
        #: Whether arguments are flat, with two more for scratch memory, as torch's launcher takes them. Triton's takes
        #: them nested.
        self.flat = types is not None
        #: Launches, given the arguments and a stream. A partial, because it joins its arguments in C.
        self.start: Callable[[Any, int], None]
        if types is not None:
            function = self.compiled.function
            self.start = partial(_STATIC, function, launch.grid, 1, 1, metadata.num_warps, metadata.shared, types)
        else:
            function, packed = self.compiled.function, self.compiled.packed_metadata
            self.start = partial(_by_triton, self.compiled.run, launch.grid, function, packed)
            if self._encodes:
                self.start = lambda arguments, stream: self.start_function(arguments)(stream)

    def template(self, args: Any, places: Places) -> Template:
        """The launch for all calls with the strides of ``args``; values that differ between calls come in a tuple."""
        return Template(self, [self.launch.args.get(name) for name in self.launch.kernel.arg_names], args, places)

    def start_function(self, arguments: Sequence[Any]) -> Callable[[int], None]:
        """A function that launches with ``arguments`` on a stream."""
        if self._encodes:
            return tma_maps.start_function(self.compiled.run, self.launch.grid, self.compiled, arguments)
        return partial(self.start, arguments)

    def launch_profiled(self, arguments: Sequence[Any], stream: int) -> None:
        """Launch, and call the profiler's hooks."""
        compiled, grid = self.compiled, self.launch.grid
        if self.flat:
            rest = iter(arguments)
            arguments = [_nested(self.launch.args.get(name), rest) for name in self.launch.kernel.arg_names]
        run = compiled.run
        about = compiled.launch_metadata((grid, 1, 1), stream, *arguments)
        hooks = (about, _HOOKS.launch_enter_hook, _HOOKS.launch_exit_hook)
        if self._encodes:
            tma_maps.start_function(run, grid, compiled, arguments, hooks)(stream)
        else:
            _by_triton(run, grid, compiled.function, compiled.packed_metadata, arguments, stream, *hooks)


def _by_triton(
    run: Any,
    grid: int,
    function: int,
    packed: Any,
    arguments: Any,
    stream: int,
    about: Any = None,
    enter: Any = None,
    leave: Any = None,
) -> None:
    """Launch with Triton's own launcher, which passes ``about`` to the hooks ``enter`` and ``leave``."""
    run(grid, 1, 1, stream, function, packed, about, enter, leave, *arguments)


def _nested(arg: Arg, flat: Iterator[Any]) -> Any:
    """An argument as Triton's launcher takes it: values from ``flat``, nested as ``arg`` is."""
    if isinstance(arg, tuple):
        return tuple(_nested(a, flat) for a in arg)
    return None if arg is None else next(flat)


class Template:
    """A kernel's arguments without the addresses and scalars that change from call to call."""

    __slots__ = ("_caches", "_constants", "_filled", "_order", "arguments", "computed", "kernel", "start")

    def __init__(self, kernel: LoadedKernel, given: Sequence[Arg], args: Any, places: Places) -> None:
        self.kernel, self.start = kernel, kernel.start
        computed: list[tuple[int, Callable[[int], Any]]] = []
        constants: list[Any] = []
        leaves: list[Arg] = []
        metas = iter(kernel.compiled.metadata.tensordesc_meta or ())

        def order_of(leaf: Arg) -> int:
            """The leaf's position in (values, computed); for a constant, ~ its position among the constants."""
            leaves.append(leaf)
            place, compute = _changing(leaf, args, places, metas)
            if place is None:
                constants.append(_constant(leaf, args, kernel.device))
                return ~(len(constants) - 1)
            if compute is None:
                return place
            computed.append((place, compute))
            return len(places) + len(computed) - 1

        order: Order = tuple(_nested_order(arg, order_of) for arg in given)
        if kernel.flat:
            order = (*_flat_places(order), None, None)
        self.computed = tuple(computed)
        self._order, self._constants = order, tuple(constants)
        # Cache filled launches only if tensor maps are computed, which takes long. Host scalars are excluded: equal
        # numbers may differ in bits (0.0 and -0.0), equal addresses do not.
        self._caches = bool(computed) and not any(
            isinstance(leaf, Scalar) and (leaf.operand, None) in places for leaf in leaves
        )
        self._filled: dict[tuple[Any, ...], BoundLaunch] = {}
        #: Maps (values, computed) to all arguments.
        self.arguments: Callable[[tuple[Any, ...]], tuple[Any, ...]]
        self.arguments = FunctionType(_assembly(order), {}, "arguments", tuple(constants))

    def source(self, values: Sequence[str], prefix: str) -> tuple[str, dict[str, Any]]:
        """All arguments as an expression of those of ``values``, and the constants that it names, with ``prefix``.

        For templates with nothing computed.
        """
        named: dict[str, Any] = {}
        return _grouped(self._order, values, self._constants, prefix, named), named

    def extended(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """``values``, followed by what is computed from them."""
        return (*values, *[compute(values[place]) for place, compute in self.computed])

    def fill(self, values: tuple[Any, ...]) -> BoundLaunch:
        """The launch with ``values`` filled in."""
        found = self._filled.get(values) if self._caches else None
        if found is None:
            found = BoundLaunch(self.kernel, self.arguments(self.extended(values)))
            if self._caches:
                if len(self._filled) >= _MAX_FILLED:
                    self._filled.clear()
                self._filled[values] = found
        return found


def _nested_order(arg: Arg, order_of: Callable[[Arg], int]) -> Order:
    """``order_of`` each leaf of ``arg``. No closure: one that calls itself would keep its call's tensors until gc."""
    if isinstance(arg, tuple):
        return tuple(_nested_order(a, order_of) for a in arg)
    return None if arg is None else order_of(arg)


def _flat_places(order: Order) -> Iterator[int]:
    if isinstance(order, tuple):
        for o in order:
            yield from _flat_places(o)
    elif order is not None:
        yield order


@fact
def _assembly(order: Order) -> CodeType:
    """The code of a function from the changing values ``v`` to all arguments; the constants are its defaults.

    The code contains the tuple literally. That takes less than half the time of an itemgetter on the joined values.
    """
    places = list(_flat_places(order))
    constants = [f"k{i}" for i in range(sum(place < 0 for place in places))]
    values = [f"v[{i}]" for i in range(1 + max(places, default=-1))]
    function = eval(f"lambda v{''.join(f', {k}' for k in constants)}: {_expression(order, values, constants)}")
    code: CodeType = function.__code__
    return code


def _expression(order: Order, values: Sequence[str], constants: Sequence[str]) -> str:
    if isinstance(order, tuple):
        return f"({''.join(f'{_expression(o, values, constants)}, ' for o in order)})"
    return "None" if order is None else constants[~order] if order < 0 else values[order]


def _grouped(order: Order, values: Sequence[str], constants: Sequence[Any], prefix: str, named: dict[str, Any]) -> str:
    """As ``_expression``, which names its constants by ``prefix`` and adds them to ``named``; many in a row as one."""
    if not isinstance(order, tuple):
        return "None" if order is None else values[order] if order >= 0 else _name(constants[~order], prefix, named)
    parts: list[list[str]] = [[]]
    for is_fixed, run in groupby(order, _is_fixed):
        found = list(run)
        if is_fixed and len(found) >= _FEW_CONSTANTS:
            parts += [[_name(_fixed(tuple(found), constants), prefix, named)], []]
        else:
            parts[-1] += [f"{_grouped(o, values, constants, prefix, named)}, " for o in found]
    written = [part[0] if i % 2 else f"({''.join(part)})" for i, part in enumerate(parts) if part]
    return " + ".join(written) or "()"


def _name(constant: Any, prefix: str, named: dict[str, Any]) -> str:
    name = f"{prefix}{len(named)}"
    named[name] = constant
    return name


def _is_fixed(order: Order) -> bool:
    """Whether no argument of ``order`` changes."""
    return all(map(_is_fixed, order)) if isinstance(order, tuple) else order is None or order < 0


def _fixed(order: Order, constants: Sequence[Any]) -> Any:
    """The arguments of ``order``, of which none changes."""
    if isinstance(order, tuple):
        return tuple(_fixed(o, constants) for o in order)
    return None if order is None else constants[~order]


class BoundLaunch:
    """A kernel launch with all arguments fixed."""

    __slots__ = ("arguments", "kernel", "start")

    def __init__(self, kernel: LoadedKernel, arguments: tuple[Any, ...]) -> None:
        self.kernel, self.arguments, self.start = kernel, arguments, kernel.start_function(arguments)


def launch(calls: Sequence[BoundLaunch], stream: int) -> None:
    """Launch in order on ``stream`` (a raw handle) of the current device. Raises ``KernelInternal``."""
    if stream:  # torch's default stream, 0, never is captured
        try:
            if is_capturing():
                keep_loaded(bound.kernel.compiled for bound in calls)
        except RuntimeError as e:
            raise KernelInternal(f"an earlier launch failed: {e}") from e
    if ENTER_HOOKS or EXIT_HOOKS:
        for bound in calls:
            bound.kernel.launch_profiled(bound.arguments, stream)
        return
    try:
        for bound in calls:
            bound.start(stream)
    except RuntimeError as e:
        raise failed(bound.kernel, e) from e


def scratch_offsets(launches: Sequence[Launch]) -> set[int]:
    """Offsets of the parts of the workspace that ``launches`` read or write."""

    def leaves(arg: Arg) -> Iterator[Arg]:
        if isinstance(arg, tuple):
            for a in arg:
                yield from leaves(a)
        else:
            yield arg

    found = [leaf for launch in launches for arg in launch.args.values() for leaf in leaves(arg)]
    copies = {leaf.copy.offset for leaf in found if isinstance(leaf, TensorMap) and leaf.copy is not None}
    return copies | {leaf.offset for leaf in found if isinstance(leaf, Scratch) and not leaf.stored}


def load(launches: Sequence[Launch], arch: ArchSku, device: int) -> tuple[LoadedKernel, ...]:
    """Compile ``launches`` and load them on ``device``."""
    with torch.cuda.device(device):
        return tuple(LoadedKernel(launch, arch, device) for launch in launches)


def static_types(compiled: Any) -> str | None:
    """The letters of a kernel's parameters; None if torch's static launcher cannot launch it.

    Raises ``KernelInternal`` if the kernel has other parameters than those of its signature and two for scratch memory.
    """
    metadata = compiled.metadata
    scratch = metadata.global_scratch_size or metadata.profile_scratch_size
    cooperative = metadata.launch_cooperative_grid or metadata.launch_pdl or metadata.num_ctas > 1
    types = [_letter(ty) for ty in _flat_types(compiled.src.signature.values())]
    if _STATIC is None or scratch or cooperative or None in types or len(types) + 2 > _MAX_PARAMETERS:
        return None
    found = _parameters(compiled.asm["ptx"])
    if found != len(types) + 2:
        raise KernelInternal(
            f"{compiled.name} has {found} parameters, {len(types) + 2} were expected: this Triton "
            f"({triton.__version__}) passes arguments differently from 3.6 to 3.9"
        )
    return "".join(str(t) for t in types) + "OO"


def _flat_types(types: Any) -> Iterator[str]:
    for ty in types:
        if isinstance(ty, tuple):
            yield from _flat_types(ty)
        elif ty != "constexpr":
            yield ty


def _letter(ty: str) -> str | None:
    return "O" if ty.startswith("*") else _LETTERS.get(ty)


def _parameters(ptx: str) -> int:
    entry = ptx[ptx.index(".entry") :]
    return len(re.findall(r"\.param ", entry[: entry.index(")")]))


def failed(kernel: LoadedKernel, error: RuntimeError) -> KernelInternal:
    return KernelInternal(f"launch of {kernel.launch.kernel.__name__} failed: {error}")


def _changing(
    leaf: Arg, args: Any, places: Places, metas: Iterator[Any]
) -> tuple[int | None, Callable[[int], Any] | None]:
    """The position of an argument's changing value, and the function that computes the argument from it.

    The position is None if nothing changes, the function None if the argument is the value itself.
    """
    if isinstance(leaf, Scratch):
        key = STORAGE if leaf.stored else WORKSPACE
        place = places.get((*key, leaf.offset))
        return (places[key], leaf.offset.__add__) if place is None else (place, None)
    if isinstance(leaf, Scalar):
        return places.get((leaf.operand, None)), None
    if isinstance(leaf, Ptr):
        return places[(leaf.operand, leaf.item)], None
    if isinstance(leaf, TensorMap):
        if leaf.copy is None:
            return places[(leaf.operand, None)], tma_maps.Maps(leaf, getattr(args, leaf.operand), next(metas, None))
        offset, maps = leaf.copy.offset, tma_maps.Maps(leaf, tma_maps.copied(leaf), next(metas, None))
        place = places.get((*WORKSPACE, offset))
        return (places[WORKSPACE], lambda start: maps(start + offset)) if place is None else (place, maps)
    return None, None


def _constant(leaf: Arg, args: Any, device: int) -> Any:
    if isinstance(leaf, (Int, Float)):
        return leaf.value
    if isinstance(leaf, Counter):
        return counter_address(device)
    if isinstance(leaf, Scalar):
        # Not call-dependent: None, or equal in every call of this signature.
        given = getattr(args, leaf.operand, None)
        return leaf.default if given is None else given
    assert isinstance(leaf, Stride)
    tensor = getattr(args, leaf.operand)
    return (tensor if leaf.item is None else tensor[leaf.item]).stride(leaf.axis)
