"""Convolution: many channels, few, and groups; channels last and first; strides and gaps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import triplan as tp
from matrix import VECTORS, Build, Patterns, compiles, planned

LAST = tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=8)
ORDERED = tp.Layout.strided(order=(0, 2, 3, 1), alignment=16)
EIGHTS = ORDERED.model_copy(update={"stride_multiple": 8})
SIZES: dict[str, Any] = {"batch": 64, "height": 56, "width": 56, "kernel": (3, 3), "padding": (1, 1, 1, 1)}
#: Copies of 16 bytes from memory to shared memory, which run while tiles are multiplied.
COPIES = r"cp\.async\.cg\.shared\.global \[[^\]]+\], \[[^\]]+\], 0x10"


def problems(op: str) -> Iterator[tp.Descriptor]:
    cls: Any = tp.descriptor_types()[op]
    kinds = [{"element": element} for element in ("f16", "bf16", "f32", "f64")]
    for kind in (*kinds, {"element": "f32", "math": "tf32"}):
        few, parted = {"stride": (2, 2), "kernel": (7, 7)}, {"groups": 2, "dilation": (2, 2)}
        for channels, more in ((256, {}), (3, few), (64, parted), (128, {"groups": 128})):
            desc = cls(**kind, in_channels=channels, out_channels=128, **{**SIZES, **more})
            last = {} if channels == 64 else {o.name: LAST for o in desc.operands() if len(o.shape) == 4}
            yield desc.replace(layouts=last)


def boxes(op: str) -> Iterator[tp.Descriptor]:
    """Of every width of tiles: many and few features, few pixels, rows that boxes pass; strides, and a bias.

    Then of narrow blocks, of rows that taps share, and of few features with strides.
    """
    cls: Any = tp.descriptor_types()[op]
    bias = {"has_bias": True} if op == "conv2d" else {}
    few = (32, 128) if op == "conv2d_backward_input" else (128, 32)
    for channels, filters, more in (
        (128, 256, bias),
        (64, 64, {"stride": (2, 2), "height": 55, "width": 55}),
        (256, 256, {"batch": 1}),
        (256, 128, {"batch": 2, "height": 20, "width": 19, **bias}),
        (32, 32, bias),
        (96, 160, {}),
        (64, 64, bias),
        (*few, {"stride": (2, 2)}),
    ):
        desc = cls(element="bf16", in_channels=channels, out_channels=filters, **{**SIZES, **more})
        last = desc.replace(layouts={o.name: LAST for o in desc.operands() if len(o.shape) == 4})
        yield from (last, last.replace(element="f32", math="tf32"))


def of_one_tap(op: str) -> Iterator[tp.Descriptor]:
    """Gradients of weight with strides whose tiles have the channels under one tap, in two, four or eight blocks."""
    if op != "conv2d_backward_weight":
        return
    cls: Any = tp.descriptor_types()[op]
    strided = {"kernel": (5, 5), "padding": (2, 2, 2, 2), "stride": (2, 2)}
    for batch, channels, filters, more in (
        (837, 2048, 64, {**strided, "height": 17, "width": 17}),
        (64, 512, 512, strided),
        (64, 256, 512, {**strided, "kernel": (1, 1), "padding": (0, 0, 0, 0)}),
        (64, 512, 256, {**strided, "kernel": (1, 5), "padding": (0, 0, 2, 2), "width": 54}),
    ):
        sizes = {**SIZES, "batch": batch, "in_channels": channels, "out_channels": filters, **more}
        desc = cls(element="bf16", **sizes)
        last = desc.replace(layouts={o.name: LAST for o in desc.operands() if len(o.shape) == 4})
        yield from (last, last.replace(element="f32", math="tf32"))


def ragged(op: str) -> Iterator[tp.Descriptor]:
    """Channels first, and channels last that are not read in vectors."""
    for desc in islice(boxes(op), 2):
        yield desc.replace(layouts={})
        loose = {name: tp.Layout.strided(unit_axis=1, alignment=4) for name, _ in desc.layouts}
        yield desc.replace(in_channels=127, out_channels=129, layouts=loose)


def pointwise(op: str) -> Iterator[tp.Descriptor]:
    """Channels that are read and written one by one, in words of 4 bytes and in vectors."""
    cls: Any = tp.descriptor_types()[op]
    bias = {"has_bias": True} if op == "conv2d" else {}
    for channels, filters, more in (
        (95, 108, {}),
        (37, 128, bias),
        (129, 27, bias),
        (79, 125, bias),
        (128, 94, {}),
        (16, 7, bias),
        (48, 16, {}),
        (120, 56, bias),
        (128, 128, bias),
        (256, 32, {}) if op == "conv2d" else (32, 256, {}),
    ):
        desc = cls(
            element="bf16",
            in_channels=channels,
            out_channels=filters,
            batch=64,
            height=56,
            width=56,
            kernel=(1, 1),
            **more,
        )
        ordered = EIGHTS if channels % 8 == filters % 8 == 0 else ORDERED
        yield desc.replace(
            layouts={o.name: ordered for o in desc.operands() if o.name != "weight" and len(o.shape) == 4}
        )


def together(op: str) -> Iterator[tp.Descriptor]:
    """Columns that are read together, because the channels of one are no vectors."""
    cls: Any = tp.descriptor_types()[op]
    bare = {**SIZES, "kernel": (1, 1), "padding": (0, 0, 0, 0), "in_channels": 25, "out_channels": 25, "groups": 25}
    images = ("x", "out") if op == "conv2d" else ("dout", "dx")
    for element in ("f16", "f32") if op != "conv2d_backward_weight" else ():
        yield cls(**bare, element=element, layouts=dict.fromkeys(images, ORDERED))


def asks(arch: str, desc: Any, entry: str, name: str) -> Patterns:
    if entry.endswith("wgmma") or entry in ("windowed", "interleaved"):
        turned = desc.op == "conv2d_backward_weight" and desc.math  # wgmma would read pixels side by side
        product = r"mma\.sync" if turned else r"wgmma\.mma_async"
        return ((product, r"cp\.async\.bulk\.tensor") if "wgmma" in name else ()), ()
    if entry == "pointwise":
        product = r"wgmma\.mma_async" if arch == "sm90a" else r"mma\.sync"
        return (product, *([r"cp\.async\.c[ag]"] if desc.operands()[0].layout.stride_multiple == 8 else [])), ()
    if entry == "dots":
        return (r"fma\.rn\.f(32|64)",), (r"mma",)
    if entry == "banded":
        return ((r"mma\.sync", COPIES) if name != "conv2d_fold_kernel" else ()), ()
    if entry == "depthwise" and desc.in_channels in (25, 128) and name != "conv2d_fold_kernel":
        # A thread has four channels, or two.
        return ((VECTORS if desc.element.itemsize == 4 else r"\.v2\.b32",) if desc.element.itemsize <= 4 else ()), ()
    if desc.in_channels != 256 or name in ("conv2d_fold_kernel", "conv2d_copy_kernel"):
        return (), ()
    if entry == "columns":
        mma = r"wgmma\.mma_async" if arch == "sm90a" else r"mma\.sync"
        return ((COPIES, mma) if name == "conv2d_weight_columns_kernel" else ()), ()
    if entry == "small_tiles":  # without stages, nothing is copied ahead; wgmma takes 64 rows
        return ((r"mma\.sync", VECTORS) if desc.element.itemsize == 2 or desc.math else ()), ()
    found = [COPIES]
    if desc.element.itemsize == 2 or desc.math:
        turned = desc.math and desc.op == "conv2d_backward_weight"  # wgmma would read pixels side by side
        found.append(r"wgmma\.mma_async" if arch == "sm90a" and not turned else r"mma\.sync")
    return tuple(found), ()


@compiles("conv2d", "conv2d_backward_input", "conv2d_backward_weight")
def builds(op: str, entry: str, target: tp.Target) -> Iterator[Build]:
    found = {
        "wgmma": chain(boxes(op), of_one_tap(op)),
        "converted_wgmma": ragged(op),
        "pointwise": pointwise(op),
        "depthwise": chain(problems(op), together(op)),
    }
    for build in planned(op, entry, target, found.get(entry, problems(op)), partial(asks, target.arch.value)):
        # With Triton 3.9 registers spill where each channel is a group. ``depthwise`` is for these.
        desc: Any = build.desc
        rare = entry == "tiles" and desc.groups == desc.in_channels
        yield replace(build, may_spill=build.may_spill or rare)
