"""Typed, cacheable plans for GPU tensor ops written in Triton: Descriptor -> Plan -> run."""

from triplan._exports import export as _export
from triplan.backends import *
from triplan.descriptors.base import *
from triplan.descriptors.elementwise import *
from triplan.descriptors.gemm import *
from triplan.descriptors.indexing import *
from triplan.descriptors.layout import *
from triplan.descriptors.losses import *
from triplan.descriptors.norms import *
from triplan.descriptors.operand import *
from triplan.descriptors.softmax import *
from triplan.errors import *
from triplan.facade import *
from triplan.sku.element import *
from triplan.sku.guarantee import *
from triplan.sku.kernel_sku import *
from triplan.sku.kinds import *
from triplan.sku.preference import *
from triplan.sku.support import *
from triplan.sku.target import *

_export(__name__)
