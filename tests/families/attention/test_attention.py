"""Attention: the reference against torch, kernels against the reference, and what a careless formula gets wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import H200, WHERE, places, repeats, required
from cases.attention import steep
from proofs import run, target
from torch.nn import functional

import triplan as tp
from triplan.backends.triton.attention import wgmma_stored
from triplan.sku.facts import forget_facts
from triplan.testing import args_for, check_plan, check_refusals
from triplan.testing.oracle import magnitudes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the hardware does silently
OPS = ("attention", "attention_backward")
SIZES: dict[str, Any] = {"batch": 2, "queries": 9, "keys": 21, "heads": 4, "key_heads": 2, "head_dim": 16}
#: What changes a kernel, or the keys that it walks over.
CASES: dict[str, dict[str, Any]] = {
    "all keys": {},
    "end": {"causal": True},
    "start": {"causal": True, "align": "start"},
    "more queries than keys": {"causal": True, "queries": 21, "keys": 9},
    "window": {"window_left": 3, "window_right": 2},
    "softcap": {"softcap": 2.0, "causal": True},
    "bool mask": {"mask": "bool"},
    "f32 mask": {"mask": "f32", "window_left": 5},
    "no key": {"keys": 0},
    "no query": {"queries": 0},
    "widths": {"head_dim": 40, "value_dim": 24},
    "packed": {"batch": 1, "sequences": 4, "causal": True, "queries": 30, "keys": 40},
    "packed, start": {"batch": 1, "sequences": 2, "align": "start", "window_left": 3, "softcap": 2.0},
    "packed, tiles": {"batch": 1, "sequences": 3, "heads": 2, "queries": 200, "keys": 90},
    "slopes and a sink": {"slopes": True, "sink": True, "align": "start", "window_right": 9},
    "packed, slopes and a sink": {"batch": 1, "sequences": 2, "slopes": True, "sink": True, "causal": True},
    "dropout": {"dropout": True, "keys": 22},
    "dropout, most options": {"dropout": True, "causal": True, "softcap": 2.0, "mask": "f32", "sink": True},
    "packed, dropout": {"batch": 1, "sequences": 3, "dropout": True, "causal": True, "queries": 30, "keys": 41},
    "several tiles": {"queries": 140, "keys": 150, "heads": 2, "causal": True, "window_left": 90},
}
PLACES = places("tiles")


def build(op: str, element: str = "f32", strided: bool = False, **fields: Any) -> Any:
    """``strided``: any strides; 0 too, but of what follows from other inputs and could not, if its values repeated."""
    if op == "attention_backward":
        fields.pop("sink", None)  # lse has it
    desc = tp.descriptor_types()[op](**{**SIZES, "element": element, **fields})
    if not strided:
        return desc
    layouts: dict[str, Any] = {o.name: "strided" for o in desc.operands() if o.is_tensor}
    for o in desc.operands():
        if o.name in ("out", "lse"):
            layouts[o.name] = tp.Layout.strided(unit_axis=len(o.shape) - 1, stride_multiple=2)
    return desc.replace(layouts=layouts)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_every_case(where: str, kernel: str | None, op: str, case: str) -> None:
    """Elements and layouts take turns with the cases, but on a GPU."""
    elements, number = ("bf16", "f32", "f16", "f64", "tf32", "tf32x3"), list(CASES).index(case)
    for element in elements if where == "gpu" else (elements[number % 6], elements[(number + 1) % 6]):
        options = {"element": "f32", "math": element} if element.startswith("tf32") else {"element": element}
        fields = CASES[case]
        if element == "f64" and where != "cpu" and fields.get("dropout") and "mask" in fields:
            fields = {**fields, "mask": "f64"}  # Triton's compiler fails with narrower ones
        if (element, case) != ("f64", "bool mask") or where == "cpu":  # likewise
            desc = build(op, strided=(number + len(element)) % 2 == 0, **options, **fields)
            plan = required(desc, kernel, target(where))
            check_plan(plan, runs=repeats(plan), seed=number)


@pytest.mark.parametrize(
    ("width", "value", "case"),
    [
        (80, 80, "window"),
        (96, 20, "f32 mask"),
        (146, 146, "packed"),
        (192, 96, "dropout"),
        (20, 146, "softcap"),
        (65, 129, "packed, slopes and a sink"),
        (250, 250, "more queries than keys"),
    ],
)
@pytest.mark.parametrize("element", ["f64", "f32", "f16"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("where", WHERE)
def test_heads_of_several_chunks_of_columns(
    where: str, op: str, element: str, width: int, value: int, case: str
) -> None:
    """The last chunk is narrower, and a part of it may lie beyond the head."""
    fields = {**CASES[case], "head_dim": width, "value_dim": value}
    if element == "f64" and "mask" in fields:
        fields["mask"] = "f64"
    check_plan(required(build(op, element, strided=width % 2 == 1, **fields), "tiles", target(where)), runs=1)


@pytest.mark.parametrize("case", [c for c in CASES if "dropout" not in c])
@pytest.mark.parametrize("where", WHERE)
def test_every_case_of_large_tiles(where: str, case: str) -> None:
    number = list(CASES).index(case)
    desc = build("attention", strided=number % 2 == 0, math=(None, "tf32x3")[number % 2], **CASES[case])
    check_plan(required(desc, "large_tiles", target(where)), runs=1, seed=number)


@pytest.mark.parametrize(
    ("batch", "n", "heads", "width", "causal", "kernel"),
    [
        (2, 300, 4, 128, False, "tiles"),
        (2, 300, 4, 40, True, "tiles"),
        (2, 21, 4, 40, False, "tiles"),
        (1, 100, 1, 128, False, "tiles"),
        (4, 300, 8, 64, False, "large_tiles"),
        (64, 128, 12, 64, False, "large_tiles"),
        (8, 1024, 16, 32, False, "large_tiles"),
        (4, 2048, 16, 128, True, "large_tiles"),
    ],
)
def test_f32_has_large_tiles_where_they_fill_the_card(
    batch: int, n: int, heads: int, width: int, causal: bool, kernel: str
) -> None:
    """As they were measured on an H200. Where bits must not depend on the batch, nor may the choice."""
    sizes = {"batch": batch, "queries": n, "keys": n, "heads": heads, "key_heads": heads, "head_dim": width}
    desc = build("attention", causal=causal, align="start", **sizes)
    assert tp.plan(desc, target=H200).sku().kernel == kernel
    assert tp.plan(desc, target=H200, batch_invariant=True).sku().kernel == "large_tiles"


@pytest.mark.parametrize(
    ("element", "batch", "n", "heads", "key_heads", "width", "causal", "kernel"),
    [
        ("bf16", 23, 63, 12, 12, 96, True, "tiles"),
        ("f16", 155, 65, 1, 1, 80, False, "wgmma"),
        ("f16", 1, 17, 32, 4, 64, False, "tiles"),
        ("bf16", 6, 2049, 43, 43, 128, True, "wgmma"),
        ("bf16", 4, 4096, 32, 32, 128, True, "wgmma_stored"),
        ("bf16", 4, 4096, 32, 8, 128, True, "wgmma"),
    ],
)
def test_the_backward_has_the_kernel_that_was_fastest(
    element: str, batch: int, n: int, heads: int, key_heads: int, width: int, causal: bool, kernel: str
) -> None:
    """In bench/results/anywhere-attention-* and attention-*."""
    sizes = {"batch": batch, "queries": n, "keys": n, "heads": heads, "key_heads": key_heads, "head_dim": width}
    desc = build("attention_backward", element, causal=causal, align="start", **sizes)
    assert tp.plan(desc, target=H200).sku().kernel == kernel


def test_numerics_ids_of_the_backward_have_its_version() -> None:
    """Plans of equal ids give equal bits, also those of two releases: an id tells new bits as the version does."""
    sku = required(build("attention_backward", math="tf32", value_dim=40), "tiles", H200).sku()
    assert str(sku.numerics_id).endswith(f".v{sku.version}")


@pytest.mark.parametrize("case", [c for c in CASES if "no" not in c and "packed" not in c and "dropout" not in c])
def test_the_reference_is_torchs(case: str) -> None:
    """With a mask that says in so many words which keys a query sees."""
    desc = build("attention", "f64", **CASES[case])
    g = torch.Generator().manual_seed(0)
    values = {o.name: torch.randn(o.shape, generator=g).double() for o in desc.operands() if o.is_tensor}
    at = torch.arange(desc.keys) - torch.arange(desc.queries)[:, None]
    at = at - (desc.keys - desc.queries if desc.align == "end" else 0)
    bias = torch.zeros(at.shape, dtype=torch.float64)
    if desc.causal:
        bias[at > 0] = -torch.inf
    if desc.window_right is not None:
        bias[at > desc.window_right] = -torch.inf
    if desc.window_left is not None:
        bias[at < -desc.window_left] = -torch.inf
    if desc.mask == "bool":
        values["mask"] = values["mask"] > -1
        bias = torch.where(values["mask"], bias, -torch.inf)
    elif desc.mask == "f32":
        values["mask"] = values["mask"].float()
        bias = bias + values["mask"]
    if desc.slopes:
        bias = bias + values["slopes"][:, None, None] * at
    got = run(tp.plan(desc, target="cpu"), values)
    q, k, v = (values[name].transpose(1, 2) for name in "qkv")
    if desc.sink:  # a key of score 0 and its bias
        k, v = (torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in (k, v))
        bias = torch.cat((bias, values["sink"][:, None, None].expand(4, desc.queries, 1)), -1)
    if desc.softcap:  # torch has none
        s = desc.softcap * torch.tanh(q @ k.repeat_interleave(2, 1).mT / 4 / desc.softcap) + bias
        out = torch.softmax(s, -1).nan_to_num(0) @ v.repeat_interleave(2, 1)
    else:
        out = functional.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
    torch.testing.assert_close(got["out"], out.transpose(1, 2))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_packed_sequences_are_those_that_stand_alone(where: str, kernel: str | None, op: str) -> None:
    """Packed alone they have the same bits, padded the same values; rows of no sequence meet nothing."""
    fields: dict[str, Any] = {"batch": 1, "causal": True, "window_left": 20}
    desc = build(op, sequences=4, **fields | {"queries": 50, "keys": 80})
    starts = {"query_starts": torch.tensor([3, 8, 8, 41, 45]), "key_starts": torch.tensor([0, 20, 31, 70, 70])}
    given = vars(args_for(desc, given={name: t.int() for name, t in starts.items()}).host())
    sides = {name: "key_starts" if name in ("k", "v", "dk", "dv") else "query_starts" for name in given}

    def part(values: dict[str, Any], s: int) -> dict[str, Any]:
        found = {}
        for name, t in values.items():
            if name in sides and isinstance(t, torch.Tensor) and t.dim() > 1:
                first, end = starts[sides[name]][s : s + 2].tolist()
                found[name] = t.narrow(2 if name == "lse" else 1, first, end - first).contiguous()
        return found

    def planned(**changes: Any) -> Any:
        return required(desc.replace(**changes), kernel, target(where))

    got = run(planned(), given)
    for s in range(4):
        own, inputs = part(got, s), part(given, s) | {"scale": given["scale"]}
        m, n = inputs["q"].size(1), inputs["k"].size(1)
        ends = {"query_starts": torch.tensor([0, m]).int(), "key_starts": torch.tensor([0, n]).int()}
        alone = run(planned(sequences=1, queries=m, keys=n), inputs | ends)
        for name, t in alone.items():
            assert where == "cpu" or torch.equal(own[name], t)
        torch.testing.assert_close(own, run(planned(sequences=None, queries=m, keys=n), inputs))
    for name, t in got.items():
        rest = torch.cat((t[:, :3], t[:, 45:]), 1) if name in ("out", "dq") else t[:, 70:]
        assert not (rest if name != "lse" else torch.cat((t[..., :3], t[..., 45:]), -1).exp()).any()


@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_starts_that_make_no_sense_touch_nothing_else(where: str, kernel: str | None) -> None:
    """Beyond the rows, and decreasing: what lies around the operands stays as it is, and nothing faults."""
    for op in OPS:
        desc = build(op, batch=1, sequences=3)
        wild = torch.tensor([2**31 - 1, -(2**31), 5, 1], dtype=torch.int32)
        placed = args_for(desc, target(where).device_type)
        placed.args.query_starts.copy_(wild)
        placed.args.key_starts.copy_(wild.flip(0))
        for region in placed.regions.values():
            region.remember()
        plan = required(desc, kernel, target(where))
        if where != "cpu":
            plan.run(placed.args, placed.workspace(plan))
            placed.assert_intact()


@pytest.mark.parametrize(
    ("element", "score", "rtol"), [("f64", 57.0, 1e-12), ("f64", 900.0, 1e-11), ("f32", 36.0, 1e-4)]
)
@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_slopes_near_the_softcap(where: str, kernel: str | None, element: str, score: float, rtol: float) -> None:
    """1 - tanh(x)**2 has no correct digit there. A scale that is an integer is as exact as any."""
    math = "tf32x3" if element == "f32" else None
    desc = build(
        "attention_backward", element, math=math, batch=1, queries=2, keys=3, heads=1, key_heads=1, softcap=3.0
    )
    values: dict[str, Any] = {o.name: torch.zeros(o.shape).double() for o in desc.operands() if o.is_tensor}
    values["q"][0, :, 0, 0] = torch.tensor([score, -score])
    values["k"][0, :, 0, 0] = torch.tensor([1.0, 0.5, -1.0])
    values["v"][0, :, 0, 0] = torch.tensor([1.0, 2.0, 4.0])
    values["dout"][..., 0] = 1
    q, k, v = (values[name][0, :, 0, 0] for name in "qkv")
    x = q[:, None] * k / 3
    s = 3 * x.tanh()
    values["lse"] = s.logsumexp(-1)[None, None]
    p = s.softmax(-1)
    values["out"][0, :, 0, 0] = p @ v
    ds = p * (v - (p @ v)[:, None]) / x.cosh() ** 2
    values = {name: t.to(desc.element.torch) for name, t in values.items()} | {"scale": 1}
    got = run(required(desc, kernel, target(where)), values)
    for name, wanted in (("dq", ds @ k), ("dk", ds.mT @ q)):
        torch.testing.assert_close(got[name][0, :, 0, 0].double(), wanted, rtol=rtol, atol=0)


@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_infinities_and_nan_stay_in_their_rows(where: str, kernel: str | None) -> None:
    """A row of q that holds NaN or makes a score infinite is NaN; scores of -inf alone make 0 and -inf."""
    desc = build("attention", batch=1, heads=1, key_heads=1, queries=4, keys=3, mask="f32")
    values = {o.name: torch.ones(o.shape) for o in desc.operands() if o.is_tensor and o.role == "input"}
    values["q"][0, 0, 0, 0], values["q"][0, 1, 0, 0] = torch.nan, torch.inf
    values["mask"][0, 0, 2] = -torch.inf
    got = run(required(desc, kernel, target(where)), values)
    assert got["out"][0, :2].isnan().all()
    assert not got["out"][0, 2].any()
    assert (got["out"][0, 3] == 1).all()
    assert got["lse"][0, 0, :2].isnan().all()
    assert got["lse"][0, 0, 2] == -torch.inf


@pytest.mark.parametrize("math", [None, "tf32x3"])
@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_f32_factors_keep_all_their_bits(where: str, kernel: str | None, math: str | None) -> None:
    """Of one key, the result is its value, and lse its score: products with 1, which need all three parts."""
    desc = build("attention", batch=1, heads=2, key_heads=2, queries=1, keys=1, head_dim=160, math=math)
    values = {name: torch.randn(1, 1, 2, 160, generator=torch.Generator().manual_seed(0)) for name in ("k", "v")}
    values["q"] = torch.zeros(1, 1, 2, 160)
    values["q"][..., 150] = values["k"][..., 1, 150] = 1.0
    values["q"][..., 1, 150] = score = 1 / 3
    got = run(required(desc, kernel, target(where)), values | {"scale": 1.0})
    assert torch.equal(got["out"], values["v"])
    torch.testing.assert_close(got["lse"][0, 0], values["k"][0, :, 0, 150], rtol=2**-21, atol=0.0)
    torch.testing.assert_close(got["lse"][0, 1], torch.tensor([score]), rtol=2**-21, atol=0.0)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], ids=hex)
@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_f32_nans_of_any_bits_reach_the_result(where: str, kernel: str | None, bits: int) -> None:
    """Also those that rounding to fewer bits turns into 0 or infinity. Of two heads, the other is finite."""
    desc = build("attention", batch=1, heads=2, key_heads=2, queries=3, keys=20, head_dim=16)
    values = {name: torch.ones(1, n, 2, 16) for name, n in (("q", 3), ("k", 20), ("v", 20))}
    values["v"][0, 7, 1] = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    got = run(required(desc, kernel, target(where)), values)
    torch.testing.assert_close(got["out"][:, :, 0], torch.ones(1, 3, 16))
    assert got["out"][:, :, 1].isnan().all()


@pytest.mark.parametrize(("where", "kernel"), PLACES)
def test_steep_scores_do_not_overflow(where: str, kernel: str | None) -> None:
    """Of thousands, growing and falling along the keys: exponentials of what a running maximum has left behind."""
    desc = build("attention", batch=1, heads=2, key_heads=1, queries=2, keys=300, mask="f32")
    values = {o.name: torch.zeros(o.shape) for o in desc.operands() if o.is_tensor and o.role == "input"}
    values["mask"][0, 0], values["mask"][0, 1] = torch.linspace(-3e4, 3e4, 300), torch.linspace(3e4, -3e4, 300)
    values["v"][0, :, 0] = torch.arange(300.0)[:, None]
    got = run(required(desc, kernel, target(where)), values)
    torch.testing.assert_close(got["out"][0, :, :, 0], torch.tensor([[299.0, 0.0]] * 2))
    torch.testing.assert_close(got["lse"][0], torch.full((2, 2), 3e4))


def test_lost_probabilities_of_f64_have_a_tolerance() -> None:
    """What a probability below the smallest number is off by counts in f64 as well, multiplied by what it meets."""
    desc = build("attention_backward", "f64", batch=1, heads=1, key_heads=1, queries=1, keys=20000, slopes=True)
    terms = magnitudes(desc, args_for(desc, "cpu", 0).args)
    assert bool((terms["dk"] > 0).all())
    assert bool((terms["dv"] > 0).all())


#: What decides the tiles and blocks of the Hopper kernels, and which of them are masked.
HOPPER: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "all keys": {},
    "odd lengths": {"queries": 333, "keys": 517},
    "odd lengths, end": {"queries": 333, "keys": 589, "causal": True},
    "odd lengths, start": {"queries": 517, "keys": 333, "causal": True, "align": "start"},
    "queries that see no key": {"queries": 517, "keys": 133, "causal": True},
    "few": {"queries": 3, "keys": 5, "causal": True, "align": "start"},
    "one query": {"queries": 1, "keys": 700},
    "widths": {"head_dim": 80, "value_dim": 40, "causal": True},
    "narrow": {"head_dim": 32, "value_dim": 48},
    "wide, narrow values": {"head_dim": 200, "value_dim": 40, "causal": True},
    "wide values": {"head_dim": 32, "value_dim": 136},
}
#: Kernels of an op, and the narrowest and widest heads that they take.
HOPPER_KERNELS: dict[tuple[str, str], tuple[int, int]] = {
    ("attention", "wgmma"): (1, 256),
    ("attention_backward", "wgmma"): (1, 128),
    ("attention_backward", "wgmma_stored"): (1, 128),
    ("attention_backward", "wgmma_wide"): (129, 256),
}


def hopper_problems() -> Iterator[tuple[str, str, int, str]]:
    for (op, kernel), (narrowest, widest) in HOPPER_KERNELS.items():
        for width in (64, 128, 192, 256):
            for case, fields in HOPPER.items():
                own = max(fields.get("head_dim", width), fields.get("value_dim", 0))
                # A case with a width of its own is one problem.
                if narrowest <= own <= widest and (width == 64 or "head_dim" not in fields):
                    yield op, kernel, width, case


@pytest.mark.gpu
@pytest.mark.skipif("torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0)")
@pytest.mark.parametrize(("op", "kernel", "width", "case"), list(hopper_problems()))
def test_hopper_kernels(op: str, kernel: str, width: int, case: str) -> None:
    """On few multiprocessors, so that a program has several tiles; also with heads before rows in memory."""
    number = list(HOPPER).index(case)
    few = tp.Target.current().replace(sm_count=1 + number % 4)
    fields = {"queries": 384, "keys": 384, "head_dim": width, **HOPPER[case]}
    heads_first = tp.Layout.strided(unit_axis=3, alignment=16, stride_multiple=8)
    for element, strided in (("bf16", False), ("f16", True)):
        desc = build(op, element, **fields)
        layouts = {o.name: heads_first for o in desc.operands() if len(o.shape) == 4} if strided else {}
        for seed in range(3):  # other scales: 0, below 0
            check_plan(required(desc.replace(layouts=layouts), kernel, few), runs=2, seed=seed)


@pytest.mark.gpu
@pytest.mark.skipif("torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0)")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [64, 128, 192, 256])
@pytest.mark.parametrize("element", ["bf16", "f16"])
def test_steep_scores_of_hopper(element: str, width: int, causal: bool) -> None:
    """Bases of exponentials stay behind maxima: within the tolerance where some warps change them and others do not."""
    sizes: dict[str, Any] = {"queries": 1000, "keys": 1000, "heads": 2, "key_heads": 2, "head_dim": width}
    desc = build("attention", element, causal=causal, **sizes)
    plan = required(desc, "wgmma", tp.Target.current().replace(sm_count=7))
    for seed in range(3):
        given = steep(1000, 1000, width, desc.element.torch, seed)
        check_plan(plan, passes=("unit",), seed=seed, given=given)


@pytest.mark.gpu
@pytest.mark.skipif("torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0)")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("ds", "sums", "parts"), [(2.0, 0, 1), (1.0, 1, 2), (0.6, 1, 4)], ids=["1", "2", "4"])
def test_parts_of_stored_ds(
    ds: float, sums: int, parts: int, width: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key head at a time; one query head of each group; half of its rows: right, with the bits of all at once."""
    sizes: dict[str, Any] = {"batch": 2, "heads": 4, "key_heads": 2, "queries": 900, "keys": 900, "causal": causal}
    desc = tp.AttentionBackwardDescriptor(**sizes, head_dim=width, element="bf16", align="start")
    few = tp.Target.current().replace(sm_count=2)
    whole = required(desc, "wgmma_stored", few)
    drawn = args_for(desc, "cpu", 0).args
    values = {o.name: getattr(drawn, o.name) for o in desc.operands() if not o.is_written}
    wanted = run(whole, values)
    of_head = wgmma_stored.stored_blocks(desc, 0, wgmma_stored.blocks_of(desc)) * wgmma_stored.BLOCK_BYTES
    budget = int(ds * of_head) + sums * wgmma_stored.sums_bytes(desc, 1)
    monkeypatch.setattr(wgmma_stored, "BUDGET", budget)
    forget_facts()
    try:
        assert len(wgmma_stored.known_division(desc, few).parts) == parts
        split = required(desc, "wgmma_stored", few)
        check_plan(split, runs=3)
        got = run(split, values)
    finally:
        forget_facts()
    assert all(torch.equal(got[name], wanted[name]) for name in ("dq", "dk", "dv"))


@pytest.mark.interpret
@pytest.mark.parametrize("op", OPS)
def test_refusals(op: str) -> None:
    assert check_refusals(required(build(op, mask="f32"), "tiles", target("interpret"))) > 50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_heads": 3}, "key_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"causal": True, "window_right": 1}, "window_right"),
        ({"mask": "i8"}, "mask"),
        ({"math": "f32"}, "math"),
        ({"softcap": -1.0}, "softcap"),
        ({"sequences": 2}, "batch = 1"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_fields_that_make_no_sense(change: dict[str, Any], message: str) -> None:
    with pytest.raises(tp.InvalidProblem, match=message):
        build("attention", **change)


@pytest.mark.parametrize(("fields", "message"), [({"head_dim": 128}, "wider ones"), ({"keys": 0}, "no keys")])
def test_what_the_backward_of_wide_heads_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(tp.Unsupported, match=message):
        required(build("attention_backward", "bf16", **{"head_dim": 256, **fields}), "wgmma_wide", H200)


@pytest.mark.parametrize(
    ("kernel", "fields", "message"),
    [
        ("tiles", {"head_dim": 264}, "up to 256"),
        ("tiles", {"element": "f64", "mask": "bool"}, "mask of f64"),
        ("large_tiles", {"head_dim": 200}, "up to 192"),
        ("large_tiles", {"head_dim": 113}, "single elements"),
        ("large_tiles", {"dropout": True}, "dropout"),
        ("large_tiles", {"math": "tf32"}, "products in tf32"),
        ("wgmma", {"causal": True, "element": "bf16"}, "position"),
        ("wgmma", {"softcap": 1.0, "element": "bf16"}, "softcap"),
        ("wgmma", {"window_left": 1, "element": "bf16"}, "window"),
        ("wgmma", {"head_dim": 20, "element": "bf16"}, "20 elements"),
        ("wgmma", {"batch": 1, "sequences": 2, "element": "bf16"}, "packed"),
        ("wgmma", {"slopes": True, "element": "bf16"}, "slopes"),
        ("wgmma", {"dropout": True, "element": "bf16"}, "dropout"),
        ("wgmma", {"sink": True, "element": "bf16"}, "sink"),
        ("wgmma", {"keys": 0, "element": "bf16"}, "no keys"),
    ],
)
def test_what_kernels_refuse(kernel: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(tp.Unsupported, match=message):
        required(build("attention", **fields), kernel, H200)
