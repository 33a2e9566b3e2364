"""Softmax and norms as a grid: op x kernel x axis x element x layout x parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from proofs import norms, softmax
from triton.runtime import interpreter

import triplan as tp
from cases import places, repeats
from triplan.testing import args_for, check_plan, oracle

OPS = (*softmax.OPS, *norms.OPS)
#: (op, kernel)
KERNELS = [(op, entry.name) for op in OPS for entry in tp.TABLE.rows(op) if entry.backend is tp.BackendKind.TRITON]
#: Rows of four that a careless formula gets wrong.
SPECIAL = {
    "all -inf": [-float("inf")] * 4,
    "some -inf": [-float("inf"), 1.0, -float("inf"), 2.0],
    "+inf": [1.0, float("inf"), 0.0, -float("inf")],
    "NaN": [1.0, float("nan"), 0.0, 3.0],
    "-inf and NaN": [-float("inf"), float("nan"), -float("inf"), -float("inf")],
    "far": [1e4, 1e4 - 1, -1e4, 0.0],
}
PLACES = places("rows", "looped", "split")


def run(plan: tp.Plan[Any, Any], args: Any) -> None:
    plan.run(args, tp.Workspace.allocate(plan, plan.target.device_type))


def build(op: str, shape: tuple[int, ...], axis: int = -1, element: str = "f32", **options: Any) -> tp.Descriptor:
    """A problem along ``axis`` where the op has one, else along the last."""
    cls = tp.descriptor_types()[op]
    if "softmax" in op:
        options["softmax_axis"] = axis % len(shape)
    return cls(input_shape=shape, element=element, **{k: v for k, v in options.items() if k in cls.model_fields})


def strided(desc: tp.Descriptor) -> tp.Descriptor:
    """The same with no promise about the strides of whole operands."""
    return desc.replace(layouts={o.name: "strided" for o in desc.operands() if o.shape == desc.input_shape})  # type: ignore[attr-defined]


def check(plan: tp.Plan[Any, Any], seed: int = 0) -> int:
    return check_plan(plan, seed=seed, runs=repeats(plan)).compared


PARAMETERS: tuple[dict[str, Any], ...] = (
    {},
    {"weight": False, "bias": False},
    {"bias": False, "weight_offset": 1},
    {"residual": True},
    {"residual": True, "branch_element": "bf16", "branch_gradient": True},
)


def problems(op: str, shapes: tuple[tuple[int, ...], ...], elements: tuple[str, ...]) -> Iterator[tp.Descriptor]:
    """Every axis, element, layout and choice of parameters."""
    for shape in shapes:
        for axis in range(len(shape)) if "softmax" in op else (-1,):
            for element in elements:
                for options in PARAMETERS if op.split("_norm")[0] in ("rms", "layer") else ({},):
                    desc = build(op, shape, axis, element, **options)
                    yield desc
                    yield strided(desc)


def reference(desc: tp.Descriptor, **given: torch.Tensor) -> Any:
    return oracle(desc, args_for(desc, given=given).host())


def reads_within_operands(plan: tp.Plan[Any, Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether an interpreted plan reads no element that is outside of its operands."""
    read: list[Any] = []
    load = interpreter.InterpreterBuilder.create_masked_load

    def spied(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        read.append(ptrs.data[mask.data])
        return load(self, ptrs, mask, *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", spied)
    whole = {
        o.name: torch.ones(o.numel, dtype=o.element.torch).view(o.shape)
        for o in plan.descriptor.operands()
        if o.is_tensor
    }
    run(plan, plan.args_type(**whole))
    inside = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in whole.values()]
    places = np.concatenate([x.ravel() for x in read])
    assert len(places) > 0
    return bool(np.any([(places >= first) & (places < end) for first, end in inside], axis=0).all())
