"""Matrix products as torch has them."""

from triplan._exports import export as _export
from triplan.functional.gemm.matmul import *
from triplan.functional.gemm.products import *

_export(__name__)
