"""``triton.jit`` and ``gluon.jit`` for kernels of this package: Triton reads a function's source when it is first used.

Triton's decorators read it where a function is defined. ``import triplan`` defines hundreds of functions, of which a
process uses few.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import triton
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

from triplan.sku import interpreting

#: Held while a function's source is read. Reading imports nothing and waits for nothing.
_reading = threading.RLock()
# A process that is forked while another thread reads must not find the lock held for ever.
os.register_at_fork(before=_reading.acquire, after_in_parent=_reading.release, after_in_child=_reading.release)

#: Attributes that are those of the function.
_NAMES = ("__doc__", "__module__", "__name__", "__qualname__")
_KNOWN = frozenset({*_NAMES, "__class__", "__dict__", "fn"})


def _deferred(plain: type[Any]) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that makes objects of Triton's class ``plain``, and initialises each when it is first used."""

    class Deferred(plain):  # type: ignore[misc]
        def __init__(self, fn: Callable[..., Any]) -> None:
            self.__dict__.update({name: getattr(fn, name) for name in _NAMES}, fn=fn, deferred=True)

        def __getattribute__(self, name: str) -> Any:
            if name not in _KNOWN:
                # Other threads wait until every attribute is there. Triton's __init__ reads some in this thread.
                with _reading:
                    if self.__dict__.pop("deferred", False):
                        try:
                            plain.__init__(self, self.fn)
                        except BaseException:
                            self.__dict__["deferred"] = True
                            raise
                        self.__class__ = plain
            return object.__getattribute__(self, name)

    return Deferred


#: As ``triton.jit``, without its options.
jit: Callable[[Callable[..., Any]], Any] = triton.jit if interpreting() else _deferred(JITFunction)
#: As ``gluon.jit``, without its options.
gluon_jit = _deferred(GluonJITFunction)

__all__ = ["gluon_jit", "jit"]
