"""What ``triplan compile`` says of each launch, so that a program without Triton or triplan can make it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

from triplan import ArchSku, Unsupported
from triplan.backends.runtime.compile import compile_source
from triplan.backends.runtime.launch import (
    TRITON_TYPE,
    Arg,
    Counter,
    Float,
    Int,
    Launch,
    Ptr,
    Scalar,
    Scratch,
    Stride,
    TensorMap,
)
from triplan.backends.runtime.tma_maps import copied, viewed

WARP = 32


def launches(plan: Any) -> list[dict[str, Any]]:
    """The launches of ``plan``, in order; ``kernel`` is a position among its compiled kernels.

    ``arguments`` are the kernel's parameters in order. ``type`` is Triton's (``*`` marks an address); ``from`` says
    where the value comes from: an ``operand`` (its address), the ``stride`` or ``extent`` of its ``axis``, a ``scalar``
    of the call (``default`` if it is not given), the ``workspace`` (its address plus ``offset``), ``value``,
    ``scratch`` (null if it has no bytes), or a ``counter``, an i32 of the device's memory that is 0 at first and that
    only launches write, of one stream. A ``tensor_map`` is the CUtensorMap of the operand, its ``axes`` outermost
    first, with arguments of cuTensorMapEncodeTiled; the L2 promotion is 128 bytes, other enumerations are 0. With
    ``steps`` it has every ``step``-th position of an axis from ``first`` up to ``stop``; so have extents and strides.
    With ``offset`` it is of a tensor of that shape and those strides, so many bytes from the start of the operand, or
    of the workspace if there is no ``operand``.
    """
    sources = list(dict.fromkeys(launch.source() for launch in plan.launches))
    return [_launch(plan, launch, sources.index(launch.source())) for launch in plan.launches]


def _launch(plan: Any, launch: Launch, kernel: int) -> dict[str, Any]:
    arch: ArchSku = plan.target.arch
    metadata = compile_source(launch.source(), arch).metadata
    ranks = {o.name: len(o.shape) for o in plan.descriptor.operands()}
    maps = iter(metadata.tensordesc_meta or ())
    arguments: list[dict[str, Any]] = []
    for name in launch.kernel.arg_names:
        if name not in launch.constexprs:
            arguments += _parameters(name, launch.args[name], ranks, maps)
    for name, size in (("global", metadata.global_scratch_size), ("profile", metadata.profile_scratch_size)):
        # Memory that Triton's own launcher would allocate for each program; null if there is none.
        arguments.append({"name": f"{name} scratch", "type": "*i8", "from": "scratch", "bytes_per_program": size})
    return {
        "kernel": kernel,
        "grid": [launch.grid, 1, 1],
        "block": [WARP * metadata.num_warps, 1, 1],
        "cluster": [metadata.num_ctas, 1, 1],
        "shared_bytes": metadata.shared,
        "overlaps_previous": bool(metadata.launch_pdl),
        "arguments": arguments,
        "constants": {str(name): _plain(value) for name, value in launch.source().constexprs},
    }


def _parameters(name: str, arg: Arg, ranks: dict[str, int], maps: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """The parameters of an argument: none if it is absent, several for a tuple or a tensor map."""
    if isinstance(arg, tuple):
        for i, a in enumerate(arg):
            yield from _parameters(f"{name}[{i}]", a, ranks, maps)
    elif isinstance(arg, TensorMap):
        yield from _tensor_map(name, arg, ranks[arg.operand], next(maps))
    elif isinstance(arg, Ptr):
        item = {} if arg.item is None else {"item": arg.item}
        kind = f"*{TRITON_TYPE[arg.element]}"
        found = {"name": name, "type": kind, "from": "operand", "operand": arg.operand, **item}
        yield {**found, "alignment": arg.alignment}
    elif isinstance(arg, Scratch):
        yield {"name": name, "type": f"*{TRITON_TYPE[arg.element]}", "from": "workspace", "offset": arg.offset}
    elif isinstance(arg, Counter):
        yield {"name": name, "type": "*i32", "from": "counter"}
    elif isinstance(arg, Stride):
        item = {} if arg.item is None else {"item": arg.item}
        yield {"name": name, "type": "i64", "from": "stride", "operand": arg.operand, "axis": arg.axis, **item}
    elif isinstance(arg, Int):
        yield {"name": name, "type": "i64" if arg.wide else "i32", "from": "value", "value": arg.value}
    elif isinstance(arg, Float):
        yield {"name": name, "type": TRITON_TYPE[arg.element], "from": "value", "value": arg.value}
    elif isinstance(arg, Scalar):
        kind = TRITON_TYPE[arg.element]
        yield {"name": name, "type": kind, "from": "scalar", "operand": arg.operand, "default": arg.default}


def _tensor_map(name: str, spec: TensorMap, rank: int, meta: Any) -> Iterator[dict[str, Any]]:
    if meta is None:
        raise Unsupported(f"{name}: without TMA, Triton takes a tensor map apart; the manifest cannot say how")
    found = {"name": name, "type": "tensor_map", "from": "tensor_map"}
    how = {"data_type": TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]}
    how |= {"box": list(meta["block_size"]), "swizzle": meta["swizzle"]}
    of: dict[str, Any] = {"operand": spec.operand}
    start, whole = 0, None if spec.lies is None else torch.empty_strided(*spec.lies, device="meta")
    if spec.copy is not None:
        of, start, whole = {}, spec.copy.offset, copied(spec)
    if whole is not None:
        view = viewed(spec, whole)
        first = start + view.storage_offset() * spec.element.itemsize
        sizes = {"shape": list(view.shape), "strides": list(view.stride())}
        yield {**found, **of, "offset": first, **sizes, **how}
        for kind, type_ in (("shape", "i32"), ("strides", "i64")):
            for i, n in enumerate(sizes[kind]):
                yield {"name": f"{name}.{kind}[{i}]", "type": type_, "from": "value", "value": n}
        return
    axes = list(range(rank))
    if spec.transposed:
        axes[-2:] = axes[:-3:-1]
    steps: list[dict[str, Any]] = [{} for _ in axes]
    if spec.view is not None:
        axes = [axis for axis, *_ in spec.view]
        for i, (_, *part) in enumerate(spec.view):
            given = dict(zip(("first", "stop", "step"), part, strict=True))
            steps[i] = {name: n for name, n in given.items() if n != {"first": 0, "stop": None, "step": 1}[name]}
    yield {**found, **of, "axes": axes, **({"steps": steps} if any(steps) else {}), **how}
    for i, axis in enumerate(axes):
        yield {"name": f"{name}.shape[{i}]", "type": "i32", "from": "extent", **of, "axis": axis, **steps[i]}
    for i, axis in enumerate(axes):
        yield {"name": f"{name}.strides[{i}]", "type": "i64", "from": "stride", **of, "axis": axis, **steps[i]}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
