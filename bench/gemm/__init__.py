"""``python -m bench gemm``: matrix products against torch's (cuBLAS), in one run."""

from bench.gemm.cases import DTYPES
from bench.gemm.run import run

__all__ = ["DTYPES", "run"]
