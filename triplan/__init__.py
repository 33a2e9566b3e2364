"""Typed, cacheable plans for GPU tensor ops written in Triton: Descriptor -> Plan -> run."""

from triplan import _interrupts as _interrupts  # before torch
from triplan._exports import export as _export
from triplan.backends import *
from triplan.backends.storing import software as _software
from triplan.descriptors._public import *
from triplan.descriptors.elementwise import expr as expr
from triplan.errors import *
from triplan.facade import *
from triplan.sku._public import *

#: "source tree" in a checkout that is not installed.
__version__ = _software()["triplan"]
_export(__name__, "triplan.descriptors", "triplan.facade", "triplan.sku")
