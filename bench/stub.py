"""Measures host time without a GPU: everything runs except the launch itself.

Within ``launch_stubbed`` these are replaced: Triton's launcher and the CUDA graph of bound runs, by calls that do
nothing; torch's device switch and stream query; and the check of operands' devices, so that CPU tensors are accepted.
Kernels are compiled for the target as usual. The measured times lack the driver's launch and torch's device switch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import triplan as tp
from triplan.backends.runtime import cuda, launcher, modules
from triplan.facade import bound


def _nothing(*args: Any) -> None:
    return None


class _Utils:
    def load_binary(self, *args: Any) -> tuple[None, int, int, int, int]:
        # Module, function, registers, spills, threads. No module: from 3.7 on Triton would unload it.
        return None, 1, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}


class _Driver:
    """The part of a driver that ``JITFunction.run`` and ``CompiledKernel`` use, in Triton 3.6 to 3.9."""

    utils = _Utils()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return _nothing


class _Device:
    def __init__(self, index: object) -> None:
        pass

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


@contextmanager
def launch_stubbed(target: tp.Target) -> Iterator[None]:
    """Within this context, plans for ``target`` accept CPU tensors and check them, but launch nothing."""
    before = driver._active
    with ExitStack() as stack:
        changes: tuple[Any, ...] = (
            patch.object(torch.cuda, "device", _Device),
            patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
            patch.object(modules, "_loaded", WeakValueDictionary()),
            patch.object(modules, "_recent", OrderedDict()),
            patch.object(modules, "_captured", set()),
            patch.object(modules, "_unused", {}),
            patch.object(cuda, "DRIVER", None),
            patch.object(launcher, "is_capturing", lambda: False),
            patch.object(bound, "graph_start", lambda calls, device: lambda stream: 0),
            patch.object(tp.Target, "device_type", property(lambda self: "cpu")),
            patch.object(tp.Target, "of", staticmethod(lambda device: target)),
        )
        for change in changes:
            stack.enter_context(change)
        driver.set_active(_Driver())
        try:
            yield
        finally:
            driver._active = before
