"""Rotary embedding: definitions as complex products, layouts, positions, gradients, published scalings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import FAST, compiles, places
from hypothesis import given, settings, strategies as st
from proofs import target

import triplan as tp
import triplan.functional as F  # noqa: N812
from triplan.backends.runtime.launch import Int
from triplan.nn import RotaryEmbedding
from triplan.testing import check_plan, descriptors

Tensor = torch.Tensor
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FREQUENCIES = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the hardware does silently


def turned(x: Tensor, angle: Tensor, pairs: str = "half") -> Tensor:
    """The definition: pairs of ``x`` (..., heads, sequence, elements) as complex numbers, times e^(i * angle)."""
    half = angle.size(-1)
    kept, x = x[..., 2 * half :], x[..., : 2 * half]
    x = x.unflatten(-1, (2, half)).transpose(-1, -2) if pairs == "half" else x.unflatten(-1, (half, 2))
    out = torch.view_as_real(torch.view_as_complex(x.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    out = (out.transpose(-1, -2) if pairs == "half" else out).flatten(-2)
    return torch.cat((out, kept), -1)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("positions", [None, (5,), (2, 5)], ids=["none", "shared", "each"])
@pytest.mark.parametrize("how", ["angles", "table", "repeated", "batch"])
@pytest.mark.parametrize("pairs", ["half", "interleaved"])
def test_a_rotation_is_a_complex_product(pairs: Any, how: str, positions: tuple[int, ...] | None) -> None:
    """Of q and k with other heads, of the first 8 of 10 elements, whichever way the angles are given."""
    q, k = drawn(2, 3, 5, 10), drawn(2, 1, 5, 10)
    at = torch.arange(5) if positions is None else torch.randint(0, 7, positions)
    angle = at.double().unsqueeze(-1) * FREQUENCIES
    angle = angle.unsqueeze(1) if angle.dim() == 3 else angle
    given: dict[str, Any] = {"pairs": pairs, "positions": None if positions is None else at, "rotary_dim": 8}
    if how == "angles":
        given["inv_freq"] = FREQUENCIES
    else:
        rows = torch.arange(7).double().unsqueeze(-1) * FREQUENCIES
        if how == "repeated":
            rows = torch.cat((rows, rows), -1) if pairs == "half" else rows.repeat_interleave(2, -1)
        rows = torch.stack((rows, rows)) if how == "batch" else rows
        given |= {"cos": rows.cos(), "sin": rows.sin()}
    for found, x in zip(F.rotary(q, k, **given), (q, k), strict=True):
        torch.testing.assert_close(found, turned(x, angle, pairs))
    back = F.rotary(*F.rotary(q, k, **given), **given, inverse=True)
    torch.testing.assert_close(back, (q, k))


def test_layouts_are_rotated_where_they_are_and_kept() -> None:
    """Slices of a packed qkv, with the sequence before the heads or behind; no batch; results without gaps."""
    angle = torch.arange(5).double().unsqueeze(-1) * FREQUENCIES
    table = {"cos": angle.cos(), "sin": angle.sin()}
    q, k, _ = drawn(2, 5, 7, 8).split((4, 2, 1), 2)
    first = F.rotary(q, k, **table, seq_dim=-3)
    for found, x in zip(first, (q, k), strict=True):
        assert found.is_contiguous()
        torch.testing.assert_close(found.transpose(1, 2), turned(x.transpose(1, 2), angle))
    found = F.rotary(q.transpose(1, 2), **table)
    assert found.transpose(1, 2).is_contiguous()
    assert torch.equal(found.transpose(1, 2), first[0])
    assert torch.equal(F.rotary(q[0], **table, seq_dim=-3), first[0][0])


def test_products_depend_on_the_distance_alone() -> None:
    q, k = drawn(1, 1, 1, 8).expand(1, 1, 9, 8), drawn(2, 8)[1].expand(1, 1, 9, 8)
    found = F.rotary(q, k, inv_freq=FREQUENCIES, positions=torch.arange(9) + 10**6)
    products = (found[0] @ found[1].mT)[0, 0]
    for distance in range(-8, 9):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("element", ["bf16", "f32"])
@pytest.mark.parametrize(("where", "kernel"), places("tiles"))
@settings(max_examples=12)
@given(data=st.data())
def test_drawn_shapes_and_layouts(where: str, kernel: str | None, element: str, data: st.DataObject) -> None:
    types = (tp.RotaryDescriptor, tp.NormedRotaryDescriptor, tp.CachedRotaryDescriptor)
    cls: Any = data.draw(st.sampled_from(types))
    norms = {tp.NormedRotaryDescriptor: (1e-6,), tp.CachedRotaryDescriptor: (None, 1e-6)}
    eps = {"eps": data.draw(st.sampled_from(norms[cls]))} if cls in norms else {}
    desc = data.draw(descriptors(cls, 1 << 11, fixed={"element": element, **eps}))
    check_plan(tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel)))


@pytest.mark.parametrize(("where", "kernel"), places("tiles"))
@pytest.mark.parametrize("largest", [20, 31, 127])
def test_cos_and_sin_of_angles_of_every_size(largest: int, where: str, kernel: str | None) -> None:
    """Of a head of ones and zeros. Angles up to 2^30 are reduced otherwise than those beyond."""
    g = torch.Generator().manual_seed(largest)
    exponents = torch.linspace(-20, largest, 64, dtype=torch.float64) + torch.rand(64, generator=g)
    given = {"positions": torch.tensor([[1, -1, 3]]), "inv_freq": exponents.exp2().clamp(max=1e38).float()}
    given["q"] = torch.cat((torch.ones(1, 3, 1, 64), torch.zeros(1, 3, 1, 64)), -1)
    desc = tp.RotaryDescriptor(q_shape=(1, 3, 1, 128), positions=True, element="f32")
    plan = tp.plan(desc, target=target(where), preference=tp.PlanPreference(kernel=kernel))
    check_plan(plan, passes=("unit",), given=given)


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", ["half", "interleaved"])
def test_large_heads_tables_and_positions(pairs: Any) -> None:
    """Vectors, several blocks of tokens and groups of heads, and angles of 10^6, as no drawn problem has."""
    desc = tp.RotaryDescriptor(q_shape=(3, 130, 20, 160), k_heads=9, rotary_dim=128, pairs=pairs, element="bf16")
    positions = torch.randint(0, 2**20, (3, 130))
    check_plan(tp.plan(desc.replace(positions=True)), passes=("unit",), given={"positions": positions})
    looked_up = {"positions": True, "table_rows": 40, "out_of_bounds": "error"}
    check_plan(tp.plan(desc.replace(**looked_up)), passes=("unit",))
    normed = tp.NormedRotaryDescriptor(q_shape=desc.q_shape, k_heads=9, rotary_dim=128, pairs=pairs, element="bf16")
    check_plan(tp.plan(normed.replace(**looked_up)))


@pytest.mark.gpu
def test_more_than_two_to_the_31st_elements() -> None:
    q = torch.zeros(2, 2**24 + 1, 1, 64, dtype=torch.float16, device="cuda")
    q[-1, -1, 0, 1] = 2
    table = torch.zeros(1, 1, dtype=torch.float16, device="cuda").expand(2**24 + 1, 32)
    found = F.rotary(q, cos=table, sin=table + 1, seq_dim=-3)
    assert found[-1, -1, 0].nonzero().tolist() == [[33]]
    assert found.count_nonzero().item() == 1


@compiles
@pytest.mark.parametrize(("heads", "keys"), [(2**31 + 5, None), (3, 2**31 + 5)])
def test_more_than_two_to_the_31st_heads(heads: int, keys: int | None) -> None:
    """A program multiplies its group by the heads of one in 64 bits."""
    desc = tp.RotaryDescriptor(q_shape=(1, 1, heads, 2), k_heads=keys, table_rows=1, element="bf16")
    plan = tp.plan(desc, target=tp.Target.sm90a())
    (launch,) = plan.launches
    assert launch.args["step"] == Int(4, wide=True)
    assert plan.compile()[0].spill_bytes == 0


@pytest.mark.parametrize("device", DEVICES)
def test_derivatives_and_registration(device: str) -> None:
    q, k = (drawn(1, n, 4, 8).to(device).requires_grad_() for n in (2, 1))
    frequencies, at = FREQUENCIES.to(device), torch.tensor([[3, 0, 5, 5]], device=device)

    def ours(q: Tensor, k: Tensor) -> Any:
        return F.rotary(q, k, None, None, at, inv_freq=frequencies, scale=1.5)

    assert torch.autograd.gradcheck(ours, (q, k), check_forward_ad=True, **FAST)
    assert torch.autograd.gradgradcheck(ours, (q, k), **FAST)
    (dk,) = torch.autograd.grad(ours(q, k)[1].sum(), k)  # q's result has no gradient
    torch.testing.assert_close(dk, torch.autograd.grad(turned(k, at[..., None] * frequencies).sum() * 1.5, k)[0])
    op = torch.ops.triplan.rotary.default
    torch.library.opcheck(op, (q, k, None, None, frequencies, at, 1.5, None, True, True, False, False))
    table = frequencies.expand(4, 4)
    # Without k the second result is empty, and so is its gradient.
    options = {"test_utils": ("test_schema", "test_aot_dispatch_dynamic")}
    torch.library.opcheck(op, (q, None, table, table, None, None, 1.0, *CALL), **options)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k), ours(q, k))


#: rotary_dim, interleaved, heads_first, inverse, check_indices of the registered op.
CALL = (None, False, True, True, False)


@pytest.mark.parametrize("seq_dim", [-2, -3])
@pytest.mark.parametrize("keys", [True, False])
def test_a_norm_before_the_rotation(keys: bool, seq_dim: int) -> None:
    """As torch's rms_norm and then rotary; of slices of a packed qkv, with derivatives of both orders."""
    q, k, _ = drawn(1, 4, 5, 8).split((2, 1, 2), 2)
    tensors = [q, drawn(8), *((k, drawn(2, 8)[1]) if keys else ())]
    if seq_dim == -2:
        tensors = [t.transpose(1, 2) if t.dim() == 4 else t for t in tensors]
    tensors = [t.requires_grad_() for t in tensors]
    how: dict[str, Any] = {"inv_freq": FREQUENCIES[:3], "seq_dim": seq_dim}

    def ours(q: Tensor, q_weight: Tensor, k: Any = None, k_weight: Any = None) -> Any:
        return F.rotary(q, k, **how, q_weight=q_weight, k_weight=k_weight, eps=1e-3)

    normed = [torch.nn.functional.rms_norm(x, (8,), w, 1e-3) for x, w in zip(tensors[::2], tensors[1::2], strict=True)]
    torch.testing.assert_close(ours(*tensors), F.rotary(*normed, **how))
    assert torch.autograd.gradcheck(ours, tensors, **FAST)
    assert torch.autograd.gradgradcheck(ours, tensors, **FAST)


@pytest.mark.parametrize("device", DEVICES)
def test_the_registered_norm(device: str) -> None:
    q, weight = drawn(1, 2, 3, 8).to(device).requires_grad_(), drawn(8).to(device).requires_grad_()
    tables = [t.to(device) for t in (FREQUENCIES.expand(3, 4), FREQUENCIES.expand(3, 4))]
    given = (q, None, weight, None, 1e-6, *tables, None, None, 1.0, None, True, True, False, False)
    options = {"test_utils": ("test_schema", "test_faketensor", "test_autograd_registration")}
    torch.library.opcheck(torch.ops.triplan.normed_rotary.default, given, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_a_position_outside_the_tables(device: str) -> None:
    q, table, at = torch.ones(1, 2, 10, device=device), torch.ones(3, 4, device=device), torch.tensor([3, -1])
    if device == "cuda":  # rotated elements become 0, others are copied
        found = F.rotary(q, None, table, table, at.cuda(), rotary_dim=8)
        assert found.tolist() == [[[0.0] * 8 + [1.0] * 2] * 2]
    with pytest.raises(IndexError, match=r"positions\[0, 0\] = 3 is out of bounds for extent 3"):
        F.rotary(q, None, table, table, at.to(device), rotary_dim=8, check_indices=True)


Q, T = torch.ones(2, 3, 4, 8), torch.ones(4, 4)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "integers": ({"q": Q.int(), "cos": T, "sin": T}, "floating-point"),
    "k of another sequence": ({"k": Q[:, :, :3], "cos": T, "sin": T}, "heads only"),
    "k of another dtype": ({"k": Q.double(), "cos": T, "sin": T}, "but k torch.float64"),
    "no angles": ({}, "either cos and sin, or inv_freq"),
    "both kinds of angles": ({"cos": T, "sin": T, "inv_freq": T[0]}, "either cos and sin"),
    "too many pairs": ({"cos": torch.ones(4, 5), "sin": torch.ones(4, 5)}, "5 pairs do not fit"),
    "another rotary_dim": ({"inv_freq": T[0], "rotary_dim": 6}, "rotary_dim 6"),
    "frequencies in half": ({"inv_freq": T[0].half()}, "inv_freq of rank 1 and torch.float32"),
    "tables that differ": ({"cos": T, "sin": T[:3]}, "do not fit a batch of 2"),
    "integer tables": ({"cos": T.int(), "sin": T.int()}, "expected tables of"),
    "short tables": ({"cos": T[:3], "sin": T[:3]}, "tables of 3 rows for 4 tokens"),
    "positions of another shape": ({"inv_freq": T[0], "positions": torch.arange(3)}, r"expected \(4,\) or \(2, 4\)"),
    "floating positions": ({"inv_freq": T[0], "positions": torch.ones(4)}, "int32/int64"),
    "a weight of k alone": ({"k": Q, "inv_freq": T[0], "k_weight": T[0]}, "takes a weight of q"),
    "a weight of another shape": ({"inv_freq": T[0], "q_weight": T[0]}, r"expected q_weight of \[8\]"),
    "tables with a gradient": ({"cos": T.clone().requires_grad_(), "sin": T}, "get no gradient"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    given, message = REFUSED[case]
    with pytest.raises(RuntimeError, match=message):
        F.rotary(**{"q": Q, **given})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rotary_dim": 3}, "rotary_dim = 3: 3 of 8 elements"),
        ({"q_shape": (1, 4, 2, 7)}, "7 of 7 elements"),
        ({"table_rows": 3}, "fewer than the 4 tokens"),
        ({"table_rows": 4, "table_element": "f16"}, r"table_element = f16: must be f32 \(element\)"),
    ],
)
def test_descriptors_that_contradict_themselves(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(tp.InvalidProblem, match=message):
        tp.RotaryDescriptor(**{"q_shape": (1, 4, 2, 8), "element": "f32", **fields})


# --- the module and the published scalings ---

LONG = {"factor": 8.0, "original_max_position_embeddings": 8192}


def yarn(dim: int, base: float, factor: float, original: int) -> list[float]:
    """The published code (jquesnelle/yarn, LlamaYaRNScaledRotaryEmbedding), pair by pair."""

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = math.floor(dimension(32)), math.ceil(dimension(1))
    found = []
    for i in range(dim // 2):
        plain = 1 / base ** (2 * i / dim)
        mask = 1 - min(max((i - low) / (high - low), 0), 1)
        found.append(plain / factor * (1 - mask) + plain * mask)
    return found


def llama3(dim: int, base: float, factor: float, original: int) -> list[float]:
    """The published code (meta-llama, apply_scaling), with factors 1 and 4 of low and high frequencies."""
    found = []
    for i in range(dim // 2):
        plain = 1 / base ** (2 * i / dim)
        wavelength = 2 * math.pi / plain
        smooth = (original / wavelength - 1) / (4 - 1)
        between = (1 - smooth) * plain / factor + smooth * plain
        found.append(plain if wavelength < original / 4 else plain / factor if wavelength > original else between)
    return found


PLAIN = [5e5 ** (-2 * i / 128) for i in range(64)]
SCALED: dict[str, tuple[dict[str, Any], list[float], float]] = {
    "default": ({}, PLAIN, 1.0),
    "linear": ({"factor": 8.0}, [f / 8 for f in PLAIN], 1.0),
    "ntk": ({"factor": 8.0}, [f / 8 ** (i / 63) for i, f in enumerate(PLAIN)], 1.0),
    "yarn": (LONG, yarn(128, 5e5, 8.0, 8192), 0.1 * math.log(8) + 1),
    "llama3": ({**LONG, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, llama3(128, 5e5, 8.0, 8192), 1.0),
}


@pytest.mark.parametrize("kind", SCALED)
def test_frequencies_of_the_published_scalings(kind: str) -> None:
    scaling, expected, factor = SCALED[kind]
    module = RotaryEmbedding(128, 5e5, {"rope_type": kind, **scaling})
    torch.testing.assert_close(module.inv_freq.double(), torch.tensor(expected).double(), rtol=2e-7, atol=0)
    at = torch.tensor([7, 100_000])
    x = drawn(1, 2, 128).float()
    angle = (at.float()[:, None] * module.inv_freq).double()
    torch.testing.assert_close(module(x, positions=at).double(), factor * turned(x.double(), angle), rtol=0, atol=1e-5)


def test_the_module_keeps_f32_frequencies_and_no_state() -> None:
    module = RotaryEmbedding(8).to(torch.bfloat16)
    assert module.inv_freq.dtype == torch.float32
    assert module.state_dict() == {}
    q = drawn(1, 2, 3, 8)
    assert [t.dtype for t in module(q.bfloat16(), q.bfloat16())] == [torch.bfloat16] * 2
    torch.testing.assert_close(module(q), turned(q, torch.arange(3).double()[:, None] * module.inv_freq.double()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dim": 7}, "dim = 7"),
        ({"seq_dim": -1}, "seq_dim = -1"),
        ({"scaling": {"rope_type": "dynamic"}}, "rope_type = 'dynamic'"),
        ({"scaling": {"rope_type": "linear", "factr": 2.0}}, "does not take factr"),
    ],
)
def test_the_module_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RotaryEmbedding(**{"dim": 8, **given})
