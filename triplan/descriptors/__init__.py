"""WHAT is to be computed: frozen models, one module for each family of ops."""

from triplan._exports import export as _export
from triplan.descriptors.base import *
from triplan.descriptors.base import RowwiseDescriptor as RowwiseDescriptor
from triplan.descriptors.elementwise import *
from triplan.descriptors.fields import *
from triplan.descriptors.fields import OutOfBounds as OutOfBounds
from triplan.descriptors.gemm import *
from triplan.descriptors.gemm import MatrixProductDescriptor as MatrixProductDescriptor
from triplan.descriptors.gemm import MultiplyingDescriptor as MultiplyingDescriptor
from triplan.descriptors.indexing import *
from triplan.descriptors.indexing import IndexingDescriptor as IndexingDescriptor
from triplan.descriptors.layout import *
from triplan.descriptors.layout import PACKED as PACKED
from triplan.descriptors.layout import is_packed as is_packed
from triplan.descriptors.layout import packed_strides as packed_strides
from triplan.descriptors.losses import *
from triplan.descriptors.losses import LossDescriptor as LossDescriptor
from triplan.descriptors.norms import *
from triplan.descriptors.operand import *
from triplan.descriptors.softmax import *

_export(__name__)
