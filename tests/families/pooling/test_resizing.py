"""Resized images beside torch's: sizes, scales, layouts, special values; problems of any shape by every kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import H200, places
from hypothesis import given, settings, strategies as st
from proofs import target

import triplan as tp
import triplan.functional as F  # noqa: N812
import triplan.nn
from triplan.backends.triton.pooling import pixels, windows
from triplan.testing import check_plan, descriptors

Tensor = torch.Tensor
torchs = torch.nn.functional
OPS = tuple(f"upsample_{name}2d{suffix}" for name in ("nearest", "bilinear") for suffix in ("", "_backward"))
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the hardware does silently


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


#: (shape of the input, options)
SIZES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "larger": ((2, 3, 5, 6), {"size": (17, 7)}),
    "smaller": ((2, 3, 7, 8), {"size": [3, 2]}),
    "both": ((2, 3, 4, 9), {"size": (11, 4)}),
    "twice": ((1, 3, 4, 5), {"scale_factor": 2}),
    "scaled": ((2, 2, 7, 8), {"scale_factor": (1.7, 0.6)}),
    "recomputed": ((2, 2, 7, 8), {"scale_factor": (1.7, 0.6), "recompute_scale_factor": True}),
    "rows": ((2, 3, 4, 5), {"size": (9, 5)}),
    "columns": ((2, 3, 4, 5), {"size": (4, 7)}),
    "same": ((2, 3, 4, 5), {"scale_factor": 1.1}),
    "one": ((2, 3, 4, 5), {"size": 1}),
    "of one": ((2, 3, 1, 1), {"size": (3, 4)}),
    "empty": ((0, 3, 4, 5), {"size": (3, 4)}),
    "row": ((2, 3, 9), {"size": 14}),
    "scaled row": ((2, 3, 9), {"scale_factor": 2.3}),
}
MODES: dict[str, dict[str, Any]] = {
    "nearest": {"mode": "nearest"},
    "exact": {"mode": "nearest-exact"},
    "linear": {"mode": "bilinear"},
    "corners": {"mode": "bilinear", "align_corners": True},
    "area": {"mode": "area"},
}


@pytest.mark.parametrize("layout", ["first", "last", "gaps"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
def test_results_and_gradients_are_torchs(size: str, mode: str, layout: str) -> None:
    shape, options = SIZES[size]
    how = {**MODES[mode], **options}
    if len(shape) == 3 and how["mode"] == "bilinear":
        how["mode"] = "linear"
    x = drawn(*shape)
    if layout == "last":
        x = x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 3 else x
    elif layout == "gaps":
        x = torch.stack((x, x), -1)[..., 1]
    got, expected = (m.interpolate(x, **how) for m in (F, torchs))
    strides = x.dim() == 4 and layout != "gaps" and (size != "of one" or mode != "area")
    torch.testing.assert_close(got, expected, check_stride=strides)
    g = torch.randn_like(expected).requires_grad_()
    first = [torch.autograd.grad(out, x, g, create_graph=True)[0] for out in (got, expected)]
    torch.testing.assert_close(*first)
    torch.testing.assert_close(*(torch.autograd.grad(t, g, torch.ones_like(x))[0] for t in first))


@given(
    n=st.integers(1, 3000), m=st.integers(1, 3000), scale=st.floats(0.01, 100), mode=st.sampled_from(sorted(MODES)[1:])
)
@settings(max_examples=150)
def test_positions_are_torchs(n: int, m: int, scale: float, mode: str) -> None:
    """In f32 the same pixel is copied as torch finds it on a CPU, and positions differ by a rounding at most: torch's
    products and differences are fused where the compiler does so. At the border of two pixels a rounding decides."""
    how = dict(MODES[mode])
    how["mode"] = how["mode"].replace("bilinear", "linear")
    x = torch.arange(float(n)).reshape(1, 1, n)
    decided = torch.ones(m, dtype=torch.bool)
    if mode == "exact":
        at = (torch.arange(m).double() + 0.5) * n / m
        decided = (at - at.round()).abs() > 1e-6 * at
    pair = (f.interpolate(x, m, **how)[0, 0, decided] for f in (F, torchs))
    torch.testing.assert_close(*pair, rtol=3e-7, atol=1e-7)
    if 1 <= int(n * scale) <= 3000 and int(n * scale) != n:
        found = (f.interpolate(x, scale_factor=scale, **how) for f in (F, torchs))
        torch.testing.assert_close(*found, rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize(("where", "kernel"), places("pixels"))
@pytest.mark.parametrize("element", ["f32", "f64"])
@pytest.mark.parametrize("fields", [{}, {"align_corners": True}, {"scale": (0.0, 2.44)}, {"scale": (0.0, 9.0)}])
@pytest.mark.parametrize(("n", "m"), [(1000, 2447), (2447, 1000), (3, 200), (999, 1998)])
def test_positions_of_long_axes(
    n: int, m: int, fields: dict[str, Any], where: str, kernel: str | None, element: str
) -> None:
    """Each gradient finds all that read it where positions are rounded, also at scales that the extents do not have."""
    sizes: dict[str, Any] = {"batch": 1, "channels": 1, "height": 1, "width": n, "out_size": (1, m), "element": element}
    preference = tp.PlanPreference(kernel=kernel)
    for cls in (tp.UpsampleBilinear2dDescriptor, tp.UpsampleBilinear2dBackwardDescriptor):
        plan = tp.plan(cls(**sizes, **fields), target=target(where), preference=preference)
        assert check_plan(plan, runs=1, passes=("unit",)).compared
    if "align_corners" not in fields:
        for exact in (False, True):
            desc = tp.UpsampleNearest2dBackwardDescriptor(**sizes, **fields, exact=exact)
            plan = tp.plan(desc, target=target(where), preference=preference)
            assert check_plan(plan, runs=1, passes=("unit",)).compared


@pytest.mark.parametrize(("where", "kernel"), places("pixels"))
@pytest.mark.parametrize("element", ["f32", "f64"])
@pytest.mark.parametrize("op", OPS)
def test_positions_beyond_32_bits(op: str, element: str, where: str, kernel: str | None) -> None:
    """They are those of the last pixel."""
    sizes: dict[str, Any] = {"batch": 1, "channels": 2, "height": 4, "width": 5, "out_size": (6, 9)}
    desc = tp.descriptor_types()[op](**sizes, element=element, scale=(2.0**-31, 2.0**-30))
    plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel))
    assert check_plan(plan, runs=1, passes=("unit",)).compared


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", MODES)
def test_special_values(dtype: torch.dtype, mode: str) -> None:
    """Infinite and missing pixels reach the results that torch's reach, also by a weight of 0."""
    x = torch.ones(1, 1, 6, 7, dtype=dtype)
    x[0, 0, 0, 0], x[0, 0, 4, 5], x[0, 0, 2, 3], x[0, 0, 3, 1] = torch.inf, -torch.inf, torch.nan, torch.inf
    for size in ((13, 9), (3, 4), (11, 13)):
        torch.testing.assert_close(*(m.interpolate(x, size, **MODES[mode]) for m in (F, torchs)), equal_nan=True)


def test_bytes_are_copied() -> None:
    x = torch.arange(24, dtype=torch.uint8).reshape(1, 2, 3, 4)
    for mode in ("nearest", "nearest-exact"):
        found = (m.interpolate(x, scale_factor=(2.5, 0.7), mode=mode) for m in (F, torchs))
        torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*deprecated")  # torch's own
def test_upsampling_functions() -> None:
    x = drawn(2, 3, 4, 5)
    for name in ("upsample_nearest", "upsample_bilinear"):
        for how in ({"size": (7, 3)}, {"scale_factor": 2}):
            torch.testing.assert_close(*(getattr(m, name)(x, **how) for m in (F, torchs)))


MODULES: dict[str, dict[str, Any]] = {
    "Upsample": {"scale_factor": (1.5, 2.5), "mode": "bilinear", "align_corners": False},
    "UpsamplingNearest2d": {"size": (7, 3)},
    "UpsamplingBilinear2d": {"scale_factor": 2},
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_torchs(name: str) -> None:
    ours, theirs = (getattr(m, name)(**MODULES[name]) for m in (triplan.nn, torch.nn))
    torch.testing.assert_close(ours(drawn(2, 3, 5, 6)), theirs(drawn(2, 3, 5, 6)))
    assert repr(ours) == repr(theirs)


def test_registration() -> None:
    x, g, size, scale = drawn(2, 3, 5, 6), drawn(2, 3, 7, 4), [7, 4], [1.45, 0.0]
    ops = torch.ops.triplan
    for op, args in (
        (ops.upsample_nearest2d, (x, size, scale, False)),
        (ops.upsample_nearest2d_backward, (g, [5, 6], size, scale, True)),
        (ops.upsample_bilinear2d, (x, size, scale, True)),
        (ops.upsample_bilinear2d_backward, (g, [5, 6], size, scale, False)),
    ):
        torch.library.opcheck(op.default, args)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "either size or scale_factor"),
        ({"size": 3, "scale_factor": 2.0}, ValueError, "only one of size"),
        ({"size": 3, "recompute_scale_factor": True}, ValueError, "not meaningful"),
        ({"size": (3, 4, 5)}, ValueError, "one number or 2"),
        ({"size": 3.0}, TypeError, "integers"),
        ({"size": (3, 0)}, RuntimeError, "greater than 0"),
        ({"scale_factor": 0.1}, RuntimeError, "greater than 0"),
        ({"size": 3, "align_corners": True}, ValueError, "align_corners option"),
        ({"size": 3, "mode": "bicubic"}, tp.Unsupported, "mode = 'bicubic' of a 4-d input"),
        ({"size": 3, "mode": "linear"}, tp.Unsupported, "mode = 'linear' of a 4-d input"),
        ({"size": 3, "mode": "bilinear", "antialias": True}, tp.Unsupported, "antialias"),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        F.interpolate(drawn(2, 3, 5, 6), **options)


def test_inputs_are_refused() -> None:
    with pytest.raises(tp.Unsupported, match="5-d input"):
        F.interpolate(drawn(1, 2, 3, 4, 5), 3)
    with pytest.raises(tp.Unsupported, match="only f16, bf16, f32, f64 and, copied, u8"):
        F.interpolate(torch.ones(1, 1, 2, 2, dtype=torch.int32), 3)
    with pytest.raises(tp.Unsupported, match=r"only f16, bf16, f32, f64$"):
        F.interpolate(torch.ones(1, 1, 2, 2, dtype=torch.uint8), 3, mode="bilinear")
    with pytest.raises(RuntimeError, match="Non-empty"):
        F.interpolate(torch.ones(1, 0, 2, 2), 3)


def test_descriptors_refuse() -> None:
    sizes: dict[str, Any] = {"batch": 1, "channels": 2, "height": 4, "width": 4, "element": "f32", "out_size": (4, 9)}
    for fields, message in (({"scale": (0.0, 1e-20)}, "must be 0, or between"), ({"out_size": (0, 3)}, "out_size")):
        with pytest.raises(tp.InvalidProblem, match=message):
            tp.UpsampleNearest2dDescriptor(**{**sizes, **fields})
    for fields, message in (
        ({"batch": 1 << 28}, "it counts fewer than"),
        ({"out_size": (4, 1 << 24)}, "f32 tells apart"),
    ):
        for cls in (tp.UpsampleNearest2dDescriptor, tp.UpsampleBilinear2dBackwardDescriptor):
            with pytest.raises(tp.Unsupported, match=message):
                tp.plan(cls(**{**sizes, **fields}), target=H200)


@pytest.mark.parametrize("element", ["bf16", "f32"])
@pytest.mark.parametrize(("where", "kernel"), places("pixels"))
@settings(max_examples=12)
@given(data=st.data())
def test_drawn_shapes_and_layouts(where: str, kernel: str | None, element: str, data: st.DataObject) -> None:
    cls = tp.descriptor_types()[data.draw(st.sampled_from(OPS))]
    scale = data.draw(st.tuples(*[st.sampled_from([0.0, 0.4, 1.3, 2.0])] * 2))
    desc = data.draw(descriptors(cls, 1 << 11, fixed={"element": element, "scale": scale}))
    check_plan(tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel)), runs=1)


LAST = tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=8)


@pytest.mark.parametrize(("where", "kernel"), places("pixels"))
@pytest.mark.parametrize("op", OPS)
def test_channels_last(op: str, where: str, kernel: str | None) -> None:
    """Tiles of channels, the last of which is not full, and of pixels of several images."""
    desc = tp.descriptor_types()[op](batch=3, channels=24, height=5, width=4, element="f32", out_size=(3, 7))
    desc = desc.replace(layouts={o.name: LAST for o in desc.operands()})
    plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel))
    assert check_plan(plan, runs=1, passes=("unit",)).compared


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A few results are many."""
    for name in ("MANY", "MANY_PIXELS"):
        monkeypatch.setattr(windows, name, 1)
    windows.tile.cache_clear()  # type: ignore[attr-defined]
    yield
    windows.tile.cache_clear()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("where", "kernel"), places("pixels"))
@pytest.mark.parametrize("out_size", [(3, 2), (9, 7), (5, 3)])
@pytest.mark.parametrize(("channels", "across"), [(37, 16), (95, 32)])
@pytest.mark.parametrize("op", [op for op in OPS if op.endswith("_backward")])
def test_programs_go_through_channels(
    op: str, channels: int, across: int, out_size: tuple[int, int], where: str, kernel: str | None, many: None
) -> None:
    """The last channels fill no tile; pixels that none, one or several results read; the last pixels fill none."""
    desc = tp.descriptor_types()[op](batch=3, channels=channels, height=5, width=4, element="f32", out_size=out_size)
    desc = desc.replace(layouts={o.name: tp.Layout.strided(unit_axis=1, alignment=8) for o in desc.operands()})
    found, few = pixels.tile_of(desc), pixels._steps(desc) <= windows.SWEPT_WINDOWS[-1]
    assert (found.channels, found.sweeps) == ((across, True) if few else (1, False))
    plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel))
    assert check_plan(plan, runs=1, passes=("unit",)).compared
