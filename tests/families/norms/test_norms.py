"""Norms: values that a careless formula gets wrong. (Functional calls compare the reference with torch.)"""

from __future__ import annotations

import math

import pytest
import torch
from cases import WHERE, required
from cases.rows import PLACES, build, reads_within_operands, run
from proofs import norms, target
from samples import SetConstant
from torch.nn import functional

import triplan as tp
from triplan.backends.triton.common import rows
from triplan.testing import check_plan

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the hardware does silently


@pytest.mark.parametrize(("where", "kernel"), PLACES[1:])
def test_rows_that_begin_unlike_the_rest(where: str, kernel: str) -> None:
    """By one element, by a fifth of them, and by a fifth far from zero."""
    n = (1000 if kernel == "rows" else 20_000) * (1 if where == "interpret" else 5)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, n, generator=g)
    x[0, 0] = 1e4
    x[1:, : n // 5] += 1000
    x[2] += 3000
    plan = required(build("layer_norm", (3, n)), kernel, target(where))
    assert check_plan(plan, given={"x": x}).compared >= 3 * n


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "l2_norm"])
@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_norms_hold_at_the_ends_of_their_range(where: str, kernel: str | None, op: str) -> None:
    """Mean squares just above the smallest normal number, without an eps; sums of squares near the largest."""
    n = 1000 if kernel in (None, "rows") else 9000 if where == "interpret" else 20_000
    info = torch.finfo(torch.float32)
    unit = torch.randn(3, n, generator=torch.Generator().manual_seed(0))
    unit -= unit.mean(1, keepdim=True)
    unit /= unit.square().mean(1, keepdim=True).sqrt()
    plan = required(build(op, (3, n), weight=False, bias=False, eps=0.0), kernel, target(where))
    for square in (1.1 * info.smallest_normal, info.max / (4.1 * n)):
        given = {"x": unit * square**0.5}
        assert check_plan(plan, given=given).compared >= 3 * n


def normalised(x: torch.Tensor, where: str, kernel: str | None) -> tp.LayerNormArgs:
    """layer_norm of ``x``, without weight and bias: what was run."""
    desc = tp.LayerNormDescriptor(input_shape=x.shape, element=x.dtype, weight=False, bias=False)
    plan = required(desc, kernel, target(where))
    x = x.to(plan.target.device_type)
    mean, rstd = (torch.empty(len(x), device=x.device) for _ in range(2))
    args = tp.LayerNormArgs(x=x, out=torch.empty_like(x), mean=mean, rstd=rstd)
    run(plan, args)
    return args


@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_the_variance_is_of_centred_values(where: str, kernel: str | None) -> None:
    """Values of spread 1 around 4,000: their mean square less the square of their mean is noise in f32."""
    n = 1000 if kernel in (None, "rows") else 20_000
    args = normalised(torch.randn(3, n, generator=torch.Generator().manual_seed(0)) + 4000, where, kernel)
    x, wanted = args.x, functional.layer_norm(args.x.double(), (n,))
    assert float((args.out.double() - wanted).abs().max()) < 2e-5
    naive = x.square().mean(1) - x.mean(1).square()
    assert float(((x - x.mean(1, keepdim=True)) * naive.clamp(min=1e-5).rsqrt()[:, None] - wanted).abs().max()) > 1e-2


@pytest.mark.parametrize("n", [1, 31, 256, 1000])
@pytest.mark.parametrize(("element", "middle"), [("f16", 1500), ("bf16", 200)])
@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_the_mean_of_16_bit_rows_is_exact_to_f32(
    where: str, kernel: str | None, element: str, middle: int, n: int
) -> None:
    """Values a few of their steps apart, or all but one equal: the mean's error must be far below a step."""
    x = middle + torch.randint(-3, 4, (5, n), generator=torch.Generator().manual_seed(0)).float()
    x[3:] = middle
    x[3, n // 2] += 1
    args = normalised(x.to(tp.ElementKind(element).torch), where, kernel)
    wide = args.x.double()
    torch.testing.assert_close(args.mean.double(), wide.mean(1), rtol=1e-6, atol=0)
    spread = (wide.var(1, correction=0) + 1e-5).rsqrt()
    torch.testing.assert_close(args.rstd.double(), spread, rtol=1e-4, atol=0)
    wanted = (wide - wide.mean(1, keepdim=True)) * spread[:, None]
    torch.testing.assert_close(args.out.double(), wanted, rtol=torch.finfo(args.x.dtype).eps, atol=1e-4)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "l2_norm"])
@pytest.mark.parametrize(("where", "kernel"), PLACES[1:])
def test_norms_of_adjacent_rows(where: str, kernel: str, op: str) -> None:
    """Rows that are the columns of a matrix: each has gaps, while neighbours are adjacent."""
    desc = build(op, (70, 40))
    whole = [o.name for o in desc.operands() if o.shape == (70, 40)]
    plan = required(desc.replace(layouts=dict.fromkeys(whole, tp.Layout.strided(unit_axis=0))), kernel, target(where))
    assert check_plan(plan).compared >= 70 * 40


@pytest.mark.parametrize("crossed", ["all", "one"])
@pytest.mark.parametrize(
    "op", [f"{norm}{way}" for norm in ("rms_norm", "layer_norm", "l2_norm") for way in ("", "_backward")]
)
@pytest.mark.parametrize("where", [pytest.param(w, marks=getattr(pytest.mark, w)) for w in ("interpret", "gpu")])
def test_many_adjacent_rows(where: str, op: str, crossed: str, constant: SetConstant) -> None:
    """So many that a program walks along several at once, where neighbours are adjacent in some operands."""
    if where == "interpret":
        constant(rows, "ENOUGH", 8)
    shape = (2060 if where == "gpu" else 140, 300)
    desc = build(op, shape)
    whole = [o.name for o in desc.operands() if o.shape == shape][-1 if crossed == "one" else 0 :]
    plan = required(desc.replace(layouts=dict.fromkeys(whole, tp.Layout.strided(unit_axis=0))), "looped", target(where))
    assert "crossed" in plan.launches[0].kernel.__name__
    assert check_plan(plan).compared >= math.prod(shape)


@pytest.mark.parametrize(("n", "element"), [(19, "bf16"), (33, "f32"), (127, "f16"), (257, "f64"), (1030, "bf16")])
@pytest.mark.parametrize("op", ["rms_norm_backward", "layer_norm_backward", "l2_norm_backward"])
@pytest.mark.parametrize("where", [pytest.param(w, marks=getattr(pytest.mark, w)) for w in ("interpret", "gpu")])
def test_rows_that_begin_anywhere_are_divided(where: str, op: str, n: int, element: str) -> None:
    """Into pieces of a power of two, of which the last one is not whole."""
    plan = required(build(op, (70, n), element=element), "rows", target(where))
    pieces, piece = (plan.launches[0].constexprs[name] for name in ("PIECES", "BLOCK"))
    assert piece < n <= pieces * piece < n + piece
    assert check_plan(plan).compared >= 70 * n


@pytest.mark.parametrize(
    ("op", "n", "element", "ahead"),
    [
        ("rms_norm_backward", 127, "f16", True),
        ("layer_norm_backward", 33, "bf16", True),
        ("layer_norm_backward", 255, "f64", False),
    ],
)
@pytest.mark.parametrize("where", [pytest.param(w, marks=getattr(pytest.mark, w)) for w in ("interpret", "gpu")])
def test_gradients_of_residuals_are_loaded_ahead(where: str, op: str, n: int, element: str, ahead: bool) -> None:
    """With dout and x, of rows that begin anywhere, where registers hold all pieces; otherwise a few at a time."""
    plan = required(build(op, (70, n), element=element, residual=True), "rows", target(where))
    assert plan.launches[0].constexprs["AHEAD"] == ahead
    assert check_plan(plan).compared >= 70 * n


def test_most_lanes_of_rows_that_begin_anywhere_have_elements() -> None:
    """A row of 257 elements in 288 lanes, not 512, and rows of 8193 in registers; unless two sums do not fit there."""

    def pieces(op: str, n: int) -> tuple[int, int]:
        constants = (
            required(build(op, (4096, n), element="bf16"), "rows", tp.Target.preset("h200")).launches[0].constexprs
        )
        return constants["PIECES"], constants["BLOCK"]

    assert pieces("rms_norm_backward", 257) == pieces("layer_norm_backward", 257) == (9, 32)
    assert pieces("rms_norm_backward", 8193) == (9, 1024)
    with pytest.raises(tp.Unsupported, match="do not fit in registers"):
        pieces("layer_norm_backward", 8193)


@pytest.mark.parametrize(
    ("op", "shape", "element", "kernel", "launches"),
    [
        ("rms_norm_backward", (64, 256), "bf16", "rows", ["rows"]),
        ("layer_norm_backward", (64, 256), "f32", "rows", ["rows"]),
        ("rms_norm_backward", (16, 16384), "bf16", "split", ["parameters", "finish"]),
        ("rms_norm_backward", (4096, 256), "bf16", "rows", ["rows", "fold"]),
    ],
)
def test_gradients_of_few_rows_are_not_folded(
    op: str, shape: tuple[int, int], element: str, kernel: str, launches: list[str]
) -> None:
    plan = tp.plan(build(op, shape, element=element), target="h200", kernel=kernel)
    assert [launch.kernel.__name__.split("_")[-2] for launch in plan.launches] == launches


@pytest.mark.parametrize(
    ("op", "element", "shape", "kernel"),
    [
        ("l2_norm", "f64", (38247, 5047), "looped"),
        ("l2_norm_backward", "f32", (48, 32639), "split"),
        ("rms_norm_backward", "f32", (112, 24), "rows"),
    ],
)
def test_choices_do_not_count_a_wide_access_twice(op: str, element: str, shape: tuple[int, ...], kernel: str) -> None:
    """Without vectors instructions are the limit; and sums of few columns meet in shared memory in no time."""
    desc = tp.descriptor_types()[op](input_shape=shape, element=element)
    assert tp.plan(desc, target=tp.Target.preset("h200")).sku().kernel == kernel


@pytest.mark.parametrize(
    ("shape", "kernel"), [((96, 271481), "split"), ((370, 262143), "split"), ((7129, 95179), "looped")]
)
def test_long_rows_are_split_unless_many_hide_their_latencies(shape: tuple[int, ...], kernel: str) -> None:
    """Backward, of rows that begin between two vectors, and not at the same element of these: none are read."""
    desc = tp.L2NormBackwardDescriptor(input_shape=shape, element="f16")
    desc = desc.replace(layouts={"x": tp.Layout.strided(unit_axis=1)})
    assert tp.plan(desc, target=tp.Target.preset("h200")).sku().kernel == kernel


def test_strided_rows_backward_are_not_held_where_there_are_many() -> None:
    """A program that holds several is alone on its multiprocessor, and waits for each group."""
    desc = tp.L2NormBackwardDescriptor(input_shape=(401802, 128), element="bf16")
    desc = desc.replace(layouts={"dout": tp.Layout.strided(stride_multiple=2), "dx": tp.Layout(alignment=2)})
    assert tp.plan(desc, target=tp.Target.preset("h200")).sku().kernel == "looped"


@pytest.mark.parametrize(
    ("op", "shape", "element", "transposed", "kernel"),
    [
        ("layer_norm", (535, 8193), "bf16", "", "rows"),
        ("layer_norm", (18582, 32767), "f16", "", "looped"),
        ("rms_norm_backward", (29142, 8193), "f16", "", "rows"),
        ("rms_norm_backward", (15735, 16383), "bf16", "", "looped"),
        ("layer_norm_backward", (13127, 16385), "bf16", "", "looped"),
        ("rms_norm", (301318, 461), "f16", "out", "looped"),
        ("l2_norm", (8192, 6303), "bf16", "out", "split"),
        ("l2_norm_backward", (3720, 6144), "bf16", "", "rows"),
    ],
)
def test_choices_of_odd_rows(op: str, shape: tuple[int, ...], element: str, transposed: str, kernel: str) -> None:
    """By measurements of ``bench/results``: blocks of a loop may be almost empty, programs of a short row cost most."""
    desc = build(op, shape, element=element)
    desc = desc.replace(layouts={transposed: tp.Layout.strided(unit_axis=0)}) if transposed else desc
    assert tp.plan(desc, target=tp.Target.preset("h200")).sku().kernel == kernel


@pytest.mark.parametrize("n", [8193, 16383, 17002, 90001])
@pytest.mark.parametrize("op", norms.OPS)
@pytest.mark.parametrize("where", WHERE)
def test_long_rows_between_vectors_are_read_by_vectors(where: str, op: str, n: int) -> None:
    """From each of a vector's elements on; with elements of the first and last vector alone, and with neither."""
    plan = tp.plan(build(op, (9, n), element="f16"), target=target(where), kernel="looped")
    assert "shifted" in plan.launches[0].kernel.__name__
    assert check_plan(plan, runs=1 if where == "interpret" else 2).compared


@pytest.mark.interpret
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("op", norms.OPS)
def test_vectors_do_not_reach_behind_the_last_row(op: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tp.plan(build(op, (rows, 8193), element="f16"), target=target("interpret"), kernel="looped")
    assert "shifted" in plan.launches[0].kernel.__name__
    assert reads_within_operands(plan, monkeypatch)


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("where", WHERE)
def test_bits_do_not_depend_on_where_a_row_begins(where: str, offset: float) -> None:
    """Equal rows, that begin at each element of a vector; also ones that begin unlike their rest, and are read twice
    for their statistics."""
    x = torch.randn(1, 8193, generator=torch.Generator().manual_seed(0))
    x[:, :1500] += offset
    args = normalised(x.half().expand(9, -1).contiguous(), where, "looped")
    for found in (args.out, args.mean, args.rstd):
        assert torch.equal(found, found[:1].expand_as(found))
