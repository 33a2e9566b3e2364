"""torch-like calls with autograd, on plans: what torch has by these names, with torch's semantics."""

from triplan.functional.gemm import addmm, bmm, linear, matmul, mm
from triplan.functional.indexing.gather import gather, gather_with_grad, scatter, scatter_add, scatter_add_
from triplan.functional.indexing.put import index_put
from triplan.functional.indexing.select import embedding, index_add, index_add_, index_select
from triplan.functional.losses import cross_entropy, nll_loss
from triplan.functional.norms import l2_norm, layer_norm, rms_norm
from triplan.functional.softmax import log_softmax, softmax

__all__ = [
    "addmm",
    "bmm",
    "cross_entropy",
    "embedding",
    "gather",
    "gather_with_grad",
    "index_add",
    "index_add_",
    "index_put",
    "index_select",
    "l2_norm",
    "layer_norm",
    "linear",
    "log_softmax",
    "matmul",
    "mm",
    "nll_loss",
    "rms_norm",
    "scatter",
    "scatter_add",
    "scatter_add_",
    "softmax",
]
