"""WHAT is asked: frozen models, one module an op family."""

from triplan.descriptors.base import Descriptor, descriptor_types, parse_descriptor
from triplan.descriptors.fields import AxisField, Extent, ExtentField, IndexValueField, Shape, ShapeField
from triplan.descriptors.gemm import (
    BatchedGemmDescriptor,
    GemmDescriptor,
    MatrixProductDescriptor,
    MultiplyingDescriptor,
)
from triplan.descriptors.gemm_backward import GemmBackwardDescriptor
from triplan.descriptors.indexing import (
    EmbeddingBackwardDescriptor,
    EmbeddingDescriptor,
    GatherBackwardDescriptor,
    GatherDescriptor,
    IndexAddDescriptor,
    IndexingDescriptor,
    IndexPutDescriptor,
    IndexSelectBackwardDescriptor,
    IndexSelectDescriptor,
    OutOfBounds,
    ScatterAddDescriptor,
    ScatterDescriptor,
)
from triplan.descriptors.layout import PACKED, Layout, is_packed, packed_strides
from triplan.descriptors.operand import Operand, OperandKind, Role
from triplan.descriptors.rowwise import (
    LayerNormBackwardDescriptor,
    LayerNormDescriptor,
    LogSoftmaxBackwardDescriptor,
    LogSoftmaxDescriptor,
    RmsNormBackwardDescriptor,
    RmsNormDescriptor,
    RowwiseDescriptor,
    SoftmaxBackwardDescriptor,
    SoftmaxDescriptor,
)

__all__ = [
    "PACKED",
    "AxisField",
    "BatchedGemmDescriptor",
    "Descriptor",
    "EmbeddingBackwardDescriptor",
    "EmbeddingDescriptor",
    "Extent",
    "ExtentField",
    "GatherBackwardDescriptor",
    "GatherDescriptor",
    "GemmBackwardDescriptor",
    "GemmDescriptor",
    "IndexAddDescriptor",
    "IndexPutDescriptor",
    "IndexSelectBackwardDescriptor",
    "IndexSelectDescriptor",
    "IndexValueField",
    "IndexingDescriptor",
    "LayerNormBackwardDescriptor",
    "LayerNormDescriptor",
    "Layout",
    "LogSoftmaxBackwardDescriptor",
    "LogSoftmaxDescriptor",
    "MatrixProductDescriptor",
    "MultiplyingDescriptor",
    "Operand",
    "OperandKind",
    "OutOfBounds",
    "RmsNormBackwardDescriptor",
    "RmsNormDescriptor",
    "Role",
    "RowwiseDescriptor",
    "ScatterAddDescriptor",
    "ScatterDescriptor",
    "Shape",
    "ShapeField",
    "SoftmaxBackwardDescriptor",
    "SoftmaxDescriptor",
    "descriptor_types",
    "is_packed",
    "packed_strides",
    "parse_descriptor",
]
