"""Dropout of attention: what it drops, its gradients, and that calls draw anew while their backward draws again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import FAST, places, required
from proofs import run, target
from replaying import replays_on_cpu

import triplan as tp
from triplan import nn
from triplan.functional import attention, attention_varlen, scaled_dot_product_attention

Tensor = torch.Tensor
STATE = torch.tensor([-(2**62) - 5, 2**40 + 8])
KEYS = 22


def factors(batch: int, heads: int, queries: int, keys: int, p: float) -> Tensor:
    """What the op ``dropout`` makes of ones, in rows of whole groups of four keys."""
    shape = (batch, heads, queries, -(-keys // 4) * 4)
    desc = tp.RandomDescriptor(op="dropout", element="f32", out_shape=shape, state="device")
    found = run(tp.plan(desc, target="cpu"), {"x": torch.ones(shape), "state": STATE, "p": p})
    return found["out"][..., :keys]


def equal_scores(**fields: Any) -> tuple[Any, dict[str, Any]]:
    """A problem whose result shows the factor of each key: q is 0, and values are rows of the identity."""
    sizes: dict[str, Any] = {"batch": 2, "heads": 2, "key_heads": 1, "queries": 37, "keys": KEYS} | fields
    desc = tp.AttentionDescriptor(head_dim=8, value_dim=sizes["keys"], element="f32", dropout=True, **sizes)
    values = {o.name: torch.zeros(o.shape) for o in desc.operands() if o.name in ("q", "k")}
    v = torch.eye(desc.keys)[:, None].expand(desc.batch, -1, desc.key_heads, -1).contiguous()
    return desc, values | {"v": v, "state": STATE, "scale": None}


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("where", "kernel"), places("tiles"))
def test_it_drops_what_the_op_dropout_drops(where: str, kernel: str | None, p: float) -> None:
    """For p = 0 nothing, for p = 1 everything; lse does not know of it."""
    desc, values = equal_scores()
    got = run(required(desc, kernel, target(where)), values | {"dropout_p": p})
    expected = factors(2, 2, 37, KEYS, p) / KEYS
    assert p in (0.0, 1.0) or 0 < int((expected == 0).sum()) < expected.numel()
    torch.testing.assert_close(got["out"].transpose(1, 2), expected)
    assert bool((got["out"].transpose(1, 2) == 0).eq(expected == 0).all())
    torch.testing.assert_close(got["lse"], torch.full((2, 2, 37), float(torch.tensor(KEYS).log())))


@pytest.mark.parametrize(("where", "kernel"), places("tiles"))
def test_keys_of_packed_sequences_count_from_their_start(where: str, kernel: str | None) -> None:
    desc, values = equal_scores(batch=1, sequences=2)
    starts = {"query_starts": torch.tensor([0, 20, 37]).int(), "key_starts": torch.tensor([0, 9, KEYS]).int()}
    got = run(required(desc, kernel, target(where)), values | starts | {"dropout_p": 0.3})["out"].transpose(1, 2)
    whole = factors(1, 2, 37, KEYS, 0.3)
    expected = torch.zeros_like(whole)
    expected[..., :20, :9] = whole[..., :20, :9] / 9
    expected[..., 20:, 9:] = whole[..., 20:, : KEYS - 9] / (KEYS - 9)
    torch.testing.assert_close(got, expected)


def test_the_share_that_stays_is_binomial() -> None:
    """Within six standard deviations, of 2**17 keys; another call drops others."""
    q, k = torch.zeros(2, 128, 4, 8), torch.zeros(2, 128, 4, 8)
    v, n = torch.eye(128)[:, None].expand(2, 128, 4, 128), 2**17
    calls = [attention(q, k, v, dropout_p=0.3)[0] != 0 for _ in range(2)]
    for kept in calls:
        assert abs(float(kept.double().mean()) - 0.7) < 6 * (0.3 * 0.7 / n) ** 0.5
    both = float((calls[0] & calls[1]).double().mean())
    assert abs(both - 0.49) < 6 * (0.49 * 0.51 / n) ** 0.5


STARTS = torch.tensor([[0, 1, 3], [0, 3, 4]], dtype=torch.int32)
#: Calls of q (3 queries, 2 heads), k and v (4 keys, 1 head), and a sink.
CALLS: dict[str, Callable[..., Tensor]] = {
    "batch": lambda q, k, v, _, **how: attention(q[None], k[None], v[None], causal=True, softcap=1.5, **how)[0],
    "packed": lambda q, k, v, _, **how: attention_varlen(q, k, v, *STARTS, **how)[0],
    "sink": lambda q, k, v, sink, **how: attention(q[None], k[None], v[None], sink=sink, **how)[0],
    "mask": lambda q, k, v, m, **how: attention(q[None], k[None], v[None], mask=m[:, None, None], **how)[0],
}


def tensors() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((3, 2, 4), (4, 1, 4), (4, 1, 4), (2,))
    return [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("case", CALLS)
def test_gradients(case: str) -> None:
    """First and second derivatives by differences, each call from the same seed; "mask" is in plain torch."""

    def call(*given: Tensor) -> Tensor:
        return CALLS[case](*given, dropout_p=0.4, generator=torch.Generator().manual_seed(7))

    given = tensors()
    assert case == "mask" or not torch.equal(call(*given), CALLS[case](*given))
    given = given if case in ("sink", "mask") else given[:3]
    if len(given) == 3:
        torch.autograd.gradcheck(lambda *t: call(*t, None), given, **FAST)
        torch.autograd.gradgradcheck(lambda *t: call(*t, None), given, **FAST)
    else:
        torch.autograd.gradcheck(call, given, **FAST)
        torch.autograd.gradgradcheck(call, given, **FAST)


def test_seeds_decide(device: str) -> None:
    """Equal seeds give equal bits; dropout_p = 0 draws nothing and changes nothing; 1 gives zeros."""
    q, k, v = (torch.randn(2, 5, 3, 8, device=device) for _ in range(3))

    def call(seed: int, p: float = 0.5) -> Tensor:
        return attention(q, k, v, dropout_p=p, generator=torch.Generator(device).manual_seed(seed))[0]

    assert torch.equal(call(1), call(1))
    assert not torch.equal(call(1), call(2))
    g = torch.Generator(device).manual_seed(3)
    before = g.get_state()
    assert torch.equal(attention(q, k, v, dropout_p=0.0, generator=g)[0], attention(q, k, v)[0])
    assert torch.equal(g.get_state(), before)
    assert not call(1, 1.0).any()
    torch.manual_seed(4)
    x = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    y = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(4)
    assert torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.5), x)
    assert not torch.equal(x, y)
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            call(1, p)


def agrees(out: Tensor, v: Tensor, ones: Tensor) -> None:
    """The result is linear in v: with the backward's own factors, sum(out * ones) = sum(v * dv)."""
    (dv,) = torch.autograd.grad(out, v, ones)
    torch.testing.assert_close((v * dv).sum(), (out * ones).sum())


@pytest.mark.usefixtures("fresh_compiler")
def test_checks_and_compiles(device: str) -> None:
    q, k, v = (torch.randn(2, 6, 3, 8, device=device, requires_grad=True) for _ in range(3))
    how = (None, None, None, None, None, STATE.to(device), None, True, "end", None, None, 0.0, 0.4)
    torch.library.opcheck(torch.ops.triplan.attention.default, (q, k, v, *how))
    call = torch.compile(lambda *t: attention(*t, dropout_p=0.4)[0], fullgraph=True, backend="aot_eager")
    first, second = call(q, k, v), call(q, k, v)
    assert not torch.equal(first, second)
    for out in (first, second):
        agrees(out, v, torch.randn_like(out))


def test_replays_draw_anew_and_their_backward_draws_again() -> None:
    with replays_on_cpu() as answers:
        found = []
        for _ in range(6):
            del answers[:]
            q, k, v = (torch.randn(1, 6, 2, 8).requires_grad_() for _ in range(3))
            shown = attention(torch.zeros(1, 6, 2, 8), k.detach(), v.detach(), dropout_p=0.5)[0]
            out, _ = attention(q, k, v, dropout_p=0.5)
            agrees(out, v, torch.randn_like(out))
            found.append(shown)
        assert answers.count(True) >= 2
    assert all(a.ne(b).any() for i, a in enumerate(found) for b in found[:i])


@pytest.mark.gpu
def test_captured_graphs_draw_anew() -> None:
    q, k, v = (torch.randn(2, 300, 2, 64, device="cuda", dtype=torch.float32, requires_grad=True) for _ in range(3))
    ones = torch.ones(2, 300, 2, 64, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(attention(q, k, v, dropout_p=0.5)[0], v, ones)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, dropout_p=0.5)[0]
        (dv,) = torch.autograd.grad(out, v, ones)
    found = []
    for _ in range(3):
        graph.replay()
        found.append(out.detach().clone())
        torch.testing.assert_close((v * dv).sum(), (out * ones).sum(), rtol=1e-3, atol=1e-1)
    assert all(a.ne(b).any() for i, a in enumerate(found) for b in found[:i])


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_long_sequences_drop_alike_forward_and_backward(element: str, width: int) -> None:
    """Several tiles of queries and keys in every launch; the reference's factors are those of each."""
    for op in ("attention", "attention_backward"):
        fields: dict[str, Any] = {"batch": 2, "heads": 4, "key_heads": 2, "queries": 333, "keys": 389}
        desc = tp.descriptor_types()[op](**fields, head_dim=width, element=element, causal=True, dropout=True)
        tp.testing.check_plan(required(desc, "tiles", tp.Target.current()), runs=2)


# --- modules ---


def by_hand(module: Any, x: Tensor, p: float) -> Tensor:
    """Self-attention (batch, length, width) of torch's products around ``attention``."""
    linear, heads = torch.nn.functional.linear, module.num_heads
    projected = linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    out, _ = attention(*(t.unflatten(-1, (heads, -1)) for t in projected), dropout_p=p)
    return linear(out.flatten(2), module.out_proj.weight, module.out_proj.bias)


def test_multihead_attention_drops_in_training_alone(device: str) -> None:
    options: dict[str, Any] = {"dropout": 0.4, "batch_first": True, "dtype": torch.float64, "device": device}
    module, theirs = nn.MultiheadAttention(8, 2, **options), torch.nn.MultiheadAttention(8, 2, **options)
    theirs.load_state_dict(module.state_dict())
    x = torch.randn(3, 5, 8, dtype=torch.float64, device=device)
    torch.manual_seed(0)
    got = module(x, x, x, need_weights=False)[0]
    torch.manual_seed(0)
    torch.testing.assert_close(got, by_hand(module, x, 0.4))
    weights = module(x, x, x, average_attn_weights=False)[1]
    module.eval()
    theirs.eval()
    torch.testing.assert_close(module(x, x, x), theirs(x, x, x))
    assert torch.equal(module(x, x, x, need_weights=False)[0], module(x, x, x, need_weights=False)[0])
    plain = module(x, x, x, average_attn_weights=False)[1]
    dropped = weights == 0
    assert dropped.any()
    torch.testing.assert_close(weights, torch.where(dropped, 0, plain / 0.6))


def test_the_adapter_of_transformers_drops(device: str) -> None:
    q, k, v = (torch.randn(2, 3, 5, 8, device=device) for _ in range(3))
    torch.manual_seed(0)
    got = nn.transformers_attention(torch.nn.Module(), q, k, v, None, dropout=0.4, is_causal=False)[0]
    torch.manual_seed(0)
    torch.testing.assert_close(got, scaled_dot_product_attention(q, k, v, dropout_p=0.4).transpose(1, 2))
