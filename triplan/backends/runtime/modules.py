"""Binaries loaded on GPUs (the driver's *modules*): one for all launches of a binary on a device.

A module stays loaded while a plan, a replay or a bound run holds it, and so do the ``MAX_RECENT`` that were asked for
last. What nobody holds any more is unloaded when the next one is loaded: a moment that allocates anyway, never within a
run or a capture. A module that was launched into a stream being captured stays loaded, because nobody tells us when the
graph is gone.

Relies on Triton 3.6 to 3.9: ``driver.active.utils.load_binary(name, cubin, shared, device)`` returns (module, function,
...), a ``CompiledKernel`` with a ``module`` loads none, and from 3.7 on its ``__del__`` unloads it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from triton.compiler import CompiledKernel
from triton.runtime import driver

from triplan.backends.runtime.compile import compile_source
from triplan.backends.runtime.cuda import check, relaxed
from triplan.backends.runtime.launch import Source
from triplan.errors import KernelInternal
from triplan.sku import ArchSku
from triplan.sku.facts import cached_property

#: Modules that stay loaded without a plan: a few tens of KiB of GPU memory each. Untuned.
MAX_RECENT = 256

Key = tuple[Source, ArchSku, int]
_lock = threading.RLock()
_loaded: weakref.WeakValueDictionary[Key, LoadedBinary] = weakref.WeakValueDictionary()
_recent: OrderedDict[Key, LoadedBinary] = OrderedDict()
_captured: set[LoadedBinary] = set()
#: Modules to unload, by device.
_unused: dict[int, list[int]] = {}


class LoadedBinary(CompiledKernel):  # type: ignore[misc]
    """A compiled kernel with its ``module`` and ``function`` on one device, as Triton's launchers take it."""

    def __init__(self, compiled: Any, device: int) -> None:
        """``device`` is the current one. Raises ``KernelInternal``."""
        self.__dict__.update(compiled.__dict__)
        utils, shared = driver.active.utils, self.metadata.shared
        try:
            self.module, self.function, *_ = utils.load_binary(self.name, self.kernel, shared, device)
        except RuntimeError as e:
            raise KernelInternal(f"{self.name} cannot be loaded on cuda:{device}: {e}") from e
        # Not when the interpreter exits: the driver may be gone by then, and frees everything anyway.
        weakref.finalize(self, _unused.setdefault(device, []).append, self.module).atexit = False

    @cached_property
    def run(self) -> Any:
        """Triton's launcher."""
        return driver.active.launcher_cls(self.src, self.metadata)

    def __del__(self) -> None:
        """Not Triton's, which unloads at once."""


def load_binary(source: Source, arch: ArchSku, device: int) -> LoadedBinary:
    """The binary of ``source``, loaded on ``device``, the current one. Raises as ``compile_source``."""
    compiled, key = compile_source(source, arch), (source, arch, device)
    with _lock:
        binary = _loaded.get(key)
        if binary is None:
            _unload(_unused.get(device, []))
            binary = _loaded[key] = LoadedBinary(compiled, device)
        _recent[key] = binary
        _recent.move_to_end(key)
        while len(_recent) > MAX_RECENT:
            _recent.popitem(last=False)
    return binary


def is_loaded(source: Source, arch: ArchSku, device: int) -> bool:
    return (source, arch, device) in _loaded


def keep_loaded(binaries: Iterable[LoadedBinary]) -> None:
    """Never unload ``binaries``: a graph is being captured that launches them."""
    _captured.update(binaries)


def _unload(modules: list[int]) -> None:
    while modules:
        # After a fault every driver call returns that error; the load that follows reports it.
        with suppress(RuntimeError), relaxed():
            check("cuModuleUnload", ctypes.c_void_p(modules.pop()))


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # the thread that may hold it is not in the child


os.register_at_fork(after_in_child=_after_fork)
