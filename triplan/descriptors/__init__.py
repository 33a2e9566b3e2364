"""WHAT is to be computed: frozen models, one module for each family of ops."""

from triplan.descriptors._public import *
from triplan.descriptors.fields import *
from triplan.descriptors.gemm import MatrixProductDescriptor as MatrixProductDescriptor
from triplan.descriptors.indexing import IndexingDescriptor as IndexingDescriptor
from triplan.descriptors.layout import PACKED as PACKED, is_packed as is_packed, packed_strides as packed_strides
from triplan.descriptors.losses import LossDescriptor as LossDescriptor
