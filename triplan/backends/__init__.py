"""HOW: the kernel table, the kernels, the reference, and what compiles and launches them."""

from triplan.backends.reference import gemm as _reference_gemm  # noqa: F401 (registers its rows)
from triplan.backends.reference import gemm_backward as _reference_gemm_backward  # noqa: F401 (registers its rows)
from triplan.backends.reference import indexing as _reference_indexing  # noqa: F401 (registers its rows)
from triplan.backends.reference import losses as _reference_losses  # noqa: F401 (registers its rows)
from triplan.backends.reference import rowwise as _reference_rowwise  # noqa: F401 (registers its rows)
from triplan.backends.table import TABLE, KernelRow, KernelTable, kernel, reference
from triplan.backends.triton import cross_entropy as _triton_cross_entropy  # noqa: F401 (registers its rows)
from triplan.backends.triton import gemm as _triton_gemm  # noqa: F401 (registers its rows)
from triplan.backends.triton import gemm_backward as _triton_gemm_backward  # noqa: F401 (registers its rows)
from triplan.backends.triton import gemm_backward_wgmma as _triton_gemm_backward_wgmma  # noqa: F401 (registers its rows)
from triplan.backends.triton import gemm_split as _triton_gemm_split  # noqa: F401 (registers its rows)
from triplan.backends.triton import gemm_wgmma as _triton_gemm_wgmma  # noqa: F401 (registers its rows)
from triplan.backends.triton import indexing as _triton_indexing  # noqa: F401 (registers its rows)
from triplan.backends.triton import indexing_fixed as _triton_indexing_fixed  # noqa: F401 (registers its rows)
from triplan.backends.triton import indexing_sorted as _triton_indexing_sorted  # noqa: F401 (registers its rows)
from triplan.backends.triton import nll_loss as _triton_nll_loss  # noqa: F401 (registers its rows)
from triplan.backends.triton import norm as _triton_norm  # noqa: F401 (registers its rows)
from triplan.backends.triton import norm_split as _triton_norm_split  # noqa: F401 (registers its rows)
from triplan.backends.triton import softmax as _triton_softmax  # noqa: F401 (registers its rows)
from triplan.backends.tuning import TuningTable

__all__ = ["TABLE", "KernelRow", "KernelTable", "TuningTable", "kernel", "reference"]
