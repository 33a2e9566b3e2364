"""torch-like calls with autograd, on plans: what torch has by these names, with torch's semantics."""

from triplan._exports import export as _export
from triplan.functional._flops import register as _register_flops
from triplan.functional.attention import *
from triplan.functional.batch_norm import *
from triplan.functional.composed import *
from triplan.functional.conv import *
from triplan.functional.copies import *
from triplan.functional.elementwise import *
from triplan.functional.gemm import *
from triplan.functional.indexing import *
from triplan.functional.losses import *
from triplan.functional.norms import *
from triplan.functional.pooling import *
from triplan.functional.random import *
from triplan.functional.reduced_expressions import *
from triplan.functional.reductions import *
from triplan.functional.rotary import *
from triplan.functional.sampling import *
from triplan.functional.scans import *
from triplan.functional.softmax import *
from triplan.functional.sorting import *

_register_flops()
_export(__name__)
