"""cached_rotary: rotary, whose launch also writes keys and values into paged caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import compiles, places
from proofs import target
from torch.distributed.tensor import Replicate, distribute_tensor

import triplan as tp
import triplan.functional as F  # noqa: N812
from triplan.testing import args_for, check_plan
from triplan.testing.duplicates import check_any
from triplan.testing.oracle import bit_oracle

Tensor = torch.Tensor
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FREQUENCIES = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
PAGES, PAGE_SIZE = 3, 4
CACHES = ("k_cache", "v_cache")
STRIDED = ("q", "q_out", "k", "v", "slots", *CACHES)
#: Pages of heads of tokens, where the heads are an axis of their own before the tokens.
TRANSPOSED = dict.fromkeys(CACHES, tp.Layout.strided(unit_axis=3, alignment=4))
CASES: dict[str, dict[str, Any]] = {
    "angles": {"element": "bf16"},
    "table": {"table_rows": 9, "positions": True, "v_dim": 6, "eps": 1e-6, "slot_element": "i32"},
    "interleaved": {"pairs": "interleaved", "table_rows": 5, "v_dim": 20, "eps": 1e-6},
    "strided": {"positions": True, "v_dim": 11, "layouts": dict.fromkeys(STRIDED, "strided")},
    "transposed": {"eps": 1e-6, "rotary_dim": None, "layouts": TRANSPOSED},
    "reported": {"table_rows": 9, "positions": True, "out_of_bounds": "error", "pairs": "interleaved"},
    "clamped": {"table_rows": 9, "positions": True, "out_of_bounds": "clamp", "element": "f16"},
    "no values": {"v_dim": 0, "eps": 1e-6},
    "no pages": {"pages": 0, "out_of_bounds": "error"},
    "no heads": {"q_shape": (2, 5, 0, 8), "k_heads": 0, "out_of_bounds": "error"},
    "no tokens": {"q_shape": (2, 0, 3, 8)},
    "many tokens": {"q_shape": (2, 70, 1, 8), "pages": 50, "slot_element": "i32"},
}


def described(**fields: Any) -> tp.CachedRotaryDescriptor:
    usual = {"q_shape": (2, 5, 3, 8), "k_heads": 2, "rotary_dim": 4, "pages": PAGES, "page_size": PAGE_SIZE}
    return tp.CachedRotaryDescriptor(**{"element": "f32", **usual, **fields})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("where", "kernel"), places("tiles", "ordered"))
def test_plans_keep_their_word(where: str, kernel: str | None, case: str) -> None:
    """Of slots that repeat, that are negative and beyond the end; then of slots each of its own."""
    plan = tp.plan(described(**CASES[case]), target=target(where), preference=tp.PlanPreference(kernel=kernel))
    assert check_plan(plan, runs=2).runs >= 2


@pytest.mark.parametrize(
    ("required", "kernel", "launches", "workspace"),
    [
        ({}, "tiles", 1, 0),
        ({"deterministic": True}, "ordered", 3, 4 * PAGES * PAGE_SIZE),
        ({"batch_invariant": True}, "ordered", 3, 4 * PAGES * PAGE_SIZE),
    ],
)
def test_determinism_costs_two_launches(required: dict[str, bool], kernel: str, launches: int, workspace: int) -> None:
    preference = tp.PlanPreference(**{"deterministic": False, **required})
    plan = tp.plan(described(), target=tp.Target.sm90a(), preference=preference)
    assert (plan.sku().kernel, len(plan.launches), plan.workspace_size()) == (kernel, launches, workspace)


@compiles
@pytest.mark.parametrize("kernel", ["tiles", "ordered"])
def test_more_than_two_to_the_31st_slots(kernel: str) -> None:
    """Of fewer tokens: a program takes heads of q, or of k, to places that have one type."""
    desc = described(pages=1 << 29, page_size=5, out_of_bounds="error", table_rows=9, positions=True)
    plan = tp.plan(desc, target=tp.Target.sm90a(), preference=tp.PlanPreference(kernel=kernel))
    assert [x.spill_bytes for x in plan.compile()] == [0] * len(plan.launches)


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", ["half", "interleaved"])
def test_large_heads_and_groups(pairs: Any) -> None:
    """Vectors, several blocks of tokens and groups of heads, angles in a loop, values longer than a tile."""
    shape = {"q_shape": (3, 130, 20, 160), "k_heads": 9, "rotary_dim": 128, "pages": 40, "page_size": 16}
    desc = described(**shape, pairs=pairs, element="bf16", eps=1e-6, v_dim=600)
    check_plan(tp.plan(desc, target=target("gpu")))
    check_plan(tp.plan(desc, target=target("gpu"), preference=tp.PlanPreference(deterministic=True)))
    looked_up = {"positions": True, "table_rows": 40, "out_of_bounds": "error", "slot_element": "i32"}
    check_plan(tp.plan(desc.replace(**looked_up, layouts=TRANSPOSED), target=target("gpu")))
    heads_first = tp.Layout.strided(unit_axis=3, alignment=16, stride_multiple=8)
    many = desc.replace(q_shape=(1, 8192, 32, 128), k_heads=8, v_dim=None, pages=600)
    check_plan(tp.plan(many.replace(layouts=dict.fromkeys(("q", "k", "v", *CACHES), heads_first))))


@pytest.mark.parametrize("name", CACHES)
def test_the_check_of_repeated_slots_can_fail(name: str) -> None:
    """Any of the rows of a slot is right. A row that is off by more than the tolerance is not, nor is an element of a
    row that no token has if it is off at all."""
    desc = described(v_dim=6)
    slots = torch.tensor([[5, 5, -1, 2, 12], [5, 0, 2, 2, -7]])
    args = args_for(desc, given={"slots": slots}).host()
    plan = tp.plan(desc, target=tp.Target.sm90a(), preference=tp.PlanPreference(deterministic=False))
    g = plan.precision_guarantee(name)

    def cache_of(tokens: Tensor) -> Tensor:
        """The cache, of which only ``tokens`` are written."""
        some = torch.full((10,), -1).index_copy(0, tokens, slots.flatten()[tokens])
        return bit_oracle(desc, SimpleNamespace(**{**vars(args), "slots": some.reshape(2, 5)}))[name]

    every = torch.arange(10)
    for tokens in (every, every[every != 5], torch.tensor([0, 3, 6])):  # slot 5 from token 5, 1 and 0
        check_any(desc, args, name, cache_of(tokens), g)
    for at, wrong in (((1, 1, 0, 0), 1e-3), ((0, 1, 1, 3), 1e-7)):
        off = cache_of(every)
        off[at] *= 1 + wrong
        with pytest.raises(AssertionError, match=r"none of the writes|as before"):
            check_any(desc, args, name, off, g)
    with pytest.raises(AssertionError, match="none of the writes"):
        check_any(desc, args, name, cache_of(every[every != 6]), g)


def given(device: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Two sequences of 5 tokens, with 4 heads of q and 2 of k, whose caches are the heads of pages, transposed."""
    g = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 6), "k_cache": (3, 2, 4, 8), "v_cache": (3, 2, 4, 6)}
    drawn = {name: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}
    drawn |= {name: drawn[name].transpose(1, 2) for name in CACHES}
    slots = torch.randperm(PAGES * PAGE_SIZE, generator=g)[:10].reshape(2, 5)
    slots[0, 2], slots[1, 1] = -1, -9
    return {name: t.to(device) for name, t in {**drawn, "slots": slots}.items()}


def written(cache: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """``cache`` (pages, page_size, heads, elements) with ``rows`` (batch, heads, sequence, elements), by torch."""
    kept, found = slots >= 0, cache.clone()
    found[slots[kept] // PAGE_SIZE, slots[kept] % PAGE_SIZE] = rows.transpose(1, 2)[kept]
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("seq_dim", [-2, -3])
def test_it_is_rotary_and_then_index_put(seq_dim: int, normed: bool, device: str) -> None:
    """And no other bit of the caches changes, be it of a NaN."""
    t = given(device, torch.float32)
    t["k_cache"].view(torch.int32)[:] = 0x7FC12345
    how: dict[str, Any] = {"inv_freq": FREQUENCIES.float().to(device), "seq_dim": seq_dim}
    if normed:
        how |= {"q_weight": t["q"][0, 0, 0], "k_weight": t["k"][1, 0, 0], "eps": 1e-3}
    heads = [t[name].transpose(1, 2) if seq_dim == -3 else t[name] for name in ("q", "k", "v")]
    q, k = F.rotary(heads[0], heads[1], **how)
    rows = {"k_cache": k.transpose(1, 2) if seq_dim == -3 else k, "v_cache": t["v"]}
    wanted = {name: written(t[name], rows[name], t["slots"]) for name in CACHES}
    versions = [t[name]._version for name in CACHES]
    assert torch.equal(F.cached_rotary(*heads, *(t[name] for name in CACHES), t["slots"], **how), q)
    for name in CACHES:
        assert torch.equal(t[name].view(torch.int32), wanted[name].view(torch.int32))
    assert all(t[name]._version > version for name, version in zip(CACHES, versions, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_of_one_sequence_and_both_caches_in_one_tensor(device: str) -> None:
    """As engines have them: (tokens, heads, elements), slots (tokens,) of i32, and (pages, 2, page_size, ...)."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(7, heads, 8, generator=g).to(device) for heads in (4, 2, 2))
    slots = torch.tensor([4, 5, 6, 7, 0, -1, 11], dtype=torch.int32, device=device)
    both = torch.zeros(PAGES, 2, PAGE_SIZE, 2, 8, device=device)
    angles = torch.arange(7, device=device).float()[:, None] * FREQUENCIES.float().to(device)
    found = F.cached_rotary(q, k, v, both[:, 0], both[:, 1], slots, angles.cos(), angles.sin(), seq_dim=-3)
    rotated, keys = F.rotary(q, k, angles.cos(), angles.sin(), seq_dim=-3)
    assert torch.equal(found, rotated)
    for cache, rows in ((both[:, 0], keys), (both[:, 1], v)):
        wanted = torch.zeros(PAGES * PAGE_SIZE, 2, 8, device=device)
        wanted[slots[slots >= 0].long()] = rows[slots >= 0]
        assert torch.equal(cache.reshape(wanted.shape), wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_registration(device: str) -> None:
    t = given(device)
    frequencies = FREQUENCIES.to(device)
    weights = (t["q"][0, 0, 0].clone(), t["k"][0, 0, 0].clone(), 1e-6)
    how = (None, None, frequencies, None, 1.0, None, False, True, False)
    torch.library.opcheck(torch.ops.triplan.cached_rotary.default, (*t.values(), *weights, *how))

    def ours(**given: Tensor) -> Tensor:
        return F.cached_rotary(**given, inv_freq=frequencies) + 1

    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    other = {name: x.clone() for name, x in t.items()}
    torch.testing.assert_close(compiled(**t), ours(**other))
    torch.testing.assert_close(t, other)


@pytest.mark.parametrize("device", DEVICES)
def test_indices_out_of_bounds(device: str) -> None:
    t = given(device)
    how: dict[str, Any] = {"cos": FREQUENCIES.to(device).expand(5, 4), "sin": FREQUENCIES.to(device).expand(5, 4)}
    at = torch.tensor([0, 1, 2, 3, 4], device=device)
    before = {name: t[name].clone() for name in CACHES}
    far = torch.full_like(t["slots"], PAGES * PAGE_SIZE)
    with pytest.raises(IndexError, match=r"slots\[0, 0\] = 12 is out of bounds for extent 12"):
        F.cached_rotary(**{**t, "slots": far}, **how, positions=at, check_indices=True)
    assert all(torch.equal(t[name], before[name]) for name in CACHES)
    with pytest.raises(IndexError, match=r"positions\[0, 3\] = 5 is out of bounds for extent 5"):
        F.cached_rotary(**t, **how, positions=torch.where(at == 3, 5, at), check_indices=True)
    F.cached_rotary(**t, **how, positions=at, check_indices=True)


T = given("cpu")
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one weight": ({"q_weight": T["q"][0, 0, 0]}, "weights of both q and k"),
    "v of other heads": ({"v": T["q"]}, r"expected v of \[2, 2, 5, 'any'\]"),
    "a cache of other heads": ({"k_cache": T["q"]}, r"k_cache of \(pages, page_size, 2, 8\)"),
    "other pages of values": ({"v_cache": T["v_cache"][:2]}, r"v_cache of \(pages, page_size, 2, 6\)"),
    "a cache of another dtype": ({"v_cache": T["v_cache"].float()}, "but got .* torch.float32"),
    "a cache whose rows overlap": ({"k_cache": T["k_cache"][:1].expand(3, 4, 2, 8)}, "single memory location"),
    "slots of one sequence": ({"slots": T["slots"][0]}, r"slots are \[5\]; expected \(2, 5\)"),
    "slots of another dtype": ({"slots": T["slots"].short()}, "int32/int64"),
    "no angles": ({"inv_freq": None}, "either cos and sin, or inv_freq"),
    "a gradient": ({"k": T["k"].clone().requires_grad_()}, "has no gradient, but one of them requires grad"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    change, message = REFUSED[case]
    before = {name: T[name].clone() for name in CACHES}
    with pytest.raises(RuntimeError, match=message):
        F.cached_rotary(**{**T, "inv_freq": FREQUENCIES, **change})
    assert all(torch.equal(T[name], before[name]) for name in CACHES)


def test_transforms_and_values_within_the_cache_are_refused() -> None:
    def each(q: Tensor) -> Tensor:
        return F.cached_rotary(**{**T, "q": q}, inv_freq=FREQUENCIES)

    with pytest.raises(RuntimeError, match=r"within torch\.func transforms"):
        torch.func.vmap(each)(T["q"].unsqueeze(0))
    within = T["v_cache"].transpose(1, 2).flatten()[:120].view(2, 2, 5, 6)
    with pytest.raises(tp.TriplanError, match="v_cache shares memory with v"):
        F.cached_rotary(**{**T, "v": within}, inv_freq=FREQUENCIES)


def test_dtensors_are_refused() -> None:
    """A rank that wrote its part alone, or all of a copy, would be wrong without a word."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        q = distribute_tensor(T["q"], mesh, [Replicate()])
        with pytest.raises(RuntimeError, match=r"takes no DTensors; pass each rank's part"):
            F.cached_rotary(**{**T, "q": q}, inv_freq=FREQUENCIES)
    finally:
        dist.destroy_process_group()
