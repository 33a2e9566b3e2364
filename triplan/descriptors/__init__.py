"""WHAT is asked: frozen models, one module an op family."""

from triplan.descriptors.base import Descriptor, descriptor_types, parse_descriptor
from triplan.descriptors.fields import AxisField, Extent, ExtentField, IndexValueField, Shape, ShapeField
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
    LogSoftmaxBackwardDescriptor,
    LogSoftmaxDescriptor,
    RowwiseDescriptor,
    SoftmaxBackwardDescriptor,
    SoftmaxDescriptor,
)

__all__ = [
    "PACKED",
    "AxisField",
    "Descriptor",
    "EmbeddingBackwardDescriptor",
    "EmbeddingDescriptor",
    "Extent",
    "ExtentField",
    "GatherBackwardDescriptor",
    "GatherDescriptor",
    "IndexAddDescriptor",
    "IndexPutDescriptor",
    "IndexSelectBackwardDescriptor",
    "IndexSelectDescriptor",
    "IndexValueField",
    "IndexingDescriptor",
    "Layout",
    "LogSoftmaxBackwardDescriptor",
    "LogSoftmaxDescriptor",
    "Operand",
    "OperandKind",
    "OutOfBounds",
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
