"""Launching compiled kernels with little host work.

What this module relies on in Triton, and what breaks if it changes (``tests/test_launcher.py`` would notice):

- ``CompiledKernel.run`` loads the module on the current device and returns the launcher; ``.function`` and
  ``.packed_metadata`` are then set. From 3.6 to 3.9. Otherwise: AttributeError on the first launch.
- ``run(grid_x, grid_y, grid_z, stream, function, packed_metadata, launch_metadata, enter_hook, exit_hook, *args)`` with
  every parameter in signature order, constexprs included (ignored, so None), tuples nested, pointers as raw integers.
  From 3.6 to 3.9. Otherwise: TypeError, or wrong results, in every GPU test.
- In 3.6 alone, ``run.launch`` is the generated C function beneath it, with the arguments of ``_C_FORMAT``; calling it
  saves a Python frame. From 3.7 on its arguments are others, and ``run`` is called.
- ``triton.knobs.runtime.launch_enter_hook.calls``: hooks are passed only where a profiler installed some.
- The launcher checks nothing: alignment, integer widths and devices are the plan's to guard (``can_implement`` does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton

from triplan.backends.compile import compile_source
from triplan.backends.launch import Arg, Int, Launch, Ptr, Scalar, Scratch, Stride
from triplan.errors import KernelInternal
from triplan.sku import ArchSku

#: Where a call's changing values stand in one flat tuple: (operand, item of a list) to position; see ``WORKSPACE``.
Places = Mapping[tuple[str, int | None], int]
#: The workspace's address among the places.
WORKSPACE = ("", None)
#: Triton 3.6: grid, stream, function, cooperative, dependent launch, two scratches, metadata twice, two hooks.
_C_FORMAT = "iiiKKppOOOOOO"
_KNOBS = triton.knobs.runtime


class LoadedKernel:
    """One launch's kernel on one device."""

    __slots__ = ("compiled", "direct", "grid", "head", "launch", "run")

    def __init__(self, launch: Launch, arch: ArchSku, device: int) -> None:
        self.compiled = compile_source(launch.source(), arch, device)
        self.run = self.compiled.run  # loads the module; must come before .function
        self.launch, self.grid = launch, launch.grid
        self.direct, self.head = _direct_call(self.compiled)

    def template(self, args: Any, places: Places) -> Template:
        """The launch for all calls with the strides of ``args``, whose other changing values come in a tuple."""
        return Template(self, [_part(self.launch.args.get(n), args, places) for n in self.launch.kernel.arg_names])


class Template:
    """A kernel's arguments with holes for addresses and scalars."""

    __slots__ = ("constants", "holes", "kernel", "nested")

    def __init__(self, kernel: LoadedKernel, parts: list[Any]) -> None:
        self.kernel = kernel
        start = len(kernel.head)
        self.constants = [*kernel.head, *parts]
        # Most holes are whole arguments; those inside tuples and offsets into the workspace take a call each.
        self.holes = tuple((start + i, p.place) for i, p in enumerate(parts) if type(p) is _Hole)
        self.nested = tuple((start + i, p) for i, p in enumerate(parts) if type(p) in (_Offset, _Nested))

    def filled(self, values: Sequence[Any]) -> list[Any]:
        """The arguments with ``values`` at their places."""
        rest = self.constants.copy()
        for at, place in self.holes:
            rest[at] = values[place]
        for at, part in self.nested:
            rest[at] = part.value(values)
        return rest

    def fill(self, values: Sequence[Any]) -> BoundLaunch:
        """The launch with ``values`` at their places."""
        return BoundLaunch(self.kernel, self.filled(values))


def launch_values(templates: Sequence[Template], values: Sequence[Any], stream: int) -> None:
    """Fill and launch in order on ``stream`` of the current device, keeping nothing. Raises ``KernelInternal``."""
    enter, leave = _KNOBS.launch_enter_hook, _KNOBS.launch_exit_hook
    if (enter and enter.calls) or (leave and leave.calls):
        launch([template.fill(values) for template in templates], stream)
        return
    try:
        for template in templates:
            kernel = template.kernel
            kernel.direct(kernel.grid, 1, 1, stream, *template.filled(values))
    except RuntimeError as e:
        raise _failed(kernel, e) from e


class BoundLaunch:
    """A kernel launch with all arguments fixed."""

    __slots__ = ("call", "grid", "kernel", "rest")

    def __init__(self, kernel: LoadedKernel, rest: list[Any]) -> None:
        self.kernel, self.call, self.grid, self.rest = kernel, kernel.direct, kernel.grid, rest

    def profiled(self, stream: int) -> None:
        """The launch with Triton's hooks told of it."""
        kernel, grid = self.kernel, (self.grid, 1, 1)
        compiled, values = kernel.compiled, self.rest[len(kernel.head) :]
        about = compiled.launch_metadata(grid, stream, *values)
        hooks = (_KNOBS.launch_enter_hook, _KNOBS.launch_exit_hook)
        kernel.run(*grid, stream, compiled.function, compiled.packed_metadata, about, *hooks, *values)


def launch(calls: Sequence[BoundLaunch], stream: int) -> None:
    """Launch in order on ``stream`` (a raw handle) of the current device. Raises ``KernelInternal``."""
    enter, leave = _KNOBS.launch_enter_hook, _KNOBS.launch_exit_hook
    if (enter and enter.calls) or (leave and leave.calls):
        for bound in calls:
            bound.profiled(stream)
        return
    try:
        for bound in calls:
            bound.call(bound.grid, 1, 1, stream, *bound.rest)
    except RuntimeError as e:
        raise _failed(bound.kernel, e) from e


def _failed(kernel: LoadedKernel, error: RuntimeError) -> KernelInternal:
    return KernelInternal(f"launch of {kernel.launch.kernel.__name__} failed: {error}")


def load(launches: Sequence[Launch], arch: ArchSku, device: int) -> tuple[LoadedKernel, ...]:
    """Build ``launches`` and load them on ``device``."""
    with torch.cuda.device(device):
        return tuple(LoadedKernel(launch, arch, device) for launch in launches)


def _direct_call(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """The cheapest callable for this kernel, and its arguments between the stream and the kernel's own."""
    from triton.backends.nvidia import driver

    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    scratch = compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size
    known = getattr(driver, "_BASE_ARGS_FORMAT", None) == _C_FORMAT and triton.__version__.startswith("3.6.")
    # Scratch and host-made tensor descriptors are what run itself adds.
    if not known or scratch or compiled.metadata.tensordesc_meta or not hasattr(run, "launch"):
        return run, (function, metadata, None, None, None)
    attributes = (run.launch_cooperative_grid, run.launch_pdl)
    return run.launch, (function, *attributes, None, None, metadata, None, None, None)


class _Hole:
    """A value that is a whole argument."""

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place

    def value(self, values: Sequence[Any]) -> Any:
        return values[self.place]


class _Offset(_Hole):
    """An address that many bytes behind the workspace's."""

    __slots__ = ("bytes",)

    def __init__(self, place: int, bytes: int) -> None:
        super().__init__(place)
        self.bytes = bytes

    def value(self, values: Sequence[Any]) -> Any:
        return values[self.place] + self.bytes


class _Nested:
    """A tuple with holes in it."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts

    def value(self, values: Sequence[Any]) -> Any:
        return tuple(p.value(values) if isinstance(p, (_Hole, _Nested)) else p for p in self.parts)


def _part(arg: Arg, args: Any, places: Places) -> Any:
    """A constant, or what fills it from a call's values."""
    if arg is None:
        return None
    if isinstance(arg, Int):
        return arg.value
    if isinstance(arg, tuple):
        parts = tuple(_part(a, args, places) for a in arg)
        return _Nested(parts) if any(isinstance(p, (_Hole, _Nested)) for p in parts) else parts
    if isinstance(arg, Scratch):
        return _Offset(places[WORKSPACE], arg.offset)
    if isinstance(arg, Scalar):
        place = places.get((arg.operand, None))
        return arg.default if place is None else _Hole(place)
    if isinstance(arg, Stride):
        tensor = getattr(args, arg.operand)
        return (tensor if arg.item is None else tensor[arg.item]).stride(arg.axis)
    assert isinstance(arg, Ptr)
    return _Hole(places[(arg.operand, arg.item)])
