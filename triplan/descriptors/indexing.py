"""Indexing: gather and scatter in every form, and their backward ops.

Names follow baracuda where it has the op. In every op the *dense* operand (``out`` of a gather, ``src`` or ``dout`` of
a scatter) has one element for each point of the problem; the *table* is the operand that the indices point into.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PositiveInt

from triplan.descriptors.base import Descriptor, PlannedBy, check_bad_index
from triplan.descriptors.fields import MAX_RANK, AxisField, Extent, IndexValueField, OutOfBounds, Shape
from triplan.descriptors.operand import Operand, OperandKind, Role
from triplan.errors import shown
from triplan.sku import Element, ElementKind, IndexElement, IndexElementKind, OpCategory, field

if TYPE_CHECKING:
    from triplan.facade.indexing import (
        EmbeddingBackwardPlan,
        EmbeddingPlan,
        GatherBackwardPlan,
        GatherPlan,
        IndexAddPlan,
        IndexPutPlan,
        IndexSelectBackwardPlan,
        IndexSelectPlan,
        NormedEmbeddingPlan,
        ScatterAddPlan,
        ScatterPlan,
        ScatterReducePlan,
    )

__all__ = ["GatherBackwardDescriptor", "GatherDescriptor", "IndexingDescriptor"]
__all__ += ["IndexSelectBackwardDescriptor", "IndexSelectDescriptor"]
__all__ += ["EmbeddingBackwardDescriptor", "EmbeddingDescriptor", "NormedEmbeddingDescriptor"]
__all__ += ["IndexAddDescriptor", "IndexPutDescriptor"]
__all__ += ["ScatterAddDescriptor", "ScatterDescriptor", "ScatterReduceDescriptor"]


class IndexingDescriptor(Descriptor):
    """Fields that indexing ops share, the last four only some of them.

    Attributes:
        element: element of the values.
        index_element: element of the indices, i32 or i64.
        out_of_bounds: what an index outside its axis does.
        wrap_negative: negative indices count from the end, as in Python; else they are out of bounds.
        accumulate: whether contributions are added to what the output holds; if not, a backward op writes every
            element, and index_put the elements that the indices name.
        index_shape: shape of the indices (of each tensor of them, for index_put).
        num_embeddings: rows of ``weight``.
        embedding_dim: columns of ``weight``.
    """

    category: ClassVar[OpCategory] = OpCategory.INDEXING

    element: Element
    index_element: IndexElement = field(default=IndexElementKind.I64)
    out_of_bounds: OutOfBounds = "skip"
    wrap_negative: bool = False

    def _index(self, shape: tuple[int, ...], extent: int, batch_axes: tuple[int, ...] = ()) -> Operand:
        element = ElementKind(self.index_element.value)
        return Operand("index", Role.INPUT, element, shape, batch_axes=batch_axes, index_extents=(extent,))

    def _status(self) -> tuple[Operand, ...]:
        if self.out_of_bounds != "error":
            return ()
        return (Operand("status", Role.OUTPUT, ElementKind.I64, (1,)),)

    def check_status(self, args: Any) -> None:
        check_bad_index(self, self.out_of_bounds, args)


def with_extent(shape: Sequence[int], axis: int, extent: int) -> tuple[int, ...]:
    """``shape`` with the extent of ``axis`` replaced."""
    return (*shape[:axis], extent, *shape[axis + 1 :])


def other_axes(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """All axes of ``shape`` but ``axis``."""
    return tuple(a for a in range(len(shape)) if a != axis)


# --- one index per element, as in torch.gather ---


class _Gathering(IndexingDescriptor):
    """One index for each element of ``out``.

    Attributes:
        out_shape: shape of ``index`` and ``out`` (of the backward op's ``dout``).
        gather_dim: the axis along which the indices point.
        src_dim_size: the extent of ``src`` along ``gather_dim``; its other extents are those of ``out_shape``.
    """

    out_shape: Shape
    gather_dim: Annotated[int, AxisField("out_shape")]
    src_dim_size: Extent

    @property
    def _batch_axes(self) -> tuple[int, ...]:
        return other_axes(self.out_shape, self.gather_dim)

    def _dense(self, name: str, role: Role) -> Operand:
        return Operand(name, role, self.element, self.out_shape, batch_axes=self._batch_axes)

    def _table(self, name: str, role: Role) -> Operand:
        shape = with_extent(self.out_shape, self.gather_dim, self.src_dim_size)
        return Operand(name, role, self.element, shape, batch_axes=self._batch_axes)

    def _indices(self) -> Operand:
        return self._index(self.out_shape, self.src_dim_size, self._batch_axes)


class GatherDescriptor(_Gathering, PlannedBy["GatherPlan"]):
    """``out[..., j, ...] = src[..., index[..., j, ...], ...]`` along ``gather_dim`` (torch.gather).

    Operands: ``src`` (``out_shape`` with ``src_dim_size`` along ``gather_dim``), ``index`` and ``out`` (``out_shape``).
    """

    op: Literal["gather"] = "gather"

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            self._table("src", Role.INPUT),
            self._indices(),
            self._dense("out", Role.OUTPUT),
            *self._status(),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return _fields(args.src, args.index, out_shape=args.index, src_dim_size=(args.src, "gather_dim"), **options)


class GatherBackwardDescriptor(_Gathering, PlannedBy["GatherBackwardPlan"]):
    """Backward of gather: ``dsrc[..., index[..., j, ...], ...] += dout[..., j, ...]``.

    With ``accumulate`` (the default) it adds to what ``dsrc`` holds; without, it writes every element.
    """

    op: Literal["gather_backward"] = "gather_backward"
    accumulate: bool = True

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            self._dense("dout", Role.INPUT),
            self._indices(),
            self._table("dsrc", Role.IN_OUT if self.accumulate else Role.OUTPUT),
            *self._status(),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return _fields(args.dout, args.index, out_shape=args.index, src_dim_size=(args.dsrc, "gather_dim"), **options)


class _Scattering(IndexingDescriptor):
    """One index for each element of ``src``.

    Attributes:
        src_shape: shape of ``index`` and ``src``.
        scatter_dim: the axis along which the indices point.
        out_dim_size: the extent of ``out`` along ``scatter_dim``; its other extents are those of ``src_shape``.
    """

    src_shape: Shape
    scatter_dim: Annotated[int, AxisField("src_shape")]
    out_dim_size: Extent

    def declare_operands(self) -> tuple[Operand, ...]:
        batch = other_axes(self.src_shape, self.scatter_dim)
        out_shape = with_extent(self.src_shape, self.scatter_dim, self.out_dim_size)
        return (
            self._index(self.src_shape, self.out_dim_size, batch),
            Operand("src", Role.INPUT, self.element, self.src_shape, batch_axes=batch),
            Operand("out", Role.IN_OUT, self.element, out_shape, batch_axes=batch),
            *self._status(),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return _fields(args.src, args.index, src_shape=args.index, out_dim_size=(args.out, "scatter_dim"), **options)


class ScatterAddDescriptor(_Scattering, PlannedBy["ScatterAddPlan"]):
    """``out[..., index[..., j, ...], ...] += src[..., j, ...]`` along ``scatter_dim`` (torch.Tensor.scatter_add_)."""

    op: Literal["scatter_add"] = "scatter_add"


class ScatterDescriptor(_Scattering, PlannedBy["ScatterPlan"]):
    """``out[..., index[..., j, ...], ...] = src[..., j, ...]`` along ``scatter_dim`` (torch.Tensor.scatter_).

    Where an index repeats, the guarantee's ``duplicates`` says which of the writes stays: the ``last`` (largest j) or
    ``any``.
    """

    op: Literal["scatter"] = "scatter"


class ScatterReduceDescriptor(_Scattering, PlannedBy["ScatterReducePlan"]):
    """``out[..., index[..., j, ...], ...] = r(out[..., index[..., j, ...], ...], src[..., j, ...])`` along
    ``scatter_dim`` (torch.Tensor.scatter_reduce_); ``op`` names r. NaN stays NaN.

    scatter_prod: the product, of integers modulo 2^n. No kernel multiplies floats: a product whose partial products
    overflow or underflow has no tolerance.

    scatter_amax: the larger; of zeros 0, not -0.

    scatter_amin: the smaller; of zeros 0, not -0.
    """

    op: Literal["scatter_prod", "scatter_amax", "scatter_amin"]


# --- one index per slice, as in torch.index_select ---


class _Selecting(IndexingDescriptor):
    """One index for each slice of ``out``.

    Attributes:
        out_shape: shape of ``out`` (of the backward op's ``dout``).
        select_dim: the axis along which the indices point; there is one for each position of ``out`` along it.
        src_dim_size: the extent of ``src`` along ``select_dim``; its other extents are those of ``out_shape``.
    """

    out_shape: Shape
    select_dim: Annotated[int, AxisField("out_shape")]
    src_dim_size: Extent

    def _dense(self, name: str, role: Role) -> Operand:
        batch = other_axes(self.out_shape, self.select_dim)
        return Operand(name, role, self.element, self.out_shape, batch_axes=batch)

    def _table(self, name: str, role: Role) -> Operand:
        batch = other_axes(self.out_shape, self.select_dim)
        shape = with_extent(self.out_shape, self.select_dim, self.src_dim_size)
        return Operand(name, role, self.element, shape, batch_axes=batch)

    def _indices(self) -> Operand:
        return self._index((self.out_shape[self.select_dim],), self.src_dim_size)


class IndexSelectDescriptor(_Selecting, PlannedBy["IndexSelectPlan"]):
    """``out[..., j, ...] = src[..., index[j], ...]`` along ``select_dim``, with a 1-D index (torch.index_select)."""

    op: Literal["index_select"] = "index_select"

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            self._table("src", Role.INPUT),
            self._indices(),
            self._dense("out", Role.OUTPUT),
            *self._status(),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return _fields(args.src, args.index, out_shape=args.out, src_dim_size=(args.src, "select_dim"), **options)


class IndexSelectBackwardDescriptor(_Selecting, PlannedBy["IndexSelectBackwardPlan"]):
    """Backward of index_select: ``dsrc[..., index[j], ...] += dout[..., j, ...]``.

    With ``accumulate`` (the default) it adds to what ``dsrc`` holds; without, it writes every element.
    """

    op: Literal["index_select_backward"] = "index_select_backward"
    accumulate: bool = True

    def declare_operands(self) -> tuple[Operand, ...]:
        return (
            self._dense("dout", Role.INPUT),
            self._indices(),
            self._table("dsrc", Role.IN_OUT if self.accumulate else Role.OUTPUT),
            *self._status(),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return _fields(args.dout, args.index, out_shape=args.dout, src_dim_size=(args.dsrc, "select_dim"), **options)


class IndexAddDescriptor(IndexingDescriptor, PlannedBy["IndexAddPlan"]):
    """``out[..., index[j], ...] += alpha * src[..., j, ...]`` along ``add_dim`` (torch.Tensor.index_add_).

    ``alpha`` is a Python number among the Args; None is 1.

    Attributes:
        src_shape: shape of ``src``; there is one index for each position along ``add_dim``.
        add_dim: the axis along which the indices point.
        out_dim_size: the extent of ``out`` along ``add_dim``; its other extents are those of ``src_shape``.
    """

    op: Literal["index_add"] = "index_add"
    src_shape: Shape
    add_dim: Annotated[int, AxisField("src_shape")]
    out_dim_size: Extent

    def declare_operands(self) -> tuple[Operand, ...]:
        batch = other_axes(self.src_shape, self.add_dim)
        out_shape = with_extent(self.src_shape, self.add_dim, self.out_dim_size)
        return (
            self._index((self.src_shape[self.add_dim],), self.out_dim_size),
            Operand("src", Role.INPUT, self.element, self.src_shape, batch_axes=batch),
            Operand("out", Role.IN_OUT, self.element, out_shape, batch_axes=batch),
            Operand("alpha", Role.INPUT, self.element.compute, kind=OperandKind.HOST_SCALAR, optional=True),
            *self._status(),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return _fields(args.src, args.index, src_shape=args.src, out_dim_size=(args.out, "add_dim"), **options)


class EmbeddingDescriptor(IndexingDescriptor, PlannedBy["EmbeddingPlan"]):
    """``out[..., :] = weight[index[...], :]`` (torch.nn.functional.embedding)."""

    op: Literal["embedding"] = "embedding"
    index_shape: Annotated[Shape, Field(max_length=MAX_RANK - 1)]
    num_embeddings: Extent
    embedding_dim: Extent

    def declare_operands(self) -> tuple[Operand, ...]:
        batch = tuple(range(len(self.index_shape)))
        return (
            Operand("weight", Role.INPUT, self.element, (self.num_embeddings, self.embedding_dim)),
            self._index(self.index_shape, self.num_embeddings, batch),
            Operand("out", Role.OUTPUT, self.element, (*self.index_shape, self.embedding_dim), batch_axes=batch),
            *self._status(),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        rows, width = args.weight.shape
        return _fields(
            args.weight, args.index, index_shape=args.index, num_embeddings=rows, embedding_dim=width, **options
        )


class NormedEmbeddingDescriptor(IndexingDescriptor, PlannedBy["NormedEmbeddingPlan"]):
    """``rows[..., :] = weight[index[...], :]`` and their RMSNorm, ``out = rows * rstd * norm_weight`` with
    ``rstd = 1 / sqrt(mean(rows**2) + eps)``, in one launch.

    ``rstd`` (one a row, in f32, or f64 for f64) is written for the backward, which is rms_norm_backward and then
    embedding_backward. The limits of the tolerance are those of rms_norm.

    Attributes:
        eps: what is added to the mean square.
    """

    op: Literal["normed_embedding"] = "normed_embedding"
    index_shape: Annotated[Shape, Field(max_length=MAX_RANK - 1)]
    num_embeddings: Extent
    embedding_dim: Extent
    eps: Annotated[float, Field(allow_inf_nan=False), AfterValidator(lambda eps: eps + 0.0)] = 1e-5

    def declare_operands(self) -> tuple[Operand, ...]:
        batch, shape = tuple(range(len(self.index_shape))), (*self.index_shape, self.embedding_dim)
        return (
            Operand("weight", Role.INPUT, self.element, (self.num_embeddings, self.embedding_dim)),
            self._index(self.index_shape, self.num_embeddings, batch),
            Operand("norm_weight", Role.INPUT, self.element, (self.embedding_dim,)),
            Operand("rows", Role.OUTPUT, self.element, shape, batch_axes=batch),
            Operand("out", Role.OUTPUT, self.element, shape, batch_axes=batch),
            Operand("rstd", Role.OUTPUT, self.element.compute, self.index_shape, batch_axes=batch),
            *self._status(),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return EmbeddingDescriptor.fields_from_args(args, **options)


class EmbeddingBackwardDescriptor(IndexingDescriptor, PlannedBy["EmbeddingBackwardPlan"]):
    """Backward of embedding: ``dweight[index[...], :] += dout[..., :]``, skipping ``padding_idx``.

    With ``accumulate`` (the default) it adds to what ``dweight`` holds; without, it writes every element.

    Attributes:
        padding_idx: the index whose contributions are skipped.
    """

    op: Literal["embedding_backward"] = "embedding_backward"
    index_shape: Annotated[Shape, Field(max_length=MAX_RANK - 1)]
    num_embeddings: Extent
    embedding_dim: Extent
    padding_idx: Annotated[int, IndexValueField("num_embeddings")] | None = None
    accumulate: bool = True

    def check_problem(self) -> None:
        if self.padding_idx is not None and not 0 <= self.padding_idx < self.num_embeddings:
            raise ValueError(
                f"padding_idx = {shown(self.padding_idx)}: must be in [0, {self.num_embeddings}), num_embeddings"
            )

    def declare_operands(self) -> tuple[Operand, ...]:
        batch = tuple(range(len(self.index_shape)))
        role = Role.IN_OUT if self.accumulate else Role.OUTPUT
        return (
            Operand("dout", Role.INPUT, self.element, (*self.index_shape, self.embedding_dim), batch_axes=batch),
            self._index(self.index_shape, self.num_embeddings, batch),
            Operand("dweight", role, self.element, (self.num_embeddings, self.embedding_dim)),
            *self._status(),
        )

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        rows, width = args.dweight.shape
        return _fields(
            args.dout, args.index, index_shape=args.index, num_embeddings=rows, embedding_dim=width, **options
        )


# --- several index tensors, as in torch.index_put ---


class IndexPutDescriptor(IndexingDescriptor, PlannedBy["IndexPutPlan"]):
    """``out[indices[0], indices[1], ...] = values`` or ``+= values`` over the leading axes (torch.Tensor.index_put_).

    ``num_indices`` index tensors of ``index_shape`` point into the leading axes of ``out``; ``values`` has
    ``index_shape`` followed by the remaining axes of ``out``. ``accumulate`` adds instead of writing.

    Attributes:
        out_shape: shape of ``out``.
        num_indices: number of index tensors, and of the leading axes that they point into.
    """

    op: Literal["index_put"] = "index_put"
    out_shape: Shape
    index_shape: Shape
    num_indices: PositiveInt = 1
    accumulate: bool = False

    def check_problem(self) -> None:
        if self.num_indices > len(self.out_shape):
            raise ValueError(
                f"num_indices = {shown(self.num_indices)}: must be at most {len(self.out_shape)}, the rank of out_shape"
            )
        rank = len(self.index_shape) + len(self.out_shape) - self.num_indices
        if rank > MAX_RANK:
            raise ValueError(
                f"index_shape = {shown(self.index_shape)} with out_shape = {shown(self.out_shape)}: values would have "
                f"rank {rank}; at most {MAX_RANK} is taken"
            )

    def declare_operands(self) -> tuple[Operand, ...]:
        k, batch = self.num_indices, tuple(range(len(self.index_shape)))
        indices = Operand(
            "indices",
            Role.INPUT,
            ElementKind(self.index_element.value),
            self.index_shape,
            kind=OperandKind.TENSOR_LIST,
            count=k,
            batch_axes=batch,
            index_extents=self.out_shape[:k],
        )
        values = Operand("values", Role.INPUT, self.element, (*self.index_shape, *self.out_shape[k:]), batch_axes=batch)
        out = Operand("out", Role.IN_OUT, self.element, self.out_shape)
        return (indices, values, out, *self._status())

    @classmethod
    def fields_from_args(cls, args: Any, **options: Any) -> dict[str, Any]:
        return _fields(
            args.out,
            args.indices[0],
            out_shape=args.out,
            index_shape=args.indices[0],
            num_indices=len(args.indices),
            **options,
        )


def _fields(values: Any, index: Any, **fields: Any) -> dict[str, Any]:
    """Descriptor fields: a tensor stands for its shape, ``(tensor, "dim_field")`` for its extent along that axis."""
    out: dict[str, Any] = {"element": values.dtype, "index_element": index.dtype}
    for name, value in fields.items():
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
            tensor, dim = value
            value = tensor.shape[fields[dim]]
        out[name] = tuple(value.shape) if hasattr(value, "shape") else value
    return out
