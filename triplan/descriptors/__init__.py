"""WHAT is asked: frozen models, one module an op family."""

from triplan.descriptors.bad_indices import OutOfBounds
from triplan.descriptors.base import Descriptor, RowwiseDescriptor, descriptor_types, parse_descriptor
from triplan.descriptors.fields import AxisField, Extent, ExtentField, IndexValueField, Shape, ShapeField
from triplan.descriptors.gemm import (
    BatchedGemmDescriptor,
    GemmBackwardDescriptor,
    GemmDescriptor,
    MatrixProductDescriptor,
    MultiplyingDescriptor,
)
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
    ScatterAddDescriptor,
    ScatterDescriptor,
)
from triplan.descriptors.layout import PACKED, Layout, is_packed, packed_strides
from triplan.descriptors.losses import (
    CrossEntropyBackwardDescriptor,
    CrossEntropyDescriptor,
    LossDescriptor,
    NllLossBackwardDescriptor,
    NllLossDescriptor,
    ScaleGradientDescriptor,
)
from triplan.descriptors.norms import (
    L2NormBackwardDescriptor,
    L2NormDescriptor,
    LayerNormBackwardDescriptor,
    LayerNormDescriptor,
    RmsNormBackwardDescriptor,
    RmsNormDescriptor,
)
from triplan.descriptors.operand import Operand, OperandKind, Role
from triplan.descriptors.softmax import (
    LogSoftmaxBackwardDescriptor,
    LogSoftmaxDescriptor,
    SoftmaxBackwardDescriptor,
    SoftmaxDescriptor,
)

__all__ = [
    "PACKED",
    "AxisField",
    "BatchedGemmDescriptor",
    "CrossEntropyBackwardDescriptor",
    "CrossEntropyDescriptor",
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
    "L2NormBackwardDescriptor",
    "L2NormDescriptor",
    "LayerNormBackwardDescriptor",
    "LayerNormDescriptor",
    "Layout",
    "LogSoftmaxBackwardDescriptor",
    "LogSoftmaxDescriptor",
    "LossDescriptor",
    "MatrixProductDescriptor",
    "MultiplyingDescriptor",
    "NllLossBackwardDescriptor",
    "NllLossDescriptor",
    "Operand",
    "OperandKind",
    "OutOfBounds",
    "RmsNormBackwardDescriptor",
    "RmsNormDescriptor",
    "Role",
    "RowwiseDescriptor",
    "ScaleGradientDescriptor",
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
