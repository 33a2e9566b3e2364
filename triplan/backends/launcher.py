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
#: Triton 3.6: grid, stream, function, cooperative, dependent launch, two scratches, metadata twice, two hooks.
_C_FORMAT = "iiiKKppOOOOOO"
_KNOBS = triton.knobs.runtime


class LoadedKernel:
    """One launch's kernel on one device, with the readers of its arguments."""

    __slots__ = ("_compiled", "_direct", "_grid", "_head", "_readers", "_run")

    def __init__(self, launch: Launch, arch: ArchSku, device: int) -> None:
        compiled = compile_source(launch.source(), arch, device)
        self._run = compiled.run  # loads the module; must come before .function
        self._compiled, self._grid = compiled, launch.grid
        self._readers = tuple(_reader(launch.args.get(name)) for name in launch.kernel.arg_names)
        self._direct, self._head = _direct_call(compiled)

    def bind(self, args: Any, workspace: int) -> BoundLaunch:
        """The launch with every argument's present value: addresses, strides, scalars."""
        values = tuple(read(args, workspace) if callable(read) else read for read in self._readers)
        return BoundLaunch(self, values)

    @property
    def name(self) -> str:
        return str(self._compiled.name)


class BoundLaunch:
    """A kernel launch with all arguments fixed; calling it with a raw stream handle launches."""

    __slots__ = ("_call", "_grid", "_kernel", "_rest", "_values")

    def __init__(self, kernel: LoadedKernel, values: tuple[Any, ...]) -> None:
        self._kernel, self._values, self._grid = kernel, values, kernel._grid
        self._call, self._rest = kernel._direct, (*kernel._head, *values)

    def __call__(self, stream: int) -> None:
        enter, leave = _KNOBS.launch_enter_hook, _KNOBS.launch_exit_hook
        if (enter and enter.calls) or (leave and leave.calls):
            self._profiled(stream)
            return
        try:
            self._call(self._grid, 1, 1, stream, *self._rest)
        except RuntimeError as e:
            raise KernelInternal(f"launch of {self._kernel.name} failed: {e}") from e

    def _profiled(self, stream: int) -> None:
        kernel, grid = self._kernel, (self._grid, 1, 1)
        compiled = kernel._compiled
        about = compiled.launch_metadata(grid, stream, *self._values)
        hooks = (_KNOBS.launch_enter_hook, _KNOBS.launch_exit_hook)
        head = (stream, compiled.function, compiled.packed_metadata, about, *hooks)
        kernel._run(*grid, *head, *self._values)


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
