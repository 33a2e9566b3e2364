"""Launching compiled kernels with little host work.

What this module relies on, and what breaks if it changes (``tests/core/test_launcher.py`` would notice):

- torch's ``_C._StaticCudaLauncher._launch_kernel(function, x, y, z, warps, shared, types, args, stream)``, by which
  inductor launches Triton kernels, from torch 2.7 on: ``types`` has a letter for each kernel parameter, constexprs left
  out. It needs no launcher to be compiled for a signature. It knows neither tensor maps nor hooks nor scratch.
- Triton 3.6 to 3.9 give a kernel two more parameters than its signature has, both pointers, null where it asks for no
  scratch. ``_parameters`` counts them in the PTX; another number is refused when loading.
- ``driver.active.utils.load_binary(name, cubin, shared, device)`` gives (module, function, ...), from 3.6 to 3.9.
- Where torch has no such launcher, for tensor maps and under a profiler, Triton's own is called:
  ``run(x, y, z, stream, function, packed_metadata, launch_metadata, enter_hook, exit_hook, *args)`` with every
  parameter in signature order, constexprs included (ignored, so None), tuples nested, pointers as raw integers, tensor
  descriptors as objects. From 3.6 to 3.9. Otherwise: TypeError, or wrong results, in every GPU test.
- In 3.6 alone, ``tma_maps`` launches by the C function beneath ``run``, which takes encoded tensor maps.
- ``triton.knobs.runtime.launch_enter_hook`` and ``launch_exit_hook`` are ``HookChain``, whose ``add`` and ``remove``
  change the list ``calls`` in place, from 3.6 to 3.9: hooks are passed only where a profiler installed some.
- No launcher checks anything: alignment, widths of integers and devices are the plan's to guard (``can_implement``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
import triton
from triton.runtime import driver

from triplan.backends.runtime import tma_maps
from triplan.backends.runtime.compile import compile_source
from triplan.backends.runtime.launch import Arg, Float, Int, Launch, Ptr, Scalar, Scratch, Stride, TensorMap
from triplan.errors import KernelInternal
from triplan.sku import ArchSku
from triplan.sku.facts import fact

#: Where a call's changing values stand in one flat tuple: (operand, item of a list) to position; see ``WORKSPACE``.
Places = Mapping[tuple[str, int | None], int]
#: How arguments are put together: see ``Template``. None of what is absent, or compiled in.
Order = int | None | tuple["Order", ...]
#: The workspace's address among the places.
WORKSPACE = ("", None)
#: That of prepared indices.
STORAGE = ("", 0)
_HOOKS: Any = triton.knobs.runtime
#: The lists that a profiler fills: looking them up anew would take a tenth of a microsecond of each launch.
ENTER_HOOKS: list[Any] = _HOOKS.launch_enter_hook.calls
EXIT_HOOKS: list[Any] = _HOOKS.launch_exit_hook.calls
_STATIC: Any = getattr(getattr(torch._C, "_StaticCudaLauncher", None), "_launch_kernel", None)
#: The static launcher's letters; it has a fixed array of 120 arguments.
_LETTERS = {"i32": "i", "i64": "l", "fp32": "f", "fp64": "d"}
_MOST_PARAMETERS = 120
#: Launches that one template keeps filled in: a loop goes round so many sets of buffers.
_MOST_FILLED = 64


class LoadedKernel:
    """One launch's kernel on one device."""

    __slots__ = ("_encodes", "compiled", "flat", "launch", "start")

    def __init__(self, launch: Launch, arch: ArchSku, device: int) -> None:
        self.launch, self.compiled = launch, compile_source(launch.source(), arch, device)
        metadata = self.compiled.metadata
        self._encodes = bool(tma_maps.ENCODED and metadata.tensordesc_meta)
        types = static_types(self.compiled)
        #: Whether arguments are as torch's launcher wants them, in one row and with the two for scratch; else nested.
        self.flat = types is not None
        #: Launches; takes the arguments and a stream. A partial joins its arguments in C.
        self.start: Callable[[Any, int], None]
        if types is not None:
            function = _function(self.compiled, device)
            self.start = partial(_STATIC, function, launch.grid, 1, 1, metadata.num_warps, metadata.shared, types)
        else:
            run = self.compiled.run  # loads the module; must come before .function
            function, packed = self.compiled.function, self.compiled.packed_metadata
            self.start = partial(_by_triton, run, launch.grid, function, packed)
            if self._encodes:
                self.start = lambda arguments, stream: self.starting(arguments)(stream)

    def template(self, args: Any, places: Places) -> Template:
        """The launch for all calls with the strides of ``args``, whose other changing values come in a tuple."""
        return Template(self, [self.launch.args.get(name) for name in self.launch.kernel.arg_names], args, places)

    def starting(self, arguments: Sequence[Any]) -> Callable[[int], None]:
        """What launches with ``arguments`` on a stream."""
        if self._encodes:
            return tma_maps.starting(self.compiled.run, self.launch.grid, self.compiled, arguments)
        return partial(self.start, arguments)

    def profiled(self, arguments: Sequence[Any], stream: int) -> None:
        """The launch with Triton's hooks told of it."""
        compiled, grid = self.compiled, self.launch.grid
        if self.flat:
            rest = iter(arguments)
            arguments = [_nested(self.launch.args.get(name), rest) for name in self.launch.kernel.arg_names]
        run = compiled.run
        about = compiled.launch_metadata((grid, 1, 1), stream, *arguments)
        hooks = (about, _HOOKS.launch_enter_hook, _HOOKS.launch_exit_hook)
        if self._encodes:
            tma_maps.starting(run, grid, compiled, arguments, hooks)(stream)
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
    """A launch by Triton's own launcher; the hooks ``enter`` and ``leave`` are told ``about`` it."""
    run(grid, 1, 1, stream, function, packed, about, enter, leave, *arguments)


def _nested(arg: Arg, flat: Iterator[Any]) -> Any:
    """An argument as Triton's launcher wants it."""
    if isinstance(arg, tuple):
        return tuple(_nested(a, flat) for a in arg)
    return None if arg is None else next(flat)


class Template:
    """A kernel's arguments, of which addresses and scalars are still to come."""

    __slots__ = ("_filled", "_keeps", "arguments", "computed", "kernel", "start")

    def __init__(self, kernel: LoadedKernel, given: Sequence[Arg], args: Any, places: Places) -> None:
        self.kernel, self.start = kernel, kernel.start
        computed: list[tuple[int, Callable[[int], Any]]] = []
        constants: list[Any] = []
        leaves: list[Arg] = []
        metas = iter(kernel.compiled.metadata.tensordesc_meta or ())

        def stands(arg: Arg) -> Order:
            """Where the argument stands: its place in (values, computed), or ~ its place among the constants."""
            if isinstance(arg, tuple):
                return tuple(stands(a) for a in arg)
            if arg is None:
                return None
            leaves.append(arg)
            place, compute = _changing(arg, args, places, metas)
            if place is None:
                constants.append(_constant(arg, args))
                return ~(len(constants) - 1)
            if compute is None:
                return place
            computed.append((place, compute))
            return len(places) + len(computed) - 1

        order: Order = tuple(stands(arg) for arg in given)
        if kernel.flat:
            order = (*_flat_places(order), None, None)
        self.computed = tuple(computed)
        # Tensor maps take long to put together; equal numbers may differ in a sign, equal addresses do not.
        self._keeps = bool(computed) and not any(
            isinstance(leaf, Scalar) and (leaf.operand, None) in places for leaf in leaves
        )
        self._filled: dict[tuple[Any, ...], BoundLaunch] = {}
        #: From (values, computed) to all arguments.
        self.arguments: Callable[[tuple[Any, ...]], tuple[Any, ...]]
        self.arguments = FunctionType(_arranging(order), {}, "arguments", tuple(constants))

    def extended(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """``values`` and what is computed from them."""
        return (*values, *[compute(values[place]) for place, compute in self.computed])

    def fill(self, values: tuple[Any, ...]) -> BoundLaunch:
        """The launch with ``values`` at their places."""
        found = self._filled.get(values) if self._keeps else None
        if found is None:
            found = BoundLaunch(self.kernel, self.arguments(self.extended(values)))
            if self._keeps:
                if len(self._filled) >= _MOST_FILLED:
                    self._filled.clear()
                self._filled[values] = found
        return found


def _flat_places(order: Order) -> Iterator[int]:
    if isinstance(order, tuple):
        for o in order:
            yield from _flat_places(o)
    elif order is not None:
        yield order


@fact
def _arranging(order: Order) -> CodeType:
    """The code of a function of changing values ``v``, whose defaults are the constants, that returns all arguments.

    A tuple written out takes less than half as long as joining values and constants and picking by an itemgetter.
    """
    constants = "".join(f", k{i}" for i in range(sum(place < 0 for place in _flat_places(order))))

    def written(order: Order) -> str:
        if isinstance(order, tuple):
            return f"({''.join(f'{written(o)}, ' for o in order)})"
        return "None" if order is None else f"k{~order}" if order < 0 else f"v[{order}]"

    function = eval(f"lambda v{constants}: {written(order)}")
    code: CodeType = function.__code__
    return code


class BoundLaunch:
    """A kernel launch with all arguments fixed."""

    __slots__ = ("arguments", "kernel", "start")

    def __init__(self, kernel: LoadedKernel, arguments: tuple[Any, ...]) -> None:
        self.kernel, self.arguments, self.start = kernel, arguments, kernel.starting(arguments)


def launch(calls: Sequence[BoundLaunch], stream: int) -> None:
    """Launch in order on ``stream`` (a raw handle) of the current device. Raises ``KernelInternal``."""
    if ENTER_HOOKS or EXIT_HOOKS:
        for bound in calls:
            bound.kernel.profiled(bound.arguments, stream)
        return
    try:
        for bound in calls:
            bound.start(stream)
    except RuntimeError as e:
        raise failed(bound.kernel, e) from e


def launching(templates: Sequence[Template]) -> Callable[[tuple[Any, ...], int], None]:
    """What fills ``templates`` with values and launches them in order on a stream of the current device.

    It keeps nothing, and raises ``KernelInternal``.
    """
    if len(templates) == 1 and not templates[0].computed:
        # A closure reads what it needs without looking it up.
        template = templates[0]
        start, arguments = template.start, template.arguments

        def one(values: tuple[Any, ...], stream: int) -> None:
            if ENTER_HOOKS or EXIT_HOOKS:
                launch([template.fill(values)], stream)
                return
            try:
                start(arguments(values), stream)
            except RuntimeError as e:
                raise failed(template.kernel, e) from e

        return one

    def several(values: tuple[Any, ...], stream: int) -> None:
        launch([template.fill(values) for template in templates], stream)

    return several


def load(launches: Sequence[Launch], arch: ArchSku, device: int) -> tuple[LoadedKernel, ...]:
    """Build ``launches`` and load them on ``device``."""
    with torch.cuda.device(device):
        return tuple(LoadedKernel(launch, arch, device) for launch in launches)


def static_types(compiled: Any) -> str | None:
    """The letters of a kernel's parameters; None if torch's static launcher cannot launch it.

    Raises ``KernelInternal`` if the kernel has other parameters than its signature and the two for scratch.
    """
    metadata = compiled.metadata
    scratch = metadata.global_scratch_size or metadata.profile_scratch_size
    cooperative = metadata.launch_cooperative_grid or metadata.launch_pdl or metadata.num_ctas > 1
    types = [_letter(ty) for ty in _flat_types(compiled.src.signature.values())]
    if _STATIC is None or scratch or cooperative or None in types or len(types) + 2 > _MOST_PARAMETERS:
        return None
    found = _parameters(compiled.asm["ptx"])
    if found != len(types) + 2:
        raise KernelInternal(
            f"{compiled.name} has {found} parameters, {len(types) + 2} were expected: this Triton "
            f"({triton.__version__}) passes arguments otherwise than 3.6 to 3.9 do"
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


def _function(compiled: Any, device: int) -> int:
    """The kernel's handle on the current device, ``device``."""
    utils = driver.active.utils
    try:
        _, function, *_ = utils.load_binary(compiled.name, compiled.kernel, compiled.metadata.shared, device)
    except RuntimeError as e:
        raise KernelInternal(f"{compiled.name} cannot be loaded on cuda:{device}: {e}") from e
    return int(function)


def failed(kernel: LoadedKernel, error: RuntimeError) -> KernelInternal:
    return KernelInternal(f"launch of {kernel.launch.kernel.__name__} failed: {error}")


def _changing(
    leaf: Arg, args: Any, places: Places, metas: Iterator[Any]
) -> tuple[int | None, Callable[[int], Any] | None]:
    """Where an argument's changing value stands (None if it has none), and what is made of it (None: itself)."""
    if isinstance(leaf, Scratch):
        return places[STORAGE if leaf.stored else WORKSPACE], leaf.offset.__add__
    if isinstance(leaf, Scalar):
        return places.get((leaf.operand, None)), None
    if isinstance(leaf, Ptr):
        return places[(leaf.operand, leaf.item)], None
    if isinstance(leaf, TensorMap):
        return places[(leaf.operand, None)], tma_maps.Maps(leaf, getattr(args, leaf.operand), next(metas, None))
    return None, None


def _constant(leaf: Arg, args: Any) -> Any:
    if isinstance(leaf, (Int, Float)):
        return leaf.value
    if isinstance(leaf, Scalar):
        # Without a place: absent from every call, or part of what the calls have in common.
        given = getattr(args, leaf.operand, None)
        return leaf.default if given is None else given
    assert isinstance(leaf, Stride)
    tensor = getattr(args, leaf.operand)
    return (tensor if leaf.item is None else tensor[leaf.item]).stride(leaf.axis)
