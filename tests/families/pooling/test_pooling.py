"""Pooling beside torch's: windows, paddings, layouts, special values; problems of any shape by every kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import H200, places
from hypothesis import given, settings, strategies as st
from proofs import target

import triplan as tp
import triplan.functional as F  # noqa: N812
import triplan.nn
from triplan.backends.triton.pooling import windows
from triplan.testing import check_plan, descriptors

Tensor = torch.Tensor
torchs = torch.nn.functional
OPS = tuple(f"{name}_pool2d{suffix}" for name in ("max", "avg", "adaptive_avg") for suffix in ("", "_backward"))
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the hardware does silently


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


#: (shape of the input, function, options)
CALLS: dict[str, tuple[tuple[int, ...], str, dict[str, Any]]] = {
    "max": ((2, 3, 6, 7), "max_pool2d", {"kernel_size": 2}),
    "max, overlapping": ((2, 3, 7, 8), "max_pool2d", {"kernel_size": 3, "stride": (2, 1), "padding": 1}),
    "max, dilated": ((1, 2, 9, 8), "max_pool2d", {"kernel_size": (2, 3), "stride": 1, "dilation": (3, 2)}),
    "max, ceil": ((1, 2, 8, 6), "max_pool2d", {"kernel_size": 3, "stride": 2, "ceil_mode": True}),
    "max, no batch": ((3, 4, 5), "max_pool2d", {"kernel_size": 2}),
    "max, empty": ((0, 3, 4, 5), "max_pool2d", {"kernel_size": 2}),
    "max, row": ((2, 4, 9), "max_pool1d", {"kernel_size": [3], "stride": 2, "padding": 1}),
    "avg": ((2, 3, 6, 7), "avg_pool2d", {"kernel_size": (2, 3)}),
    "avg, padded": ((2, 3, 7, 8), "avg_pool2d", {"kernel_size": 3, "stride": (2, 1), "padding": 1}),
    "avg, elements": ((2, 3, 7, 8), "avg_pool2d", {"kernel_size": 4, "padding": (2, 1), "count_include_pad": False}),
    "avg, ceil": ((2, 2, 8, 6), "avg_pool2d", {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}),
    "avg, divisor": ((2, 2, 8, 6), "avg_pool2d", {"kernel_size": 3, "divisor_override": -2}),
    "avg, row": ((4, 9), "avg_pool1d", {"kernel_size": 4, "padding": 2, "count_include_pad": False}),
    "adaptive": ((2, 3, 7, 8), "adaptive_avg_pool2d", {"output_size": (3, 5)}),
    "adaptive, larger": ((2, 3, 4, 3), "adaptive_avg_pool2d", {"output_size": (9, None)}),
    "adaptive, global": ((2, 3, 4, 3), "adaptive_avg_pool2d", {"output_size": 1}),
    "adaptive, row": ((2, 3, 7), "adaptive_avg_pool1d", {"output_size": 4}),
}


@pytest.mark.parametrize("layout", ["first", "last", "gaps"])
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_torchs(name: str, layout: str) -> None:
    shape, function, options = CALLS[name]
    x = drawn(*shape)
    if layout == "last":
        x = x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 3 else x
    elif layout == "gaps":
        x = torch.stack((x, x), -1)[..., 1]
    got, expected = (getattr(m, function)(x, **options) for m in (F, torchs))
    torch.testing.assert_close(got, expected, check_stride=x.dim() == 4 and layout != "gaps")
    g = torch.randn_like(expected).requires_grad_()
    first = [torch.autograd.grad(out, x, g, create_graph=True)[0] for out in (got, expected)]
    torch.testing.assert_close(*first)
    torch.testing.assert_close(*(torch.autograd.grad(t, g, torch.ones_like(x))[0] for t in first))
    if function.startswith("max"):
        with_indices = (getattr(m, function)(x, **options, return_indices=True) for m in (F, torchs))
        torch.testing.assert_close(*with_indices)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_special_values(dtype: torch.dtype) -> None:
    """The last NaN, the first of equal elements, and of -inf alone the first."""
    x = torch.tensor([[1.0, 2.0, 2.0, torch.nan, 0.0, torch.nan, 1.0, 3.0], [-torch.inf] * 8], dtype=dtype)[
        None, :, None
    ]
    got, expected = (m.max_pool2d(x, (1, 4), return_indices=True) for m in (F, torchs))
    torch.testing.assert_close(got, expected, equal_nan=True)
    assert got[1].flatten().tolist() == [3, 5, 0, 4]
    means = (m.avg_pool2d(x, (1, 2)) for m in (F, torchs))
    torch.testing.assert_close(*means, equal_nan=True)


@pytest.mark.parametrize(("where", "kernel"), places("windows"))
def test_windows_without_elements(where: str, kernel: str | None) -> None:
    """Dilation may place a window around the image: -inf, and no position, so that no gradient goes anywhere."""
    sizes: dict[str, Any] = {"batch": 1, "channels": 1, "height": 1, "width": 1, "element": "f32"}
    sizes |= {"kernel": (1, 2), "dilation": (1, 3), "padding": (0, 2)}
    device = "cuda" if where == "gpu" else "cpu"
    x, out = torch.ones(1, 1, 1, 1, device=device), torch.empty(1, 1, 1, 2, device=device)
    indices = torch.empty(out.shape, dtype=torch.int64, device=device)
    tp.plan(tp.MaxPool2dDescriptor(**sizes), target=target(where)).run(tp.MaxPool2dArgs(x, out, indices))
    assert out.isneginf().all()
    assert (indices == -1).all()
    tp.plan(tp.MaxPool2dBackwardDescriptor(**sizes), target=target(where)).run(
        tp.MaxPool2dBackwardArgs(torch.ones_like(out), indices, x)
    )
    assert x.item() == 0


def test_registration() -> None:
    x, how = drawn(2, 3, 5, 6), ([2, 3], [2, 1], [1, 1])
    ops = torch.ops.triplan
    out, indices = ops.max_pool2d(x, *how, [1, 1], False)
    g = out.detach().requires_grad_()
    for op, args in (
        (ops.max_pool2d, (x, *how, [1, 1], False)),
        (ops.max_pool2d_backward, (g, indices, [5, 6], *how, [1, 1], False)),
        (ops.avg_pool2d, (x, *how, False, True, 0)),
        (ops.avg_pool2d_backward, (g, [5, 6], *how, False, True, 0)),
        (ops.adaptive_avg_pool2d, (x, [3, 4])),
        (ops.adaptive_avg_pool2d_backward, (drawn(2, 3, 3, 4), [5, 6], [3, 4])),
    ):
        torch.library.opcheck(op.default, args)


MODULES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "MaxPool1d": ((2, 3, 9), {"kernel_size": 3, "stride": 2, "padding": 1, "return_indices": True}),
    "MaxPool2d": ((2, 3, 9, 8), {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}),
    "AvgPool1d": ((2, 3, 9), {"kernel_size": 3, "padding": 1, "count_include_pad": False}),
    "AvgPool2d": ((2, 3, 9, 8), {"kernel_size": 3, "stride": 2, "divisor_override": 5}),
    "AdaptiveAvgPool1d": ((2, 3, 9), {"output_size": 4}),
    "AdaptiveAvgPool2d": ((2, 3, 9, 8), {"output_size": (None, 3)}),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_torchs(name: str) -> None:
    shape, options = MODULES[name]
    ours, theirs = (getattr(m, name)(**options) for m in (triplan.nn, torch.nn))
    torch.testing.assert_close(ours(drawn(*shape)), theirs(drawn(*shape)))
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: F.max_pool2d(x, 2, padding=2), "at most half"),
        (lambda x: F.max_pool2d(x, 9), "no window"),
        (lambda x: F.avg_pool2d(x, 2, divisor_override=0), "not zero"),
        (lambda x: F.avg_pool2d(x, 0), "below 1"),
        (lambda x: F.avg_pool2d(x, (1, 2, 3)), "list of 2"),
        (lambda x: F.adaptive_avg_pool2d(x, -1), "below 0"),
        (lambda x: F.adaptive_avg_pool2d(x, (1, 2, 3)), "2 numbers"),
        (lambda x: F.max_pool2d(x[0, 0], 1), "Expected 3D or 4D"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(drawn(2, 3, 5, 6))
    with pytest.raises(tp.Unsupported, match="only f16"):
        F.max_pool2d(torch.ones(1, 4, 4, dtype=torch.int32), 2)


def test_descriptors_refuse() -> None:
    sizes: dict[str, Any] = {"batch": 1, "channels": 2, "height": 4, "width": 4, "element": "f32"}
    for fields, message in (
        ({"kernel": (2, 2), "padding": (2, 0)}, "at most half"),
        ({"kernel": (5, 2)}, "no window fits"),
        ({"kernel": (1, 1), "height": 0}, "must be positive"),
    ):
        with pytest.raises(tp.InvalidProblem, match=message):
            tp.MaxPool2dDescriptor(**{**sizes, **fields})
    with pytest.raises(tp.Unsupported, match="it counts fewer than"):
        tp.plan(tp.AvgPool2dDescriptor(**{**sizes, "batch": 1 << 28}, kernel=(1, 1)), target=H200)
    # One window of 2**32 elements, by which the gradient is divided.
    side = {"kernel": (1 << 16, 1 << 16), "stride": (1 << 16, 1 << 16), "padding": (1 << 15, 1 << 15)}
    with pytest.raises(tp.Unsupported, match="it counts fewer than"):
        tp.plan(tp.AvgPool2dBackwardDescriptor(**{**sizes, "height": 1, "width": 1}, **side), target=H200)


@pytest.mark.parametrize("element", ["bf16", "f32"])
@pytest.mark.parametrize(("where", "kernel"), places("windows"))
@settings(max_examples=10)
@given(data=st.data())
def test_drawn_shapes_and_layouts(where: str, kernel: str | None, element: str, data: st.DataObject) -> None:
    cls = tp.descriptor_types()[data.draw(st.sampled_from(OPS))]
    desc = data.draw(descriptors(cls, 1 << 11, fixed={"element": element}))
    # Strided indices may have strides of 0, and a position that is repeated lies outside of some of its windows.
    desc = desc.replace(layouts={name: layout for name, layout in desc.layouts if name != "indices"})
    check_plan(tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel)), runs=1)


LAST = tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=8)
GAPS = tp.Layout.strided(unit_axis=1, alignment=8)


#: The tile of many results, by channels and layout: vectors of them, single ones, and neighbouring results.
TILES = {(28, LAST): (32, 4), (60, GAPS): (64, 1), (9, GAPS): (1, 4), (24, tp.Layout()): (1, 4)}
#: Of a gradient of averages alone, which sweeps over the channels of a pixel.
SWEPT = {(37, GAPS): (16, 1), (95, GAPS): (32, 1)}


@pytest.mark.parametrize(("where", "kernel"), places("windows"))
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("channels", "layout"), [*TILES, *SWEPT])
def test_tiles(
    op: str, channels: int, layout: tp.Layout, where: str, kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of channels, the last of which is not full, and of pixels of several images, where few results have one."""
    monkeypatch.setattr(windows, "MANY", 1)
    monkeypatch.setattr(windows, "MANY_PIXELS", 1)
    windows.tile.cache_clear()  # type: ignore[attr-defined]
    sizes: dict[str, Any] = {"batch": 3, "channels": channels, "height": 5, "width": 4, "element": "f32"}
    how = {"out_size": (3, 7)} if "adaptive" in op else {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 0)}
    desc = tp.descriptor_types()[op](**sizes, **how)
    desc = desc.replace(layouts={o.name: layout for o in desc.operands()})
    found = windows.tile(desc)
    assert found.sweeps == ((channels, layout) in SWEPT and "avg" in op and op.endswith("_backward"))
    expected = (SWEPT if found.sweeps else {**TILES, **dict.fromkeys(SWEPT, (1, 4))})[channels, layout]
    assert (found.channels, found.warps, found.last) == (*expected, not layout.packed)
    plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel))
    assert check_plan(plan, runs=1, passes=("unit",)).compared
    windows.tile.cache_clear()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("where", "kernel"), places("windows"))
@pytest.mark.parametrize("written", [LAST, tp.Layout()])
@pytest.mark.parametrize("op", OPS)
def test_tiles_of_operands_that_lie_differently(
    op: str, written: tp.Layout, where: str, kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Channels of some are adjacent and rows of others."""
    monkeypatch.setattr(windows, "MANY", 1)
    windows.tile.cache_clear()  # type: ignore[attr-defined]
    sizes: dict[str, Any] = {"batch": 2, "channels": 24, "height": 5, "width": 7, "element": "f32"}
    how = {"out_size": (3, 4)} if "adaptive" in op else {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 0)}
    desc = tp.descriptor_types()[op](**sizes, **how)
    other = tp.Layout() if written is LAST else LAST
    desc = desc.replace(layouts={o.name: written if o.is_written else other for o in desc.operands()})
    found = windows.tile(desc)
    assert found.crossed
    assert found.pixels > 1 < found.channels
    plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel))
    assert check_plan(plan, runs=1, passes=("unit",)).compared
    windows.tile.cache_clear()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("where", "kernel"), places("windows"))
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (0, 2, 1, 3)])
@pytest.mark.parametrize(
    ("op", "how"),
    [
        ("max_pool2d_backward", {}),
        ("avg_pool2d_backward", {}),
        ("avg_pool2d_backward", {"stride": (2, 4), "ceil_mode": True}),
        ("avg_pool2d_backward", {"stride": (3, 1), "count_include_pad": False}),
        ("avg_pool2d", {"stride": (2, 1)}),
    ],
)
def test_many_windows_of_known_strides(
    op: str, how: dict[str, Any], order: tuple[int, ...], where: str, kernel: str | None
) -> None:
    """Offsets of 32 bits; windows that all contain a pixel, or not; of maxima dout lies otherwise and does not vote."""
    sizes: dict[str, Any] = {"batch": 2, "channels": 6, "height": 7, "width": 9, "element": "f32"}
    sizes |= {"kernel": (6, 4), "padding": (3, 2), "stride": (1, 1)} | how
    desc: Any = tp.descriptor_types()[op](**sizes)
    known = tp.Layout() if order == (0, 1, 2, 3) else tp.Layout.strided(order=order, alignment=16)
    other = LAST if order[-1] == 3 else tp.Layout()
    odd = {"dout"} if op.startswith("max") else set()
    desc = desc.replace(layouts={o.name: other if o.name in odd else known for o in desc.operands()})
    plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel))
    assert not windows.tile(desc).crossed
    written = desc.operands()[-1].name
    strides: Any = windows.image(desc, written)[f"{written}_strides"]
    assert [s is None or s.wide for s in strides] == [axis == order[-1] for axis in range(4)]
    assert check_plan(plan, runs=1).compared


@pytest.mark.parametrize(("where", "kernel"), places("windows"))
@pytest.mark.parametrize("op", OPS)
def test_orders_that_end_with_an_axis_of_one_element(op: str, where: str, kernel: str | None) -> None:
    """The layout's unit axis moves nothing: the one before it is adjacent."""
    how = {"out_size": (1, 2)} if "adaptive" in op else {"kernel": (1, 3), "padding": (0, 1)}
    desc = tp.descriptor_types()[op](batch=2, channels=3, height=1, width=5, element="f32", **how)
    order = tp.Layout.strided(order=(0, 3, 1, 2))
    desc = desc.replace(layouts={o.name: order for o in desc.operands()})
    assert windows.tile(desc).last
    plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel))
    assert check_plan(plan, runs=1).compared


def test_large_images_have_offsets_of_64_bits() -> None:
    """The same problem with a larger image; and the image's own offset always has 64 bits."""
    for side, wide in ((1 << 14, False), (1 << 15, True)):
        desc = tp.AvgPool2dDescriptor(batch=2, channels=1, height=side, width=side, element="f16", kernel=(2, 2))
        strides: Any = windows.image(desc, "x")["x_strides"]
        assert {s.wide for s in strides if s is not None and s.value > 16} == {wide}, side


@pytest.mark.parametrize(("where", "kernel"), places("windows"))
@pytest.mark.parametrize("op", OPS)
def test_order_that_strides_tell_when_running(op: str, where: str, kernel: str | None) -> None:
    """Every other element is an operand's: channels or rows may be what is nearest."""
    sizes: dict[str, Any] = {"batch": 2, "channels": 6, "height": 5, "width": 7, "element": "f32"}
    how = {"out_size": (3, 4)} if "adaptive" in op else {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 0)}
    desc = tp.descriptor_types()[op](**sizes, **how)
    desc = desc.replace(layouts={o.name: tp.Layout.strided(alignment=16, stride_multiple=2) for o in desc.operands()})
    assert windows.tile(desc).last is None
    plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel))
    assert check_plan(plan, runs=1).compared


@pytest.mark.parametrize("channels", [16, 15])
@pytest.mark.parametrize(("where", "kernel"), places("windows"))
def test_results_with_gaps(where: str, kernel: str | None, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of operands whose channels are adjacent, in vectors or not: tiles have several pixels of all channels."""
    for name, value in {"MANY": 1, "WARP_AREA": 16, "CHANNELS": 8}.items():
        monkeypatch.setattr(windows, name, value)
    windows.tile.cache_clear()  # type: ignore[attr-defined]
    sizes: dict[str, Any] = {"batch": 2, "channels": channels, "height": 5, "width": 7, "element": "f32"}
    gaps = tp.Layout.strided(alignment=16, stride_multiple=2)
    beside = LAST if channels == 16 else tp.Layout.strided(alignment=4, unit_axis=1)
    desc = tp.AdaptiveAvgPool2dBackwardDescriptor(**sizes, out_size=(1, 1), layouts={"dout": beside, "dx": gaps})
    plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel))
    assert windows.tile(desc)[:4] == (64, 16, True, 4)
    assert check_plan(plan, runs=1).compared
    windows.tile.cache_clear()  # type: ignore[attr-defined]


def test_channels_that_alone_have_extents_are_adjacent() -> None:
    """A packed result of one pixel lies as one of channels last, whose tile it takes."""
    sizes: dict[str, Any] = {"batch": 4096, "channels": 256, "height": 7, "width": 7, "element": "f16"}
    desc = tp.AdaptiveAvgPool2dDescriptor(**sizes, out_size=(1, 1), layouts={"x": LAST})
    assert windows.tile(desc).channels > 1
