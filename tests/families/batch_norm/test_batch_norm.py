"""Batch and group normalisation beside torch's: statistics, layouts, modules, refusals; problems of any shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import H200, places
from hypothesis import given, settings, strategies as st
from proofs import target
from replaying import replays_on_cpu
from samples import SetConstant

import triplan as tp
import triplan.functional as F  # noqa: N812
import triplan.nn
from triplan.backends.triton.batch_norm import channels, split, split_backward
from triplan.backends.triton.batch_norm.channels import Geometry, divided_images
from triplan.testing import check_plan, descriptors

Tensor = torch.Tensor
torchs = torch.nn.functional
OPS = ("batch_norm", "batch_norm_backward", "group_norm", "group_norm_backward")
SHAPES = {"vectors": (8, 5), "rows": (4, 3, 7), "images": (4, 3, 5, 6), "volumes": (2, 3, 2, 3, 2), "empty": (0, 3, 4)}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the hardware does silently


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layout", ["first", "last", "gaps"])
@pytest.mark.parametrize("name", SHAPES)
def test_results_and_gradients_are_torchs(name: str, layout: str, training: bool) -> None:
    x = drawn(*SHAPES[name])
    if layout == "last":
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    elif layout == "gaps":
        x = torch.stack((x, x), -1)[..., 1]
    leaves = [x.requires_grad_(), *(drawn(x.size(1), seed=s).requires_grad_() for s in (1, 2))]
    running = [(drawn(x.size(1), seed=3), drawn(x.size(1), seed=4).abs()) for _ in range(2)]
    outs = [m.batch_norm(x, *r, *leaves[1:], training, 0.3, 1e-3) for m, r in zip((F, torchs), running, strict=True)]
    torch.testing.assert_close(*outs, check_stride=x.dim() == 4 and layout != "gaps")
    torch.testing.assert_close(*running)
    g = torch.randn_like(outs[1]).requires_grad_()
    first = [torch.autograd.grad(out, leaves, g, create_graph=True) for out in outs]
    torch.testing.assert_close(*first)
    if x.numel():
        along = [drawn(*t.shape, seed=5) for t in leaves]
        second = [torch.autograd.grad(found, (leaves[0], leaves[1], g), along) for found in first]
        torch.testing.assert_close(*second)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("layout", ["first", "last", "gaps"])
@pytest.mark.parametrize("name", SHAPES)
def test_relu_of_a_sum_is_torchs(name: str, layout: str, added: bool, training: bool) -> None:
    x, residual = (drawn(*SHAPES[name], seed=s) for s in (0, 6))
    if layout == "last":
        x, residual = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, residual))
    elif layout == "gaps":
        x, residual = (torch.stack((t, t), -1)[..., 1] for t in (x, residual))
    numbers = [drawn(x.size(1), seed=s) for s in (1, 2)]
    leaves = [t.requires_grad_() for t in (x, *numbers, *([residual] if added else []))]
    running = [(drawn(x.size(1), seed=3), drawn(x.size(1), seed=4).abs()) for _ in range(2)]
    ours = F.batch_norm_relu(x, *running[0], *numbers, training, 0.3, 1e-3, residual if added else None)
    theirs = torchs.batch_norm(x, *running[1], *numbers, training, 0.3, 1e-3)
    outs = [ours, torch.relu(theirs + residual if added else theirs)]
    torch.testing.assert_close(*outs, check_stride=x.dim() == 4 and layout != "gaps")
    torch.testing.assert_close(*running)
    g = torch.randn_like(outs[1]).requires_grad_()
    torch.testing.assert_close(*(torch.autograd.grad(out, leaves, g, retain_graph=True) for out in outs))
    first = [torch.autograd.grad(out, leaves, g, create_graph=True) for out in outs]
    torch.testing.assert_close(*first)
    if x.numel():
        along = [drawn(*t.shape, seed=5) for t in leaves]
        torch.testing.assert_close(*(torch.autograd.grad(f, (leaves[0], leaves[1], g), along) for f in first))


@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize(("shape", "groups"), [((4, 6, 5, 3), 3), ((3, 6), 2), ((2, 4, 7), 1), ((2, 4, 2, 3, 2), 4)])
def test_groups_are_torchs(shape: tuple[int, ...], groups: int, layout: str) -> None:
    x = drawn(*shape)
    x = x.movedim(1, -1).contiguous().movedim(-1, 1) if layout == "last" else x
    leaves = [x.requires_grad_(), *(drawn(x.size(1), seed=s).requires_grad_() for s in (1, 2))]
    outs = [m.group_norm(x, groups, *leaves[1:], 1e-3) for m in (F, torchs)]
    torch.testing.assert_close(*outs)
    g = torch.randn_like(outs[1]).requires_grad_()
    first = [torch.autograd.grad(out, leaves, g, create_graph=True) for out in outs]
    torch.testing.assert_close(*first)
    along = [drawn(*t.shape, seed=5) for t in leaves]
    torch.testing.assert_close(*(torch.autograd.grad(found, (leaves[0], leaves[1], g), along) for found in first))
    torch.testing.assert_close(*(m.group_norm(x, groups, None, leaves[2]) for m in (F, torchs)))
    ours, theirs = (m.GroupNorm(groups, shape[1], dtype=torch.float64) for m in (triplan.nn, torch.nn))
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_of_f32_and_of_the_images(dtype: torch.dtype) -> None:
    """As under mixed precision, and in models that are of one dtype."""
    x = drawn(6, 4, 9).to(dtype)
    for of in (dtype, torch.float32):
        numbers = [drawn(4, seed=s).to(of).requires_grad_() for s in (1, 2)]
        running = [(torch.zeros(4, dtype=of), torch.ones(4, dtype=of)) for _ in range(2)]
        got = F.batch_norm(x, *running[0], *numbers, True)
        wide = (t.double() for t in (x, *running[1], *numbers))
        expected = torchs.batch_norm(*wide, True)
        torch.testing.assert_close(got.double(), expected, rtol=1e-2, atol=1e-2)
        found = torch.autograd.grad(got.float().square().sum(), numbers)
        assert all(t.dtype == of for t in (*found, *running[0]))


def test_absent_parameters_and_cumulative_averages() -> None:
    x = drawn(6, 4, 3)
    torch.testing.assert_close(*(m.batch_norm(x, None, None, training=True) for m in (F, torchs)))
    weight, bias = drawn(4, seed=1), drawn(4, seed=2)
    torch.testing.assert_close(*(m.batch_norm(x, None, None, weight, None, True) for m in (F, torchs)))
    torch.testing.assert_close(*(m.batch_norm(x, None, None, None, bias, True) for m in (F, torchs)))


MODULES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "BatchNorm1d": ((6, 4), {"momentum": None}),
    "BatchNorm2d": ((2, 4, 3, 3), {"eps": 1e-3, "momentum": 0.2}),
    "BatchNorm3d": ((2, 4, 3, 2, 2), {"affine": False, "track_running_stats": False}),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_torchs(name: str) -> None:
    shape, options = MODULES[name]
    ours, theirs = (getattr(m, name)(4, **options).double() for m in (triplan.nn, torch.nn))
    for seed in range(3):
        torch.testing.assert_close(ours(drawn(*shape, seed=seed)), theirs(drawn(*shape, seed=seed)))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(*(m.eval()(drawn(*shape)) for m in (ours, theirs)))
    assert repr(ours) == repr(theirs)
    with pytest.raises(ValueError, match="expected"):
        ours(drawn(4))


def test_training_that_updates_running_statistics_is_replayed() -> None:
    """But for the update, which autograd must not see."""
    running = [(torch.zeros(4), torch.ones(4)) for _ in range(2)]
    with replays_on_cpu() as answers:
        for seed in range(5):
            del answers[:]
            x = drawn(6, 4, 9, seed=seed).float()
            leaves = [x.clone().requires_grad_() for _ in range(2)]
            outs = [
                m.batch_norm(leaf, *r, training=True) for m, leaf, r in zip((F, torchs), leaves, running, strict=True)
            ]
            torch.testing.assert_close(*outs)
            torch.testing.assert_close(*(torch.autograd.grad(o, t, x) for o, t in zip(outs, leaves, strict=True)))
            torch.testing.assert_close(*running)
        assert answers == [True, True]


def test_registration() -> None:
    x, weight, bias = (t.requires_grad_() for t in (drawn(3, 4, 5), drawn(4, seed=1), drawn(4, seed=2)))
    mean, var, ops = drawn(4, seed=3), drawn(4, seed=4).abs(), torch.ops.triplan
    for training in (True, False):
        residual, g = (drawn(3, 4, 5, seed=s).requires_grad_() for s in (5, 6))
        for relu in ((False, None), (True, None), (True, residual)):
            torch.library.opcheck(ops.batch_norm.default, (x, weight, bias, mean, var, training, 0.1, 1e-5, *relu))
        for relu in ((None, False), (x.detach(), False), (x.detach(), True))[: 3 if training else 1]:
            torch.library.opcheck(ops.batch_norm_backward.default, (g, x, mean, var, weight, bias, training, *relu))
    torch.library.opcheck(ops.group_norm.default, (x, weight, bias, 2, 1e-5))
    statistics = (drawn(3, 2, seed=6), drawn(3, 2, seed=7))
    given = (drawn(3, 4, 5, seed=5).requires_grad_(), x, *statistics, weight, bias, 2)
    torch.library.opcheck(ops.group_norm_backward.default, given)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: F.batch_norm(x[:1, :, :1], None, None, training=True), ValueError, "more than 1 value"),
        (lambda x: F.batch_norm(x, None, None), RuntimeError, "training=False"),
        (lambda x: F.batch_norm(x, drawn(3), None, training=True), RuntimeError, "running_var"),
        (lambda x: F.batch_norm(x, drawn(2), drawn(2)), RuntimeError, "3 elements"),
        (lambda x: F.batch_norm(x, None, None, drawn(3).float(), training=True), RuntimeError, "float64"),
        (lambda x: F.batch_norm(x[0, 0], None, None, training=True), RuntimeError, "2 axes"),
        (lambda x: F.batch_norm(x.int(), None, None, training=True), tp.Unsupported, "only f16"),
        (lambda x: F.batch_norm_relu(x, None, None, training=True, residual=x[:1]), RuntimeError, "residual"),
        (lambda x: F.batch_norm_relu(x, None, None, training=True, residual=x.float()), RuntimeError, "residual"),
        (lambda x: F.group_norm(x, 2), RuntimeError, "divisible by num_groups"),
        (lambda x: F.group_norm(x[:1, :, :1], 3), ValueError, "more than 1 value"),
    ],
)
def test_refusals(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(drawn(2, 3, 4))


def test_plans_refuse() -> None:
    sizes: dict[str, Any] = {"batch": 2, "channels": 3, "pixels": 4, "element": "bf16"}
    for fields, message in (
        ({"batch": 0}, "must be positive"),
        ({"training": False, "running": False}, "needs running"),
        ({"parameter_element": "f16"}, "must be bf16 or f32"),
        ({"residual": True}, "needs relu"),
    ):
        with pytest.raises(tp.InvalidProblem, match=message):
            tp.BatchNormDescriptor(**{**sizes, **fields})
    with pytest.raises(tp.InvalidProblem, match="needs training"):
        tp.BatchNormBackwardDescriptor(**sizes, relu=True, training=False)
    with pytest.raises(tp.InvalidProblem, match="must divide channels"):
        tp.GroupNormDescriptor(**sizes, groups=2)
    with pytest.raises(tp.Unsupported, match="must be contiguous"):
        tp.plan(tp.GroupNormDescriptor(**sizes, layouts={"x": "strided"}), target=H200)
    for fields, message in (
        ({"batch": 1 << 30}, "it counts fewer than"),
        ({"layouts": {"weight": "strided"}}, "must be packed"),
    ):
        with pytest.raises(tp.Unsupported, match=message):
            tp.plan(tp.BatchNormDescriptor(**{**sizes, **fields}), target=H200)


@pytest.mark.parametrize("kernel", [None, pytest.param("channels", marks=pytest.mark.interpret)])
def test_statistics_far_from_zero(kernel: str | None) -> None:
    """Variances of 1 around 4096: squares in f32 would leave nothing of them."""
    where = "cpu" if kernel is None else "interpret"
    desc = tp.BatchNormDescriptor(batch=300, channels=3, pixels=1, element="f32", weight=False, bias=False)
    x = (4096 + drawn(300, 3, 1)).float()
    out, mean, rstd, var = torch.empty_like(x), torch.zeros(3), torch.empty(3), torch.ones(3)
    args = tp.BatchNormArgs(x, out, torch.empty(3), rstd, None, None, mean, var, mean, var, momentum=1.0)
    plan = tp.plan(desc, target=target(where))
    plan.run(args, tp.Workspace.allocate(plan))
    wide = x.double().flatten(1)
    torch.testing.assert_close(var.double(), wide.var(0), rtol=1e-3, atol=0)
    torch.testing.assert_close(rstd.double(), (wide.var(0, correction=0) + 1e-5).rsqrt(), rtol=1e-3, atol=0)
    torch.testing.assert_close(mean.double(), wide.mean(0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("element", ["bf16", "f32"])
@pytest.mark.parametrize(("where", "kernel"), places("channels", "groups"))
@settings(max_examples=10)
@given(data=st.data())
def test_drawn_shapes_and_layouts(where: str, kernel: str | None, element: str, data: st.DataObject) -> None:
    ops = {None: OPS, "channels": OPS[:2], "groups": OPS[2:]}[kernel]
    cls = tp.descriptor_types()[data.draw(st.sampled_from(ops))]
    preference = tp.PlanPreference(kernel=kernel)
    desc = data.draw(descriptors(cls, 1 << 11, fixed={"element": element, "parameter_element": None}))
    packed = 1 if "batch" in desc.op else 3
    vectors = {o.name: tp.Layout(alignment=16) for o in desc.operands() if o.shape and len(o.shape) <= packed}
    desc = desc.replace(layouts={**dict(desc.layouts), **vectors})
    check_plan(tp.plan(desc, target=target(where), preference=preference), runs=1)


LAST = tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=8)


@pytest.fixture
def few_programs(constant: SetConstant) -> None:
    """Channels are divided among so few programs that each has several tiles of a small problem."""
    for name in ("PROGRAMS_FORWARD", "PROGRAMS_BACKWARD"):
        constant(channels, name, 66)


def geometry_of(op: str, sizes: tuple[int, ...]) -> Geometry:
    batch, of, pixels = sizes
    return divided_images(tp.descriptor_types()[op](batch=batch, channels=of, pixels=pixels, element="f32"))


@pytest.mark.parametrize("sizes", [(300, 24, 1), (5, 24, 30), (5, 3, 130), (2, 3, 1500), (70, 3, 17)])
@pytest.mark.parametrize(("where", "kernel"), places("channels"))
@pytest.mark.parametrize("fields", [{}, {"relu": True}, {"relu": True, "residual": True}], ids=["", "relu", "added"])
@pytest.mark.parametrize("op", OPS[:2])
def test_parts_and_tiles(
    op: str, fields: dict[str, Any], where: str, kernel: str | None, sizes: tuple[int, ...]
) -> None:
    """Several parts and blocks of a channel, the last not full; channels last with gaps between images."""
    check_channels(op, fields, where, kernel, sizes)


@pytest.mark.parametrize("rest", [0, 3])
@pytest.mark.parametrize(("where", "kernel"), places("channels"))
@pytest.mark.parametrize(
    "fields",
    [{}, {"training": False, "bias": False}, {"relu": True, "residual": True}],
    ids=["", "running", "added"],
)
@pytest.mark.parametrize("op", OPS[:2])
def test_several_pixels_a_row(
    op: str, fields: dict[str, Any], where: str, kernel: str | None, rest: int, few_programs: None
) -> None:
    """Pixels of odd channels, of which four begin at a vector; the last fill no row."""
    sizes = (640 + rest, 515, 1)
    assert geometry_of(op, sizes).pixels == 4
    assert 1 < geometry_of(op, sizes).parts < geometry_of(op, sizes).groups
    check_channels(op, fields, where, kernel, sizes)


@pytest.mark.parametrize("sizes", [(300, 24, 1), (5, 2, 4500), (643, 515, 1)], ids=["rows", "pixels", "joined"])
@pytest.mark.parametrize(("where", "kernel"), places("channels"))
@pytest.mark.parametrize("op", OPS[:2])
def test_merges_of_several_steps(
    op: str, where: str, kernel: str | None, sizes: tuple[int, ...], few_programs: None, constant: SetConstant
) -> None:
    constant(channels, "MOST_MERGED", 2)
    assert geometry_of(op, sizes).partials > 2
    check_channels(op, {}, where, kernel, sizes)


@pytest.mark.parametrize("sizes", [(3, 35, 684), (5, 2, 1026)], ids=["several tiles a program", "short vectors"])
@pytest.mark.parametrize(("where", "kernel"), places("channels"))
@pytest.mark.parametrize("fields", [{}, {"relu": True, "residual": True}], ids=["", "added"])
@pytest.mark.parametrize("op", OPS[:2])
def test_rows_are_vectors_of_pixels(
    op: str, fields: dict[str, Any], where: str, kernel: str | None, sizes: tuple[int, ...], few_programs: None
) -> None:
    """Vectors of a channel's pixels, one image after the other; the last tile is not full."""
    assert geometry_of(op, sizes).vector == (4 if sizes[1] == 35 else 2)
    assert geometry_of(op, sizes).each == (2 if sizes[1] == 35 else 1)
    check_channels(op, fields, where, kernel, sizes)


@pytest.mark.parametrize(
    ("element", "pixels", "alignment", "vector"),
    [("bf16", 784, 16, 8), ("bf16", 196, 16, 4), ("bf16", 784, 4, 1), ("f32", 49, 16, 1), ("f64", 49, 8, 1)],
)
def test_how_many_pixels_are_a_vector(element: str, pixels: int, alignment: int, vector: int) -> None:
    desc = tp.BatchNormDescriptor(batch=8, channels=64, pixels=pixels, element=element)
    images = {o.name: tp.Layout(alignment=alignment) for o in desc.operands() if len(o.shape) == 3}
    assert divided_images(desc.replace(layouts=images)).vector == vector


@pytest.mark.parametrize(("batch", "pixels", "height"), [(128, 17, 128), (132, 17, 32), (1030, 17, 128), (3, 3, 4)])
def test_tiles_have_the_rows_that_images_fill(batch: int, pixels: int, height: int) -> None:
    desc = tp.BatchNormBackwardDescriptor(batch=batch, channels=511, pixels=pixels, element="bf16")
    found = divided_images(desc)
    assert found.height == height
    assert found.each * found.parts >= found.groups == -(-batch // height)


@pytest.mark.parametrize(("channels", "pixels"), [(2**26 + 1, 8), (2**28 - 1, 1)])
def test_columns_of_several_pixels_are_counted_in_32_bits(channels: int, pixels: int) -> None:
    desc = tp.BatchNormDescriptor(batch=4000, channels=channels, pixels=1, element="bf16")
    aligned = {o.name: tp.Layout(alignment=16) for o in desc.operands() if len(o.shape) == 3}
    assert divided_images(desc.replace(layouts=aligned)).pixels == pixels


def check_channels(op: str, fields: dict[str, Any], where: str, kernel: str | None, sizes: tuple[int, ...]) -> None:
    batch, channels, pixels = sizes
    desc = tp.descriptor_types()[op](batch=batch, channels=channels, pixels=pixels, element="f32", **fields)
    if sizes == (5, 24, 30):
        desc = desc.replace(layouts={o.name: LAST for o in desc.operands() if len(o.shape) == 3})
    plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel))
    assert check_plan(plan, runs=1).compared


@pytest.mark.parametrize(("where", "kernel"), places("whole"))
@settings(max_examples=10)
@given(data=st.data())
def test_whole_channels_of_drawn_shapes_and_layouts(where: str, kernel: str | None, data: st.DataObject) -> None:
    fixed = {"element": "f32", "parameter_element": None}
    desc = data.draw(descriptors(tp.BatchNormBackwardDescriptor, 1 << 11, fixed=fixed).filter(lambda d: d.sums))
    vectors = {o.name: tp.Layout(alignment=16) for o in desc.operands() if len(o.shape) == 1}
    desc = desc.replace(layouts={**dict(desc.layouts), **vectors})
    check_plan(tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel)), runs=1)


@pytest.mark.parametrize("sizes", [(300, 24, 1), (5, 24, 30), (5, 3, 130), (2, 3, 1500)])
@pytest.mark.parametrize(("where", "kernel"), places("whole"))
@pytest.mark.parametrize(
    "fields",
    [{}, {"relu": True}, {"relu": True, "residual": True}, {"training": False}, {"training": False, "weight": False}],
    ids=["", "relu", "added", "running", "running, bias alone"],
)
def test_whole_channels(fields: dict[str, Any], where: str, kernel: str | None, sizes: tuple[int, ...]) -> None:
    check_channels("batch_norm_backward", fields, where, kernel, sizes)


@pytest.mark.parametrize("sizes", [(3, 6, 4, 3), (2, 4, 1500, 2), (40, 12, 1, 3)])
@pytest.mark.parametrize(("where", "kernel"), places("groups"))
@pytest.mark.parametrize("op", OPS[2:])
def test_groups_of_several_tiles(op: str, where: str, kernel: str | None, sizes: tuple[int, ...]) -> None:
    """Several groups in a tile, or several tiles in a group, the last not full; images of one pixel."""
    check_groups(op, where, kernel, sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        (2, 4, 1500, 2),
        (1, 3, 2500, 3),
        (1, 2, 5000, 1),
        (3, 140, 34, 2),
        (2, 140, 33, 2),
        (1, 6000, 1, 2),
        (1, 2100, 36, 2),
    ],
)
@pytest.mark.parametrize(("where", "kernel"), places("split"))
@pytest.mark.parametrize("op", OPS[2:])
def test_parts_of_groups(op: str, where: str, kernel: str | None, sizes: tuple[int, ...]) -> None:
    """Several programs share a group; groups of one channel, of several in a tile, of too many or too short ones."""
    check_groups(op, where, kernel, sizes)


@pytest.mark.parametrize(("where", "kernel"), places("split"))
@pytest.mark.parametrize("op", OPS[2:])
def test_parts_of_several_blocks(op: str, where: str, kernel: str | None, constant: SetConstant) -> None:
    """Parts of three blocks, the last of two; of too few pixels for sums of planes."""
    forward = not op.endswith("_backward")
    module = split if forward else split_backward
    constant(module, "PROGRAMS_FORWARD" if forward else "PROGRAMS_BACKWARD", 4)
    assert module.parts(tp.descriptor_types()[op](batch=2, channels=1200, pixels=8, element="f32")) == (3, 2)
    check_groups(op, where, kernel, (2, 1200, 8, 1))


@pytest.mark.parametrize(
    ("rows", "blocks", "expected"),
    [(2, 117, (1, 117)), (40, 2779, (17, 164)), (288, 24, (24, 1)), (600, 400, (400, 1))],
)
def test_programs_that_share_a_group(rows: int, blocks: int, expected: tuple[int, int]) -> None:
    """As many as fill the card, more of long groups, none where groups are as many."""
    desc = tp.GroupNormDescriptor(element="f32", batch=rows, channels=2048, pixels=blocks)
    assert split.parts(desc) == expected
    assert bool(split.supports(desc, H200)) == (expected[1] > 1)


def check_groups(op: str, where: str, kernel: str | None, sizes: tuple[int, ...]) -> None:
    batch, channels, pixels, groups = sizes
    cls: Any = tp.descriptor_types()[op]
    desc = cls(batch=batch, channels=channels, pixels=pixels, groups=groups, element="f32")
    plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel))
    assert check_plan(plan, runs=1).compared
