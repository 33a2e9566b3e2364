"""Convolutions beside torch's: paddings, strides, groups, layouts, settings; problems of any shape by every kernel."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from cases import H200, WHERE, pinned, places, required
from hypothesis import given, settings, strategies as st
from proofs import FAMILIES, RUNS, repeated, run, target
from torch.utils.flop_counter import FlopCounterMode

import triplan as tp
import triplan.functional as F  # noqa: N812
import triplan.nn
from triplan.backends.triton.conv import depthwise, pointwise, tile_shapes
from triplan.sku.facts import forget_facts
from triplan.testing import check_plan, descriptors

Tensor = torch.Tensor
torchs = torch.nn.functional
OPS = ("conv2d", "conv2d_backward_input", "conv2d_backward_weight")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the hardware does silently


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


#: (shape of the input, of the weight, options)
CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 6, 7), (4, 3, 3, 2), {}),
    "padded": ((2, 3, 4, 5), (4, 3, 3, 3), {"padding": (2, 1)}),
    "strided": ((2, 3, 8, 7), (4, 3, 3, 2), {"stride": (2, 3), "padding": 1}),
    "dilated": ((1, 2, 9, 8), (3, 2, 3, 2), {"dilation": (2, 3), "stride": 2}),
    "grouped": ((2, 6, 5, 5), (4, 3, 2, 2), {"groups": 2, "stride": [2]}),
    "depthwise": ((2, 3, 5, 5), (6, 1, 3, 3), {"groups": 3, "padding": 1}),
    "same": ((1, 2, 5, 6), (3, 2, 4, 3), {"padding": "same", "dilation": (1, 2)}),
    "valid": ((1, 2, 5, 6), (3, 2, 5, 6), {"padding": "valid"}),
    "points": ((2, 5, 3, 3), (4, 5, 1, 1), {"stride": 2}),
    "no batch": ((3, 4, 5), (2, 3, 2, 2), {}),
    "empty": ((0, 3, 4, 5), (2, 3, 2, 2), {}),
    "row": ((2, 4, 9), (6, 2, 3), {"groups": 2, "stride": 2, "padding": 1}),
    "row, same": ((4, 9), (3, 4, 4), {"padding": "same"}),
}


@pytest.mark.parametrize("layout", ["first", "last", "gaps"])
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_torchs(name: str, layout: str) -> None:
    shape, filters, options = CALLS[name]
    x, w, bias = drawn(*shape), drawn(*filters, seed=1), drawn(filters[0], seed=2)
    if layout == "last":
        x, w = (t.movedim(1, -1).contiguous().movedim(-1, 1) if t.dim() > 3 else t for t in (x, w))
    elif layout == "gaps":
        x, w = (torch.stack((t, t), -1)[..., 1] for t in (x, w))
    ours, theirs = (getattr(m, "conv1d" if len(filters) == 3 else "conv2d") for m in (F, torchs))
    got, expected = ours(x, w, bias, **options), theirs(x, w, bias, **options)
    torch.testing.assert_close(got, expected)
    g = torch.randn_like(expected)
    torch.testing.assert_close(*(torch.autograd.grad(out, (x, w, bias), g) for out in (got, expected)))
    torch.testing.assert_close(ours(x, w, **options), theirs(x, w, **options))


@pytest.mark.parametrize("last", [*itertools.product((False, True), repeat=2)], ids=str)
def test_channels_are_last_where_those_of_a_factor_are(last: tuple[bool, bool]) -> None:
    factors = drawn(2, 3, 5, 6), drawn(4, 3, 2, 2)
    x, w = (
        t.contiguous(memory_format=torch.channels_last) if is_last else t
        for t, is_last in zip(factors, last, strict=True)
    )
    out = F.conv2d(x, w)
    assert out.is_contiguous(memory_format=torch.channels_last) == any(last)
    assert out.is_contiguous() != any(last)
    assert out.stride() == torchs.conv2d(x, w).stride()


def test_registration() -> None:
    x, w, bias, how = drawn(2, 4, 5, 6), drawn(6, 2, 3, 2), drawn(6), ([2, 1], [1, 0, 0, 1], [1, 2], 2)
    ops = torch.ops.triplan
    out = ops.conv2d(x, w, bias, *how).detach().requires_grad_()
    for op, args in (
        (ops.conv2d, (x, w, bias)),
        (ops.conv2d, (x, w, None)),
        (ops.conv2d_backward_input, (out, w, [5, 6])),
        (ops.conv2d_backward_weight, (x, out, [3, 2])),
    ):
        torch.library.opcheck(op.default, (*args, *how))


def test_settings_of_torch() -> None:
    """Autocast converts all; f32 in tf32 is the cards' alone; FLOPs are counted as torch counts them."""
    x, w, bias = (t.detach().float() for t in (drawn(2, 3, 5, 6), drawn(4, 3, 2, 2), drawn(4)))
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = F.conv2d(x, w, bias), torchs.conv2d(x, w, bias)
    assert got.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected)
    counts = []
    for conv2d in (F.conv2d, torchs.conv2d):
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        with FlopCounterMode(display=False) as counter:
            conv2d(*leaves, padding=1).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("name", ["Conv1d", "Conv2d"])
def test_modules_load_torchs_parameters(name: str) -> None:
    options: dict[str, Any] = {"stride": 2, "padding": 1, "dilation": 2, "groups": 2, "dtype": torch.float64}
    ours, theirs = (getattr(m, name)(4, 6, 3, **options) for m in (triplan.nn, torch.nn))
    ours.load_state_dict(theirs.state_dict())
    x = drawn(2, 4, *(7,) * int(name[4]))
    torch.testing.assert_close(ours(x), theirs(x))
    assert repr(ours) == repr(theirs)
    with pytest.raises(tp.Unsupported, match=r"padding_mode = 'circular'.*only zeros"):
        getattr(triplan.nn, name)(4, 6, 3, padding_mode="circular", dtype=torch.float64)(x)


X, W = torch.zeros(1, 4, 5, 5), torch.zeros(6, 2, 3, 3)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "channels": ({"groups": 1}, RuntimeError, "to have 2 channels, but got 4"),
    "filters": ({"groups": 4}, RuntimeError, "given groups=4"),
    "no groups": ({"groups": 0}, RuntimeError, "given groups=0"),
    "rank": ({"input": X[0, 0]}, RuntimeError, "3D .unbatched. or 4D .batched. input"),
    "bias": ({"bias": torch.zeros(2)}, RuntimeError, r"bias is \[2\]; \[6\] is expected"),
    "dtypes": ({"weight": W.double()}, RuntimeError, "one dtype is expected"),
    "integers": ({"input": X.int(), "weight": W.int()}, tp.Unsupported, "torch.int32 is not supported"),
    "kernel": ({"dilation": 3}, RuntimeError, "padded input size per channel: 5; the kernel reaches over 7"),
    "stride": ({"stride": 0}, RuntimeError, r"stride \(0, 0\) is below 1"),
    "padding": ({"padding": -1}, RuntimeError, r"padding \(-1, .* is below 0"),
    "numbers": ({"stride": (1, 2, 3)}, RuntimeError, "a list of 2 values, but got stride="),
    "name of a padding": ({"padding": "full"}, RuntimeError, "'same' and 'valid' are known"),
    "same": ({"padding": "same", "stride": 2}, RuntimeError, "not supported for strided"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    given, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        F.conv2d(**{"input": X, "weight": W, "groups": 2, **given})


FIELDS: dict[str, Any] = {"batch": 2, "in_channels": 4, "height": 5, "width": 5, "out_channels": 6, "kernel": (3, 3)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groups": 3}, "groups = 3: must divide in_channels = 4"),
        ({"dilation": (1, 3)}, "reaches over 7 of 5 padded elements of width"),
        ({"math": "tf32x3"}, "must be None, or tf32 for f32"),
    ],
)
def test_descriptors_that_contradict_themselves(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(tp.InvalidProblem, match=message):
        tp.Conv2dDescriptor(**{**FIELDS, "element": "f32", **fields})


@pytest.mark.parametrize(("taps", "last"), [(4, False), (1, True)])
def test_depthwise_refuses_rows_of_more_lanes_than_it_counts(taps: int, last: bool) -> None:
    """A row has a lane for each element of channels first, and of channels last under one tap."""
    most = 2048
    sizes: dict[str, Any] = {"batch": 1, "height": 1, "width": 1 << 20, "kernel": (1, taps)}
    for op, channels in itertools.product(OPS[:2], (most, most + 8)):
        own = {"in_channels": channels, "out_channels": channels, "groups": channels}
        desc: Any = tp.descriptor_types()[op](**sizes, **own, padding=(0, 0, taps - 1, 0), element="f16")
        images = [o.name for o in desc.operands() if o.name != "weight"]
        desc = desc.replace(layouts=dict.fromkeys(images, LAST if last else tp.Layout()))
        assert bool(depthwise.supports(desc, H200)) is (channels == most)


def test_an_image_has_the_same_bits_in_every_batch() -> None:
    """Of any size; the gradient of weight, a sum over images, has parts of a fixed number of pixels."""
    big = {**FIELDS, "in_channels": 256, "out_channels": 64, "height": 56, "width": 56, "element": "bf16"}
    for op in OPS[:2]:
        of = (tp.descriptor_types()[op](**{**big, "batch": n}) for n in (1, 7, 512))
        skus = [tp.plan(desc, target=H200, batch_invariant=True).sku() for desc in of]
        assert len({(sku.kernel, sku.numerics_id) for sku in skus}) == 1
    plan = tp.plan(tp.Conv2dBackwardWeightDescriptor(**{**big, "batch": 64}), target=H200, kernel="tiles")
    assert plan.precision_guarantee().deterministic
    parts, rest = divmod(plan.workspace_size(), 4 * 256 * 64 * 9)
    assert parts > 1
    assert rest == 0
    with pytest.raises(tp.Unsupported, match="it counts fewer than"):
        tp.plan(tp.Conv2dDescriptor(**{**big, "batch": 1 << 20}), target=H200)


@pytest.mark.parametrize("op", OPS)
def test_empty_operands_are_planned(op: str) -> None:
    """Whatever is empty, each entry supports it or says why not."""
    full = {"batch": 2, "in_channels": 8, "out_channels": 8, "height": 5, "width": 4, "padding": (1, 1, 1, 1)}
    for name, stride, groups in itertools.product(full, ((1, 1), (2, 1), (2, 2)), (1, 8)):
        fields = {**full, name: (0, 1, 1, 1) if name == "padding" else 0, "stride": stride, "groups": groups}
        if groups > 1 and name.endswith("channels"):
            continue
        desc = tp.descriptor_types()[op](**fields, kernel=(2, 2), element="bf16")
        last = desc.replace(layouts={o.name: LAST for o in desc.operands() if len(o.shape) == 4})
        for each, arch in itertools.product((desc, last), (H200, tp.Target.preset("a100"))):
            assert tp.plan(each, target=arch).workspace_size() >= 0
        tf32 = desc.replace(element="f32", math="tf32")
        for kernel in [c.kernel for c in tp.plan(tf32, target=H200).candidates if c.cost_us is not None]:
            plan: tp.Plan[Any, Any] = tp.plan(tf32, target=H200, kernel=kernel)
            assert all(launch.grid > 0 for launch in plan.launches), kernel


@pytest.mark.parametrize("element", ["bf16", "f32"])
@pytest.mark.parametrize(("where", "kernel"), places("tiles", "small_tiles", "depthwise", "converted", "dots"))
@settings(max_examples=6)
@given(data=st.data())
def test_drawn_shapes_and_layouts(where: str, kernel: str | None, element: str, data: st.DataObject) -> None:
    cls = tp.descriptor_types()[data.draw(st.sampled_from(OPS[2:] if kernel == "dots" else OPS))]
    fixed: dict[str, Any] = {"element": element}
    if kernel == "depthwise":
        fixed |= {"in_channels": 5, "out_channels": 5, "groups": 5}
    if kernel == "converted":  # channels first
        fixed |= {
            "in_channels": 6,
            "out_channels": 4,
            "height": 5,
            "width": 4,
            "kernel": (2, 2),
            "layouts": {},
            "batch": 2,
        }
    desc = data.draw(descriptors(cls, 1 << 11, fixed=fixed))
    check_plan(tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel)), runs=1)


@pytest.mark.interpret
@pytest.mark.parametrize("op", OPS)
def test_several_tiles_and_parts(op: str) -> None:
    """More pixels, filters and channels than a tile has; so many pixels that the gradient of weight has parts."""
    fields = {**FIELDS, "kernel": (2, 1), "in_channels": 80, "out_channels": 72, "batch": 1, "padding": (1, 0, 0, 0)}
    if op == "conv2d_backward_weight":
        fields |= {"in_channels": 20, "out_channels": 5, "height": 40, "width": 30, "stride": (1, 2)}
    deep = {**fields, "groups": 80, "in_channels": 80, "out_channels": 80, "height": 90, "width": 50, "stride": (2, 1)}
    for kernel, each in {"tiles": fields, "small_tiles": fields, "converted": fields, "depthwise": deep}.items():
        desc = tp.descriptor_types()[op](**each, element="f32")
        plan = tp.plan(desc, target=target("interpret"), kernel=kernel)
        assert (plan.workspace_size() > 0) == (op == "conv2d_backward_weight" or kernel == "converted")
        assert check_plan(plan, runs=1, passes=("unit",)).compared


@pytest.mark.parametrize(("where", "kernel"), places("dots"))
@pytest.mark.parametrize("element", ["bf16", "f64"])
def test_sums_of_few_pairs(where: str, kernel: str | None, element: str) -> None:
    """One launch: several steps of pixels, the last of which is shorter, and a last program of fewer pairs."""
    fields = {"batch": 2, "in_channels": 6, "out_channels": 40, "groups": 2, "height": 25, "width": 24}
    more = {"kernel": (3, 2), "stride": (1, 2), "dilation": (2, 1), "padding": (1, 2, 0, 1)}
    desc = tp.Conv2dBackwardWeightDescriptor(**fields, **more, element=element)
    plan = tp.plan(desc, target=target(where), kernel=kernel)
    if kernel is not None:
        (launch,) = plan.launches
        pairs, pixels = launch.constexprs["TERMS"], launch.constexprs["PIXELS"]
        assert pixels < 2 * 24 * 13
        assert 2 * 24 * 13 % pixels
        assert (launch.grid, plan.workspace_size()) == (40 * -(-18 // pairs), 0)
    assert check_plan(plan, runs=1, passes=("unit",)).compared


@pytest.mark.interpret
@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize("sizes", [(37, 20), (128, 133), (150, 20), (5, 3)], ids=str)
def test_pixels_in_one_piece(sizes: tuple[int, int], element: str, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that begin anywhere, several tiles of a program, the last of which is shorter, and of features."""
    monkeypatch.setattr(pointwise, "_each", lambda *_: each)
    fields = {"batch": 3, "height": 9, "width": 7, "in_channels": sizes[0], "out_channels": sizes[1], "kernel": (1, 1)}
    for op, (cls, more) in {
        "x": (tp.Conv2dDescriptor, {"has_bias": True}),
        "dout": (tp.Conv2dBackwardInputDescriptor, {"in_channels": sizes[1], "out_channels": sizes[0]}),
    }.items():
        desc: Any = cls(**{**fields, **more}, element=element)
        images = [o.name for o in desc.operands() if len(o.shape) == 4 and o.name != "weight"]
        weight = tp.Layout.strided(unit_axis=1) if op == "x" else tp.Layout()
        ordered = tp.Layout.strided(order=(0, 2, 3, 1))
        desc = desc.replace(layouts={**dict.fromkeys(images, ordered), "weight": weight})
        plan = tp.plan(desc, target=target("interpret"), kernel="pointwise")
        assert check_plan(plan, runs=1, passes=("unit",)).compared


def test_what_lies_in_one_piece_is_not_copied() -> None:
    """Gaps between pixels and many channels are left to other kernels; of what TMA can map, what these do faster."""
    ordered = tp.Layout.strided(order=(0, 2, 3, 1), alignment=16)
    eights = tp.Layout.strided(order=(0, 2, 3, 1), alignment=16, stride_multiple=8)
    many = {"batch": 256, "height": 19, "width": 19, "kernel": (1, 1), "element": "f16"}
    desc = tp.Conv2dDescriptor(**many, in_channels=95, out_channels=108, layouts={"x": ordered, "out": ordered})
    for arch in (H200, tp.Target.preset("a100")):
        assert tp.plan(desc, target=arch).sku().kernel == "pointwise"
    mapped = desc.replace(layouts={"x": eights, "out": eights})
    for channels, features, chosen in ((16, 96, "pointwise"), (88, 88, "pointwise"), (192, 32, "wgmma")):
        plan = tp.plan(mapped.replace(in_channels=channels, out_channels=features), target=H200)
        assert plan.sku().kernel == chosen
    for other, reason in (
        (desc.replace(layouts={"x": ordered, "out": LAST}), "without gaps"),
        (desc.replace(layouts={}), "without gaps"),
        (desc.replace(in_channels=129), "129 channels to sum; it takes 1 to 128"),
        (desc.replace(in_channels=257, out_channels=20), "257 channels to sum; it takes 1 to 256"),
        (desc.replace(in_channels=1, out_channels=2**25), "32 bits"),
        (desc.replace(stride=(2, 2)), "one tap"),
    ):
        with pytest.raises(tp.Unsupported, match=reason):
            tp.plan(other, target=H200, kernel="pointwise")


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("sizes", [(16, 96), (88, 88), (64, 48), (112, 672), (256, 32)], ids=str)
def test_programs_of_pixels_in_one_piece_are_whole_waves(sizes: tuple[int, int], vectors: bool) -> None:
    """Programs have as few tiles as fill no more waves than are needed with the most tiles."""
    layout = tp.Layout.strided(order=(0, 2, 3, 1), **({"alignment": 16, "stride_multiple": 8} if vectors else {}))
    shape = {"height": 28, "width": 28, "kernel": (1, 1), "element": "f16", "layouts": {"x": layout, "out": layout}}
    for batch in (1, 7, 128, 1000):
        desc = tp.Conv2dDescriptor(batch=batch, in_channels=sizes[0], out_channels=sizes[1], **shape)
        if not pointwise.supports(desc, H200):
            continue
        slots, each = pointwise._held(desc) * H200.sm_count, pointwise._each(desc, H200)
        high, wide = pointwise._tiles(desc)
        waves = -(-high * wide // (slots * pointwise.MOST_TILES))
        assert each <= pointwise.MOST_TILES
        assert pointwise._programs(desc, H200) <= waves * slots
        assert each == 1 or -(-high // (each - 1)) * wide > waves * slots


#: Depthwise problems of which a thread has several rows and columns, and a program several tiles: channels, height and
#: width, then what a convolution has besides.
GROUPED: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "vectors": ((16, 9, 12), {"kernel": (3, 3), "padding": (1, 1, 1, 1)}),
    "strided": ((5, 19, 22), {"kernel": (3, 3), "padding": (1, 1, 1, 1), "stride": (2, 2)}),
    "unequal": ((3, 23, 26), {"kernel": (3, 5), "padding": (1, 2, 0, 3), "stride": (2, 3), "dilation": (2, 1)}),
    "dilated": ((4, 9, 14), {"kernel": (2, 3), "padding": (1, 1, 2, 2), "dilation": (1, 2)}),
    "tall": ((3, 15, 16), {"kernel": (1, 8), "padding": (0, 0, 3, 4)}),  # taps in two tiles
}


@pytest.mark.interpret
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", GROUPED)
def test_depthwise_rows_and_columns_of_a_thread(name: str, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("BUSY_TILES", "MANY_PROGRAMS", "RESIDENT"):
        monkeypatch.setattr(depthwise, limit, 1)
    (channels, height, width), options = GROUPED[name]
    fields = {"batch": 2, "in_channels": channels, "out_channels": channels, "groups": channels, **options}
    desc = tp.descriptor_types()[op](element="f32", height=height, width=width, **fields)
    last = tp.Layout.strided(unit_axis=1, alignment=4 if channels % 4 else 16, stride_multiple=1 if channels % 4 else 4)
    desc = desc.replace(layouts={o.name: last for o in desc.operands() if o.shape[1] == channels})
    plan = tp.plan(desc, target=target("interpret"), kernel="depthwise")
    assert plan.launches[0].constexprs["LINES"] * plan.launches[0].constexprs["ACROSS"] > 1
    assert check_plan(plan, runs=1).compared


@pytest.mark.parametrize(("where", "kernel"), places("depthwise"))
@pytest.mark.parametrize("element", ["f16", "f64"])
@pytest.mark.parametrize("op", OPS[:2])
def test_depthwise_columns_that_are_one_under_one_tap(op: str, element: str, where: str, kernel: str | None) -> None:
    """Columns without gaps, whose channels together are vectors; 7 columns are not divided into such."""
    fields = {"batch": 2, "in_channels": 5, "out_channels": 5, "groups": 5, "kernel": (1, 1), "height": 3}
    more = {"has_bias": True} if op == "conv2d" else {}
    last = tp.Layout.strided(order=(0, 2, 3, 1), alignment=16)
    for width, together in ((12, 4 if element == "f16" else 2), (7, 1)):
        desc: Any = tp.descriptor_types()[op](element=element, width=width, **fields, **more)
        images = [o.name for o in desc.operands() if len(o.shape) == 4 and o.name != "weight"]
        desc = desc.replace(layouts=dict.fromkeys(images, last))
        plan = required(desc, kernel or "reference", target(where))
        if kernel:
            channels: Any = plan.launches[0].args["channels"]
            assert channels.value == 5 * together
        assert check_plan(plan, runs=1, passes=("unit",)).compared


@pytest.mark.interpret
@pytest.mark.parametrize(("batch", "results", "lines"), [(3, 64, 15), (5, 8, 3)])
def test_depthwise_rows_of_all_images_under_one_tap(
    batch: int, results: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images that follow each other without gaps have the rows of one: of 15 none is left, and one of 25."""
    monkeypatch.setattr(depthwise, "MOST_RESULTS", results)
    monkeypatch.setattr(depthwise, "RESIDENT", 1)
    fields = {"batch": batch, "in_channels": 3, "out_channels": 3, "groups": 3, "kernel": (1, 1)}
    desc = tp.Conv2dBackwardWeightDescriptor(element="f32", height=5, width=7, **fields)
    last = tp.Layout.strided(order=(0, 2, 3, 1))
    desc = desc.replace(layouts={"x": last, "dout": last})
    plan = tp.plan(desc, target=target("interpret"), kernel="depthwise")
    assert plan.launches[0].constexprs["LINES"] == lines
    assert check_plan(plan, runs=1).compared


@pytest.mark.parametrize(("where", "kernel"), places("depthwise"))
@pytest.mark.parametrize(("width", "layout"), [(7, tp.Layout.strided(order=(0, 2, 3, 1))), (1, tp.Layout())], ids=str)
def test_depthwise_images_of_one_row_under_one_tap(
    width: int, layout: tp.Layout, where: str, kernel: str | None
) -> None:
    """The stride of the only row of an image is not the step from image to image. It may be any number, as of this
    seed it is."""
    fields = {"batch": 3, "in_channels": 6, "out_channels": 6, "groups": 6, "kernel": (1, 1), "element": "f32"}
    desc = tp.Conv2dBackwardWeightDescriptor(height=1, width=width, layouts={"x": layout, "dout": layout}, **fields)
    plan = required(desc, kernel or "reference", target(where))
    assert check_plan(plan, runs=1, passes=("unit",), seed=1).compared


#: What the taps of a row read: with gaps, beyond both ends, of many and of no columns.
UNFOLDED: dict[str, dict[str, Any]] = {
    "strides": {"kernel": (3, 2), "stride": (2, 2), "padding": (1, 1, 2, 0), "dilation": (1, 2), "width": 11},
    "parts": {"kernel": (3, 3), "padding": (1, 1, 1, 1), "height": 17, "width": 9, "out_channels": 33},
    "one column": {"kernel": (2, 5), "width": 1, "padding": (0, 1, 2, 2)},
    "groups": {"kernel": (2, 3), "stride": (1, 2), "width": 9, "in_channels": 9, "out_channels": 51, "groups": 3},
}


@pytest.mark.parametrize(("where", "kernel"), places("columns"))
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("case", UNFOLDED)
def test_columns_side_by_side(case: str, last: bool, where: str, kernel: str | None) -> None:
    fields = {**FIELDS, "in_channels": 5, **UNFOLDED[case]}
    desc = tp.Conv2dBackwardWeightDescriptor(**fields, element="f32", math="tf32")
    if last:
        loose = tp.Layout.strided(unit_axis=1, alignment=4)
        desc = desc.replace(layouts={o.name: loose for o in desc.operands()})
    assert check_plan(required(desc, kernel or "reference", target(where)), runs=1, passes=("unit",)).compared


@pytest.mark.parametrize(("where", "kernel"), places("columns", "tiles", "converted"))
@pytest.mark.parametrize("groups", [1, 2])
def test_infinite_pixels_reach_only_the_taps_that_read_them(where: str, kernel: str | None, groups: int) -> None:
    """The first tap of a row does not read the last column: 0 times its infinities would be NaN."""
    fields = {"batch": 1, "in_channels": 8, "out_channels": 8, "height": 3, "width": 5, "kernel": (2, 2)}
    desc = tp.Conv2dBackwardWeightDescriptor(**fields, groups=groups, element="f32", math="tf32")
    x = torch.ones(1, 8, 3, 5)
    x[..., 4] = torch.inf
    found = run(required(desc, kernel or "reference", target(where)), {"x": x, "dout": torch.ones(1, 8, 2, 4)})
    expected = torch.full((8, 8 // groups, 2, 2), 8.0)
    expected[..., 1] = torch.inf
    assert torch.equal(found["dweight"], expected)


@pytest.mark.parametrize(("where", "kernel"), places("tiles", "converted"))
@pytest.mark.parametrize("op", OPS)
def test_no_images(op: str, where: str, kernel: str | None) -> None:
    """The gradient of weight is 0; nothing is left to copy."""
    desc = tp.descriptor_types()[op](**{**FIELDS, "batch": 0}, element="f32")
    plan = pinned(desc, kernel or "reference", target(where))
    assert (plan is None) == (kernel == "converted" and op == "conv2d_backward_weight")
    if plan is not None:
        check_plan(plan, runs=1, passes=("unit",))


@pytest.mark.interpret
@pytest.mark.parametrize("stride", [(2, 2), (3, 2), (1, 4)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 3)])
def test_rows_and_columns_that_strides_skip(stride: tuple[int, int], dilation: tuple[int, int]) -> None:
    """Taps and strides with and without common divisors, more strides than taps, classes without pixels or taps."""
    fields = {
        **FIELDS,
        "out_channels": 32,
        "groups": 2,
        "padding": (1, 0, 2, 1),
        "dilation": dilation,
        "stride": stride,
    }
    for kernel, (height, width) in (((3, 2), (9, 7)), ((1, 1), (2, 3)), ((2, 4), (8, 13))):
        sizes = {"kernel": kernel, "height": height, "width": width}
        desc = tp.Conv2dBackwardInputDescriptor(**{**fields, **sizes}, element="f32")
        for name in ("tiles", "small_tiles"):
            plan = tp.plan(desc, target=target("interpret"), kernel=name)
            assert check_plan(plan, runs=1, passes=("unit",)).compared


@pytest.mark.parametrize(("where", "kernel"), places("tiles", "small_tiles", "depthwise"))
@pytest.mark.parametrize("groups", [1, 32])
def test_infinite_weights_reach_only_their_pixels(where: str, kernel: str | None, groups: int) -> None:
    """Each pixel of dx meets one tap: 0 times another, infinite one would be NaN."""
    fields = {"batch": 1, "in_channels": 32, "out_channels": 32, "height": 4, "width": 6, "kernel": (2, 3)}
    desc = tp.Conv2dBackwardInputDescriptor(**fields, stride=(2, 3), groups=groups, element="f32")
    plan = pinned(desc, kernel or "reference", target(where))
    assert (plan is None) == (kernel == "depthwise" and groups == 1)
    if plan is not None:
        weight = torch.ones(32, 32 // groups, 2, 3)
        weight[:, :, 1, 2] = torch.inf
        dx = run(plan, {"dout": torch.ones(1, 32, 2, 2), "weight": weight})["dx"]
        expected = torch.full((1, 32, 4, 6), 32.0 / groups)
        expected[:, :, 1::2, 2::3] = torch.inf
        assert torch.equal(dx, expected)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("op", OPS)
def test_copies_change_no_bits(op: str, where: str) -> None:
    """Kernels of one numerics_id."""
    for element in (tp.ElementKind.F32, tp.ElementKind.BF16):
        problem = FAMILIES[op].make(80, element, "cancelling")
        plans = [tp.plan(problem.desc, target=target(where), kernel=kernel) for kernel in ("tiles", "converted")]
        assert len({plan.sku().numerics_id for plan in plans}) == 1
        (name, first), (_, second) = (next(iter(run(plan, problem.values).items())) for plan in plans)
        assert torch.equal(first, second), name


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("op", ["conv2d", "conv2d_backward_input"])
@pytest.mark.parametrize("element", ["f32", "f64"])
def test_pixels_of_a_tile_change_no_bits(element: str, op: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few images have tiles of fewer pixels; of FMAs where the weights' features are adjacent."""
    sizes: dict[str, Any] = {"height": 6, "width": 6, "in_channels": 40, "out_channels": 48}
    desc: Any = tp.descriptor_types()[op](**{**FIELDS, **sizes, "batch": 3}, element=element)
    few = tp.plan(desc, target=target(where), kernel="converted")
    dtype = getattr(torch, {"f32": "float32", "f64": "float64"}[element])
    values = {o.name: torch.randn(o.shape, dtype=dtype) for o in desc.operands() if not o.is_written}
    first = run(few, values)
    monkeypatch.setitem(tile_shapes.FEW_SUMS, desc.multiplicands, tile_shapes.FEW_WARPS)
    forget_facts()
    many = tp.plan(desc, target=target(where), kernel="converted")
    forget_facts()
    blocks = [next(x.constexprs["BLOCK_M"] for x in p.launches if "BLOCK_M" in x.constexprs) for p in (few, many)]
    assert blocks == [16, 64]
    assert few.sku().numerics_id == many.sku().numerics_id
    for name, found in run(many, values).items():
        assert torch.equal(found, first[name]), name


@pytest.mark.parametrize(("op", "weight"), [("conv2d", "weight"), ("conv2d_backward_weight", "dweight")])
def test_one_filter_whose_order_is_promised(op: str, weight: str) -> None:
    """The order of its weight leaves out the axis of filters; the problem of the copies has eight of them."""
    fields = {**FIELDS, "in_channels": 32, "out_channels": 1, "kernel": (1, 5), "element": "bf16"}
    desc = tp.descriptor_types()[op](**fields, layouts={weight: LAST.replace(order=(3, 1)), "x": LAST})
    assert tp.plan(desc, target=H200, kernel="converted_wgmma").sku().kernel == "converted_wgmma"


def test_what_copies_for_a_gradient_of_weight_promise() -> None:
    """As much as channels last that are not promised to be without gaps: the sums have the same pieces."""
    fields = {"batch": 32, "height": 9, "width": 9, "in_channels": 256, "out_channels": 256, "kernel": (1, 1)}
    desc = tp.Conv2dBackwardWeightDescriptor(**fields, element="f16")
    rows = tp.Layout.strided(order=(0, 2, 3, 1), stride_multiple=8)  # of a matrix, but not aligned for TMA
    plans = [
        tp.plan(desc.replace(layouts=dict.fromkeys(("x", "dout"), layout)), target=H200, kernel=kernel)
        for layout, kernel in ((rows, "converted_wgmma"), (LAST, "wgmma"))
    ]
    for name in ("shares", "lanes", "boxes"):
        assert plans[0].launches[-1].args[name] == plans[1].launches[-1].args[name]
    assert plans[0].precision_guarantee("dweight") == plans[1].precision_guarantee("dweight")


def test_what_is_selected() -> None:
    """Depthwise and small problems have kernels of their own; channels first are copied where that pays."""
    big = {**FIELDS, "batch": 64, "in_channels": 256, "out_channels": 256, "height": 56, "width": 56}
    deep = {**big, "groups": 256}
    for op in OPS:
        cls = tp.descriptor_types()[op]
        few = "dots" if op == "conv2d_backward_weight" else "small_tiles"
        for fields, wanted in ((big, "converted"), (deep, "depthwise"), (FIELDS, few)):
            assert tp.plan(cls(**fields, element="bf16"), target="a100").sku().kernel == wanted
        assert tp.plan(cls(**big, element="bf16"), target=H200).sku().kernel == "converted_wgmma"
        desc = cls(**big, element="bf16")
        last = desc.replace(layouts={o.name: LAST for o in desc.operands() if len(o.shape) == 4})
        assert tp.plan(last, target=H200).sku().kernel == "wgmma"
        assert tp.plan(last, target="a100").sku().kernel == "tiles"
        grouped = "tiles" if op == "conv2d_backward_weight" else "wgmma"
        assert tp.plan(last.replace(groups=4), target=H200).sku().kernel == grouped
        rgb = last.replace(in_channels=3, kernel=(7, 7), stride=(2, 2), padding=(3, 3, 3, 3))
        first = rgb.replace(layouts={name: layout for name, layout in rgb.layouts if "out" in name})
        for desc in (rgb, first):
            wanted = "interleaved" if op == "conv2d_backward_input" else "windowed"
            assert tp.plan(desc, target=H200).sku().kernel == wanted


def test_what_the_hopper_kernel_refuses() -> None:
    big = {**FIELDS, "batch": 64, "in_channels": 256, "out_channels": 256, "height": 56, "width": 56, "element": "f16"}
    last = tp.Conv2dDescriptor(**big, layouts=dict.fromkeys(("x", "weight", "out"), LAST))
    loose = last.replace(layouts={"x": tp.Layout.strided(unit_axis=1, alignment=16)})
    for desc, reason in (
        (last.replace(groups=16), "16 groups; it takes up to 8"),
        (last.replace(stride=(1, 3)), "strides .1, 3.; it has 1 and 2"),
        (last.replace(layouts={}), "x is packed with channels first"),
        (loose, "x is promised stride_multiple=1; a multiple of 8 is needed"),
        (last.replace(height=1, width=9, kernel=(1, 1), stride=(2, 1)), "larger than the image"),
        (last.replace(batch=0), "an operand is empty"),
        (last.replace(out_channels=252), "out has 252 channels; TMA writes multiples of 8"),
    ):
        with pytest.raises(tp.Unsupported, match=reason):
            tp.plan(desc, target=H200, kernel="wgmma")
    flat = last.replace(height=1, width=1, kernel=(1, 1), layouts={})
    assert tp.plan(flat, target=H200, kernel="wgmma").launches


@pytest.mark.parametrize("op", OPS)
def test_rings_fit_and_stages_are_waited_for(op: str) -> None:
    """Of every tile that any size may choose: what it stages passes through as many buffers as it has blocks."""
    seen = set()
    for n in (8, 64, 72, 120, 136, 264):
        for batch in (1, 16, 512):
            sizes = {"in_channels": n, "out_channels": n, "batch": batch, "height": 14, "width": 13}
            desc = tp.descriptor_types()[op](**{**FIELDS, **sizes}, element="bf16")
            last = desc.replace(layouts={o.name: LAST for o in desc.operands() if len(o.shape) == 4})
            launch = tp.plan(last, target=H200, kernel="wgmma").launches[0]
            constants = {"IMAGES": 1, "REACH": 0, "TAPS": 1, "BOXES": 1, **launch.constexprs}
            pixels = constants["IMAGES"] * constants["HIGH"] * constants["WIDE"]
            if op == "conv2d_backward_weight":
                ring = constants["FILTERS"] + constants["COLUMNS"]
                seen.add((constants["FILTERS"], constants["COLUMNS"]))
                assert ring * constants["STAGES"] * 64 * pixels * 2 <= 192 << 10
            else:
                out: Any = launch.args["out"]
                block = math.prod(out.block)  # of the results that a warpgroup stages
                assert constants["BOXES"] * pixels * constants["BLOCK_N"] // block >= constants["BUFFERS"]
                read = constants["IMAGES"] * (constants["HIGH"] + constants["REACH"]) * constants["WIDE"]
                ring = 2 * constants["BOXES"] * read + constants["TAPS"] * constants["BLOCK_N"]
                nbytes = 2 * (ring * constants["STAGES"] * constants["CHANNELS"] + 2 * constants["BUFFERS"] * block)
                assert nbytes <= (227 << 10) - 1024
                seen.add((pixels, constants["BLOCK_N"], constants["BOXES"], constants["TAPS"]))
    assert len(seen) > 2


LAST = tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=8)
LARGE: dict[str, dict[str, Any]] = {
    "blocks": {"in_channels": 136, "out_channels": 144, "height": 30, "width": 29},
    "first layer": {"in_channels": 3, "out_channels": 64, "stride": (2, 2), "kernel": (7, 7)},
    "depthwise": {"in_channels": 72, "out_channels": 72, "groups": 72, "kernel": (5, 7), "stride": (2, 1)},
    "groups": {"in_channels": 192, "out_channels": 64, "groups": 2, "stride": (2, 1), "dilation": (2, 1)},
}


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("element", ["f16", "bf16", "f32", "f64", "tf32"])
def test_large_problems(element: str, size: str, op: str) -> None:
    """Several tiles of every axis, channels last and first."""
    fields = {**FIELDS, "height": 33, "width": 20, "padding": (1, 1, 2, 0), "batch": 3, **LARGE[size]}
    kind = {"element": "f32", "math": "tf32"} if element == "tf32" else {"element": element}
    desc = tp.descriptor_types()[op](**kind, **fields)
    for of in (desc, desc.replace(layouts={o.name: LAST for o in desc.operands() if len(o.shape) == 4})):
        assert check_plan(tp.plan(of), passes=("unit",)).compared


#: (images, channels, side) of 3 by 3, as many filters, whose tiles the small problems of the proofs do not reach:
#: results that are stored during the next products, swapped factors, a launch for a last wave.
MANY_TILES = {"swapped factors": (128, 128, 28), "last wave": (90, 256, 14)}


def many_tiles(op: str, name: str) -> Any:
    images, channels, side = MANY_TILES[name]
    sizes = {"in_channels": channels, "out_channels": channels, "batch": images, "height": side, "width": side}
    desc = tp.descriptor_types()[op](element="bf16", kernel=(3, 3), padding=(1, 1, 1, 1), **sizes)
    return desc.replace(layouts={o.name: LAST for o in desc.operands()})


@pytest.mark.parametrize("name", MANY_TILES)
@pytest.mark.parametrize("op", OPS[:2])
def test_what_many_tiles_are_for(op: str, name: str) -> None:
    launches = tp.plan(many_tiles(op, name), target=H200, kernel="wgmma").launches
    assert launches[0].constexprs["HOLDS"]
    assert launches[0].constexprs["SWAPPED"] == (name == "swapped factors")
    assert len(launches) == (2 if name == "last wave" else 1)


@pytest.mark.gpu
@pytest.mark.skipif("tp.Target.current().arch is not tp.ArchSku.SM90A")
@pytest.mark.parametrize("name", MANY_TILES)
@pytest.mark.parametrize("op", OPS[:2])
def test_many_tiles_have_the_same_bits_beside_other_work(op: str, name: str) -> None:
    desc = many_tiles(op, name)
    (output,) = (o.name for o in desc.operands() if o.is_written)
    g = torch.Generator().manual_seed(0)
    values = {o.name: torch.randn(o.shape, generator=g).bfloat16() for o in desc.operands() if o.name != output}
    values = {name: t.contiguous(memory_format=torch.channels_last) for name, t in values.items()}
    plan: tp.Plan[Any, Any] = tp.plan(desc, kernel="wgmma")
    first = run(plan, values)[output]
    assert all(torch.equal(found[output].cpu(), first) for found in repeated(plan, values, range(1, RUNS["gpu"])))


#: Boxes that are cut or span images, taps that miss the image, tiles of all widths; nothing a multiple of a block.
HOPPER: dict[str, dict[str, Any]] = {
    "plain": {"in_channels": 136, "out_channels": 264, "height": 15, "width": 29, "padding": (1, 1, 1, 1)},
    "one pixel": {"in_channels": 8, "out_channels": 16, "height": 1, "width": 1, "kernel": (1, 1), "batch": 300},
    "few channels": {"in_channels": 24, "out_channels": 32, "height": 15, "width": 29, "padding": (1, 1, 1, 1)},
    "narrow blocks": {"in_channels": 96, "out_channels": 136, "height": 17, "width": 28, "stride": (2, 1), "batch": 9},
    "one tap": {"in_channels": 200, "out_channels": 72, "kernel": (1, 1), "height": 28, "width": 28},
    "wide": {
        "in_channels": 64,
        "out_channels": 128,
        "height": 1,
        "width": 333,
        "kernel": (1, 7),
        "padding": (0, 0, 3, 2),
    },
    "far taps": {
        "in_channels": 24,
        "out_channels": 40,
        "height": 9,
        "width": 7,
        "dilation": (6, 5),
        "padding": (8, 7, 6, 9),
    },
    "strides": {
        "in_channels": 72,
        "out_channels": 136,
        "height": 13,
        "width": 18,
        "stride": (2, 2),
        "padding": (1, 1, 1, 1),
    },
    "skipped taps": {
        "in_channels": 64,
        "out_channels": 64,
        "height": 9,
        "width": 16,
        "stride": (2, 2),
        "dilation": (2, 1),
    },
    "one axis": {"in_channels": 96, "out_channels": 80, "height": 6, "width": 40, "kernel": (2, 5), "stride": (1, 2)},
    "unmet pixels": {
        "in_channels": 64,
        "out_channels": 320,
        "height": 8,
        "width": 7,
        "kernel": (1, 1),
        "stride": (2, 2),
    },
    "many images": {
        "in_channels": 64,
        "out_channels": 64,
        "height": 7,
        "width": 7,
        "batch": 70,
        "padding": (1, 1, 1, 1),
    },
}


@pytest.mark.parametrize("where", ["gpu"])
@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", HOPPER)
def test_boxes_of_pixels(case: str, op: str, where: str) -> None:
    """The Hopper kernel, with and without a bias, from dense operands and from slices of larger ones; over copies of
    channels first and of channels that TMA does not move."""
    kinds: list[dict[str, Any]] = [{"element": "bf16"}, {"element": "f16"}, {"element": "f32", "math": "tf32"}]
    for number, kind in enumerate(kinds[: 2 if op == "conv2d_backward_weight" else 3]):
        fields = {
            **FIELDS,
            "batch": 3,
            **HOPPER[case],
            **({"has_bias": bool(number)} if op == "conv2d" else {}),
            **kind,
        }
        desc = tp.descriptor_types()[op](**fields)
        last = desc.replace(layouts={o.name: LAST for o in desc.operands() if len(o.shape) == 4})
        turned = op == "conv2d_backward_input" and number == 2  # wgmma reads the weight of tf32 by filters
        assert check_plan(required(last, "converted_wgmma" if turned else "wgmma", target(where)), runs=2).compared
        copied = pinned(desc, "converted_wgmma", target(where))
        assert copied is not None or case == "one pixel"
        ragged = desc.replace(in_channels=fields["in_channels"] - 1, out_channels=fields["out_channels"] - 3)
        loose = tp.Layout.strided(unit_axis=1)
        ragged = ragged.replace(layouts={o.name: loose for o in ragged.operands() if len(o.shape) == 4})
        for plan in filter(None, (copied, required(ragged, "converted_wgmma", target(where)))):
            assert check_plan(plan, runs=2).compared


#: Sizes, strides, padding and gaps of images of few channels.
NARROW: dict[str, dict[str, Any]] = {
    "rgb": {
        "in_channels": 3,
        "out_channels": 64,
        "height": 61,
        "width": 58,
        "kernel": (7, 7),
        "stride": (2, 2),
        "padding": (3, 3, 3, 3),
    },
    "grey": {
        "in_channels": 1,
        "out_channels": 40,
        "height": 28,
        "width": 28,
        "kernel": (3, 3),
        "padding": (1, 1, 1, 1),
    },
    "unequal": {
        "in_channels": 5,
        "out_channels": 136,
        "height": 19,
        "width": 41,
        "kernel": (2, 5),
        "stride": (1, 3),
        "padding": (0, 1, 2, 0),
        "dilation": (2, 1),
    },
    "long": {"in_channels": 20, "out_channels": 8, "height": 9, "width": 9, "kernel": (3, 5)},
}


@pytest.mark.parametrize("where", ["gpu"])
@pytest.mark.gpu
@pytest.mark.parametrize("op", ["conv2d", "conv2d_backward_weight"])
@pytest.mark.parametrize("case", NARROW)
def test_windows(case: str, op: str, where: str) -> None:
    """Images of few channels, with and without a bias, in both orders of axes."""
    for number, element in enumerate(("bf16", "f16")):
        bias = {"has_bias": bool(number)} if op == "conv2d" else {}
        desc = tp.descriptor_types()[op](**{**FIELDS, "batch": 3, **NARROW[case], **bias}, element=element)
        operands = [o for o in desc.operands() if len(o.shape) == 4]
        loose = tp.Layout.strided(unit_axis=1, alignment=16)
        last = {o.name: loose if o.shape[1] % 8 else LAST for o in operands}
        first = {o.name: LAST for o in operands if o.name in ("out", "dout")}
        for layouts in (last, first):
            assert check_plan(required(desc.replace(layouts=layouts), "windowed", target(where)), runs=2).compared
