"""Typed, cacheable plans for GPU tensor ops written in Triton: Descriptor -> Plan -> run."""

import gc as _gc

from triplan import _interrupts as _interrupts  # before torch

# Python would search the modules that are being imported for garbage again and again.
_collecting = _gc.isenabled()
_gc.disable()
try:
    from triplan._exports import export as _export
    from triplan.backends import *
    from triplan.backends.storing import software as _software
    from triplan.descriptors._public import *
    from triplan.descriptors.elementwise import expr as expr
    from triplan.errors import *
    from triplan.facade import *
    from triplan.sku._public import *
finally:
    if _collecting:
        _gc.enable()

#: "source tree" in a checkout that is not installed.
__version__ = _software()["triplan"]
_export(__name__, "triplan.descriptors", "triplan.facade", "triplan.sku")
