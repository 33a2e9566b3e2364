"""Launching compiled kernels with little host work.

What this module relies on in Triton, unchanged from 3.6 to 3.9, and what breaks if it changes:

- ``CompiledKernel.run`` loads the module on the current device and returns the launcher; ``.function`` and
  ``.packed_metadata`` are then set. Otherwise: AttributeError on the first launch.
- ``run(grid_x, grid_y, grid_z, stream, function, packed_metadata, launch_metadata, enter_hook, exit_hook, *args)`` with
  every parameter in signature order, constexprs included (ignored, so None), tuples nested, pointers as raw integers.
  Otherwise: TypeError, or wrong results, in every GPU test.
- ``triton.knobs.runtime.launch_enter_hook.calls``: hooks are passed only where a profiler installed some.
- The launcher checks nothing: alignment, integer widths and devices are the plan's to guard (``can_implement`` does).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from triplan.backends.compile import compile_source
from triplan.backends.launch import Arg, Int, Launch, Ptr, Scalar, Scratch, Stride
from triplan.errors import KernelInternal
from triplan.sku import ArchSku

#: Reads one kernel argument from (Args, workspace address).
Reader = Callable[[Any, int], Any]


class LoadedLaunches:
    """A plan's launches, loaded on one device: immutable, so many threads and streams may call it at once."""

    __slots__ = ("_calls", "device")

    def __init__(self, launches: Sequence[Launch], arch: ArchSku, device: int) -> None:
        self.device = device
        calls = []
        with torch.cuda.device(device):
            for launch in launches:
                compiled = compile_source(launch.source(), arch, device)
                run = compiled.run  # loads the module; must come before .function
                names = launch.kernel.arg_names
                readers = tuple(_reader(launch.args.get(name)) for name in names)
                calls.append((run, launch.grid, compiled.function, compiled.packed_metadata, readers, compiled))
        self._calls = tuple(calls)

    def __call__(self, args: Any, workspace: int, stream: int) -> None:
        """Launch everything in order on ``stream`` (a raw handle), with this device current."""
        enter, leave = _hooks()
        for run, grid, function, metadata, readers, compiled in self._calls:
            values = [read(args, workspace) if callable(read) else read for read in readers]
            about = compiled.launch_metadata((grid, 1, 1), stream, *values) if enter is not None else None
            try:
                run(grid, 1, 1, stream, function, metadata, about, enter, leave, *values)
            except RuntimeError as e:
                raise KernelInternal(f"launch of {compiled.name} failed: {e}") from e


def _hooks() -> tuple[Any, Any]:
    knobs = triton.knobs.runtime
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    return (enter if getattr(enter, "calls", enter) else None), (leave if getattr(leave, "calls", leave) else None)


def _reader(arg: Arg) -> Any:
    """A constant, or a Reader."""
    if arg is None:
        return None
    if isinstance(arg, Int):
        return arg.value
    if isinstance(arg, tuple):
        parts = tuple(_reader(a) for a in arg)
        if not any(callable(p) for p in parts):
            return parts
        return lambda args, workspace: tuple(p(args, workspace) if callable(p) else p for p in parts)
    if isinstance(arg, Scratch):
        offset = arg.offset
        return lambda args, workspace: workspace + offset
    if isinstance(arg, Scalar):
        name, default = arg.operand, arg.default
        return lambda args, workspace: default if (given := getattr(args, name)) is None else given
    name, item = arg.operand, arg.item
    if isinstance(arg, Stride):
        axis = arg.axis
        if item is None:
            return lambda args, workspace: getattr(args, name).stride(axis)
        return lambda args, workspace: getattr(args, name)[item].stride(axis)
    assert isinstance(arg, Ptr)
    if item is None:
        return lambda args, workspace: getattr(args, name).data_ptr()
    return lambda args, workspace: getattr(args, name)[item].data_ptr()
