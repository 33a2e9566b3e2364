"""MultiheadAttention beside torch's, and attention as models of the transformers library call it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import triplan as tp
from triplan import nn

N, L, S, E, H = 2, 5, 7, 8, 2
CAUSAL = torch.ones(L, L, dtype=torch.bool).triu(1)
PADDING = torch.arange(S) >= torch.tensor([[4], [S]])
PACKED = torch.tensor([0, 3, S], dtype=torch.int32)
SOME = torch.arange(L * S).reshape(L, S) % 3 == 1
BIAS = torch.linspace(-1, 1, N * H * L * S, dtype=torch.float64).reshape(N * H, L, S)
#: Options of the module, which inputs are one tensor, and options of the call.
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "self": ({}, "qqq", {"need_weights": False}),
    "self, weights": ({"batch_first": True}, "qqq", {}),
    "causal": ({"batch_first": True}, "qqq", {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
    "causal, weights": ({}, "qqq", {"attn_mask": CAUSAL, "is_causal": True}),
    "memory": ({"bias": False}, "qkk", {"key_padding_mask": PADDING, "need_weights": False}),
    "three": ({}, "qkv", {"attn_mask": SOME, "key_padding_mask": PADDING, "average_attn_weights": False}),
    "widths": ({"kdim": 6, "vdim": 3, "batch_first": True}, "qkv", {"attn_mask": BIAS, "need_weights": False}),
    "both masks": ({}, "qkv", {"attn_mask": BIAS, "key_padding_mask": PADDING.double() * -2, "need_weights": False}),
    "more keys": ({"add_bias_kv": True, "add_zero_attn": True}, "qkk", {"attn_mask": SOME, "need_weights": False}),
    "more keys, causal": (
        {"add_zero_attn": True},
        "qqq",
        {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
    ),
    "more keys, weights": ({"add_bias_kv": True, "add_zero_attn": True}, "qkk", {"key_padding_mask": PADDING}),
}


def pair(options: dict[str, Any], device: str) -> tuple[Any, Any]:
    """torch's module and ours, with the same parameters."""
    theirs, ours = (m.MultiheadAttention(E, H, **options, dtype=torch.float64, device=device) for m in (torch.nn, nn))
    for p in theirs.parameters():
        torch.nn.init.normal_(p)
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    return theirs, ours


@pytest.mark.parametrize("batched", [True, False], ids=["batch", "one"])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_torchs(case: str, batched: bool, device: str) -> None:
    options, which, call = CASES[case]
    theirs, ours = pair(options, device)
    widths = {"q": E, "k": options.get("kdim", E), "v": options.get("vdim", E)}
    made = {}
    for name in set(which):
        shape = (N, L if name == "q" else S, widths[name])
        t = torch.randn(shape, dtype=torch.float64, device=device)
        t = t[0] if not batched else t if options.get("batch_first") else t.transpose(0, 1)
        made[name] = t.requires_grad_()
    call = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in call.items()}
    if not batched:
        cut = {"key_padding_mask": lambda m: m[0], "attn_mask": lambda m: m[:H] if m.dim() == 3 else m}
        call = {n: cut[n](x) if n in cut else x for n, x in call.items()}
    found = []
    for module in (ours, theirs):
        out, weights = module(*(made[name] for name in which), **call)
        total = (out * torch.linspace(-1, 1, E, dtype=out.dtype, device=device)).sum()
        if weights is not None:
            total = total + (weights * weights).sum()
        found.append((out, weights, torch.autograd.grad(total, [*made.values(), *module.parameters()])))
    torch.testing.assert_close(*found)


def test_layers_of_torch_take_it(device: str) -> None:
    layer = torch.nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True, device=device)
    x = torch.randn(N, S, E, device=device)
    expected = layer(x, src_key_padding_mask=PADDING.to(device))
    ours = nn.MultiheadAttention(E, H, batch_first=True, device=device)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    torch.testing.assert_close(layer(x, src_key_padding_mask=PADDING.to(device)), expected)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_whole(device: str) -> None:
    module, x = nn.MultiheadAttention(E, H, device=device), torch.randn(S, N, E, device=device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, x, x), module(x, x, x))


@pytest.mark.parametrize(
    ("options", "call", "error", "message"),
    [
        ({}, {"is_causal": True}, RuntimeError, "attn_mask"),
        ({}, {"attn_mask": torch.zeros(1, L)}, RuntimeError, r"\(5, 5\)"),
        ({}, {"key_padding_mask": torch.zeros(L)}, RuntimeError, r"\(2, 5\)"),
        ({}, {"attn_mask": torch.zeros(L, L, dtype=torch.int64)}, RuntimeError, "int64"),
        ({}, {"key": torch.zeros(L, E)}, RuntimeError, "axes"),
    ],
    ids=["causal", "mask", "padding", "dtype", "axes"],
)
def test_refusals(options: dict[str, Any], call: dict[str, Any], error: type[Exception], message: str) -> None:
    module, x = nn.MultiheadAttention(E, H, **options), torch.zeros(L, N, E)
    with pytest.raises(error, match=message):
        module(**{"query": x, "key": x, "value": x} | call)


def seen_by(queries: int, keys: int, window: int | None) -> torch.Tensor:
    """What a causal query sees, by the library's definition: the last query stands at the last key."""
    at = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
    return (at <= 0) & (at > -(window or keys))


@pytest.mark.parametrize(
    ("queries", "how", "seen"),
    [
        (S, {}, seen_by(S, S, None)),
        (S, {"sliding_window": 3, "scaling": 0.3}, seen_by(S, S, 3)),
        (2, {"sliding_window": 4}, seen_by(2, S, 4)),
        (1, {}, None),
        (L, {"is_causal": False, "sliding_window": S}, None),
        (L, {"attention_mask": torch.cat((SOME, SOME), 1), "sliding_window": 1}, SOME),
        (L, {"attention_mask": torch.where(SOME, 0.0, -torch.inf)}, SOME),
    ],
    ids=["causal", "window", "cache", "one query", "all", "mask", "added mask"],
)
def test_as_transformers_calls_it(queries: int, how: dict[str, Any], seen: torch.Tensor | None, device: str) -> None:
    """The library is not installed where tests run: a stand-in has the one attribute of its modules that is read."""
    module: Any = SimpleNamespace(is_causal=True)
    q, k, v = (torch.randn(N, h, n, E, device=device) for h, n in ((2 * H, queries), (H, S), (H, S)))
    how = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in how.items()}
    got, weights = nn.transformers_attention(module, q, k, v, how.pop("attention_mask", None), **how, dropout=0.0)
    assert weights is None
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, None if seen is None else seen.to(device), scale=how.get("scaling")
    )
    torch.testing.assert_close(got, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_the_adapter_packs_and_has_sinks(device: str) -> None:
    """As each sequence is alone, where a sink is one more key of value 0 and of a given score."""
    q, k, v = (torch.randn(1, h, S, E, device=device) for h in (2 * H, H, H))
    sinks, module = torch.randn(2 * H, device=device), torch.nn.Module()
    how: dict[str, Any] = {"s_aux": sinks, "cu_seq_lens_q": PACKED.to(device), "cu_seq_lens_k": PACKED.to(device)}
    got, _ = nn.transformers_attention(module, q, k, v, None, sliding_window=2, max_length_q=S, max_length_k=S, **how)
    k, v = (torch.nn.functional.pad(t.repeat_interleave(2, 1), (0, 0, 0, 1)) for t in (k, v))
    for a, b in itertools.pairwise(PACKED.tolist()):
        bias = torch.where(seen_by(b - a, b - a, 2), 0.0, -torch.inf).to(device)
        bias = torch.cat((bias.expand(2 * H, -1, -1), sinks[:, None, None].expand(-1, b - a, 1)), -1)
        own = [torch.cat((t[..., a:b, :], t[..., S:, :]), -2) for t in (k, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(q[..., a:b, :], *own, bias)
        torch.testing.assert_close(got[:, a:b], expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "how",
    [
        {"head_mask": torch.zeros(H)},
        {"cu_seq_lens_k": PACKED, "cu_seq_lens_q": PACKED},
        {"is_causal": False, "sliding_window": 2},
    ],
    ids=["head mask", "packed batches", "window"],
)
def test_what_the_adapter_refuses(how: dict[str, Any]) -> None:
    x = torch.zeros(N, H, S, E)
    with pytest.raises(tp.Unsupported, match=next(reversed(how))):
        nn.transformers_attention(torch.nn.Module(), x, x, x, None, **how)
