"""One descriptor an op, small enough for any backend, wide enough for the rows kernels; operands on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from triplan import (
    BatchedGemmDescriptor,
    CrossEntropyBackwardDescriptor,
    CrossEntropyDescriptor,
    Descriptor,
    EmbeddingBackwardDescriptor,
    EmbeddingDescriptor,
    GatherBackwardDescriptor,
    GatherDescriptor,
    GemmBackwardDescriptor,
    GemmDescriptor,
    IndexAddDescriptor,
    IndexPutDescriptor,
    IndexSelectBackwardDescriptor,
    IndexSelectDescriptor,
    L2NormBackwardDescriptor,
    L2NormDescriptor,
    LayerNormBackwardDescriptor,
    LayerNormDescriptor,
    LogSoftmaxBackwardDescriptor,
    LogSoftmaxDescriptor,
    NllLossBackwardDescriptor,
    NllLossDescriptor,
    Plan,
    RmsNormBackwardDescriptor,
    RmsNormDescriptor,
    ScaleGradientDescriptor,
    ScatterAddDescriptor,
    ScatterDescriptor,
    SoftmaxBackwardDescriptor,
    SoftmaxDescriptor,
)

SAMPLES: dict[str, Descriptor] = {
    d.op: d
    for d in (
        GatherDescriptor(out_shape=(6, 32), gather_dim=0, src_dim_size=9, element="f32"),
        GatherBackwardDescriptor(out_shape=(6, 32), gather_dim=0, src_dim_size=9, element="f32"),
        IndexSelectDescriptor(out_shape=(6, 32), select_dim=0, src_dim_size=9, element="f32"),
        IndexSelectBackwardDescriptor(out_shape=(6, 32), select_dim=0, src_dim_size=9, element="f32"),
        ScatterAddDescriptor(src_shape=(6, 32), scatter_dim=0, out_dim_size=9, element="f32"),
        ScatterDescriptor(src_shape=(6, 32), scatter_dim=0, out_dim_size=9, element="f32"),
        IndexAddDescriptor(src_shape=(6, 32), add_dim=0, out_dim_size=9, element="f32"),
        IndexPutDescriptor(out_shape=(5, 4, 32), index_shape=(6,), num_indices=1, element="f32"),
        EmbeddingDescriptor(index_shape=(2, 3), num_embeddings=9, embedding_dim=32, element="f32"),
        EmbeddingBackwardDescriptor(index_shape=(2, 3), num_embeddings=9, embedding_dim=32, element="f32"),
        GemmDescriptor(m=5, n=32, k=9, element="f32", epilogue="bias", reads_c0=True, saves_pre=True),
        BatchedGemmDescriptor(batch=3, m=5, n=32, k=9, element="f32", epilogue="bias", reads_c0=True, saves_pre=True),
        GemmBackwardDescriptor(m=5, n=32, k=9, element="f32", wants_dbias=True),
        SoftmaxDescriptor(input_shape=(5, 32), softmax_axis=1, element="f32"),
        SoftmaxBackwardDescriptor(input_shape=(5, 32), softmax_axis=1, element="f32"),
        LogSoftmaxDescriptor(input_shape=(5, 32), softmax_axis=1, element="f32"),
        LogSoftmaxBackwardDescriptor(input_shape=(5, 32), softmax_axis=1, element="f32"),
        RmsNormDescriptor(input_shape=(5, 32), element="f32"),
        RmsNormBackwardDescriptor(input_shape=(5, 32), element="f32"),
        LayerNormDescriptor(input_shape=(5, 32), element="f32"),
        LayerNormBackwardDescriptor(input_shape=(5, 32), element="f32"),
        CrossEntropyDescriptor(
            input_shape=(5, 32), element="f32", reduction="byte_mean", weight=True, label_smoothing=0.1, gradient=True
        ),
        CrossEntropyBackwardDescriptor(input_shape=(5, 32), element="f32", reduction="byte_mean", weight=True),
        NllLossDescriptor(input_shape=(5, 32), element="f32", reduction="byte_mean", weight=True),
        NllLossBackwardDescriptor(input_shape=(5, 32), element="f32", reduction="byte_mean", weight=True),
        ScaleGradientDescriptor(input_shape=(5, 32), element="f32"),
        L2NormDescriptor(input_shape=(5, 32), element="f32"),
        L2NormBackwardDescriptor(input_shape=(5, 32), element="f32"),
    )
}
ACCUMULATING = (
    "gather_backward",
    "index_select_backward",
    "scatter_add",
    "index_add",
    "index_put",
    "embedding_backward",
)


def known(desc: Descriptor, **fields: Any) -> dict[str, Any]:
    """Those of ``fields`` that ``desc`` has."""
    return {name: value for name, value in fields.items() if name in type(desc).model_fields}


#: What the fixture ``constant`` gives: sets ``name`` of a module for one test.
SetConstant = Callable[[Any, str, Any], None]


def make_args(plan: Plan, seed: int = 0) -> object:  # type: ignore[type-arg]
    """Random operands on the GPU, indices in range: small integers, whose sums no order can change."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    values: dict[str, object] = {}
    for o in plan.descriptor.operands():
        if o.kind == "host_scalar":
            values[o.name] = 0.5 if o.element.is_floating_point else 2
            continue
        tensors = []
        for i in range(o.count):
            if o.index_extents:
                t = torch.randint(
                    0, o.index_extents[i], o.shape, generator=generator, device="cuda", dtype=o.element.torch
                )
            else:
                t = torch.randint(-9, 9, o.shape, generator=generator, device="cuda").to(o.element.torch)
            tensors.append(t)
        values[o.name] = tensors if o.kind == "tensor_list" else tensors[0]
    return plan.args_type(**values)


def outputs(plan: Plan, args: object) -> list[torch.Tensor]:  # type: ignore[type-arg]
    return [getattr(args, o.name) for o in plan.descriptor.operands() if o.is_written]


def refill(plan: Plan, args: object, fresh: object) -> None:  # type: ignore[type-arg]
    """Copies the tensors of ``fresh`` into those of ``args``."""
    for o in plan.descriptor.operands():
        new, old = getattr(fresh, o.name), getattr(args, o.name)
        if o.kind == "tensor":
            old.copy_(new)
        elif o.kind == "tensor_list":
            for x, y in zip(old, new, strict=True):
                x.copy_(y)
