"""The indexing family as a grid: op x row x element x index element x axis x layout x policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triplan as tp

OPS = (
    "gather",
    "gather_backward",
    "index_select",
    "index_select_backward",
    "scatter_add",
    "scatter",
    *tp.ScatterReduceDescriptor.ops(),
    "index_add",
    "index_put",
    "embedding",
    "embedding_backward",
)
ENTRIES = [(op, entry.name) for op in OPS for entry in tp.TABLE.rows(op) if entry.backend is tp.BackendKind.TRITON]
#: The rows of index_put that store; the others accumulate.
STORING = ("rows", "elements", "ordered_last", "atomic_last")
POLICIES = [(policy, wrap) for policy in ("skip", "clamp", "error") for wrap in (False, True)]
#: Which field names the points, the axis and the extent that indices point into.
FIELDS = {
    "gather": ("out_shape", "gather_dim", "src_dim_size"),
    "gather_backward": ("out_shape", "gather_dim", "src_dim_size"),
    "scatter_add": ("src_shape", "scatter_dim", "out_dim_size"),
    "scatter": ("src_shape", "scatter_dim", "out_dim_size"),
    **dict.fromkeys(tp.ScatterReduceDescriptor.ops(), ("src_shape", "scatter_dim", "out_dim_size")),
    "index_select": ("out_shape", "select_dim", "src_dim_size"),
    "index_select_backward": ("out_shape", "select_dim", "src_dim_size"),
    "index_add": ("src_shape", "add_dim", "out_dim_size"),
}


def build(op: str, shape: tuple[int, ...], axis: int, extent: int, **options: Any) -> tp.Descriptor:
    """A problem of ``op`` whose dense side has ``shape`` (where the op has an axis; else as near as it gets)."""
    cls = tp.descriptor_types()[op]
    if op in FIELDS:
        names = FIELDS[op]
        fields: dict[str, Any] = dict(zip(names, (shape, axis, extent), strict=True))
    elif op == "index_put":
        # `axis` counts the index tensors here, less one.
        fields = {"out_shape": (extent, *shape), "index_shape": shape[:1], "num_indices": min(axis + 1, len(shape))}
    else:
        fields = {"index_shape": shape[:-1], "num_embeddings": extent, "embedding_dim": shape[-1]}
        if op == "embedding_backward" and axis % 2 and extent > 1:
            fields["padding_idx"] = 1
    accumulates = "accumulate" in cls.model_fields
    return cls(op=op, **fields, **{k: v for k, v in options.items() if k != "accumulate" or accumulates})


def accumulate_of(op: str, row: str, turn: int) -> bool:
    """index_put's rows each take one value; the backwards take both, in turns."""
    if op == "index_put":
        return row not in STORING
    return turn % 2 == 0


def elements_of(op: str, row: str) -> list[str]:
    """The elements that a row takes, sorted."""
    return sorted(str(e) for r in tp.TABLE.rows(op) if r.name == row for e in r.elements)


def strided(desc: tp.Descriptor) -> tp.Descriptor:
    """The same problem with no promise about any values' or indices' strides."""
    names = [o.name for o in desc.operands() if o.kind in ("tensor", "tensor_list") and o.name != "status"]
    return desc.replace(layouts=dict.fromkeys(names, "strided"))


def grid(
    op: str, row: str, element: str, shape: tuple[int, ...], extent: int, every_policy: bool
) -> Iterator[tp.Descriptor]:
    """Both index elements and both layouts; axes and policies all crossed, or the first axis and another in turns."""
    axes = range(len(shape)) if op in FIELDS or op == "index_put" else range(2)
    turn = elements_of(op, row).index(element)
    for index_element in ("i32", "i64"):
        for promise in ("packed", "strided"):
            crossed = [(a, p) for a in axes for p in POLICIES]
            in_turns = [(a, POLICIES[(turn + a) % len(POLICIES)]) for a in (0, 1 + turn % (len(axes) - 1))]
            chosen = crossed if every_policy and index_element == "i64" else in_turns
            for axis, (policy, wrap) in chosen:
                turn += 1
                desc = build(
                    op,
                    shape,
                    axis,
                    extent,
                    element=element,
                    index_element=index_element,
                    out_of_bounds=policy,
                    wrap_negative=wrap,
                    accumulate=accumulate_of(op, row, turn),
                )
                yield strided(desc) if promise == "strided" else desc
