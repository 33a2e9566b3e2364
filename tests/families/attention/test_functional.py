"""attention, packed or not, and scaled_dot_product_attention: torch's results and gradients, opcheck, compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import FAST
from torch.nn import functional

from triplan.functional import attention, attention_qkvpacked, attention_varlen, scaled_dot_product_attention

Q, K = (2, 4, 5, 8), (2, 4, 7, 8)
THREE = torch.zeros(2, 3, 7, 8)
#: Shapes of query, key and value, and the other arguments.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": (Q, K, (2, 4, 7, 6), {}),
    "causal": (Q, K, K, {"is_causal": True}),
    "shared heads": (Q, (2, 2, 7, 8), (2, 2, 7, 8), {"enable_gqa": True, "scale": 0.3}),
    "bool mask": (Q, K, K, {"attn_mask": torch.arange(35).reshape(5, 7) % 3 > 0}),
    "bias": (Q, K, K, {"attn_mask": torch.linspace(-1, 1, 70).reshape(2, 1, 5, 7)}),
    "nothing to see": (Q, K, K, {"attn_mask": torch.arange(5)[:, None].expand(5, 7) > 1}),
    "one head": (Q[1:], K[1:], K[1:], {"is_causal": True}),
    "matrices": (Q[2:], K[2:], K[2:], {}),
    "two batch axes": ((3, *Q), (3, *K), (3, *K), {"attn_mask": torch.arange(7) % 5 > 0}),
    "broadcast": (Q, (1, 1, 7, 8), (4, 7, 8), {}),
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {"causal": True, "softcap": 1.5},
    {"window_left": 1, "window_right": 1, "align": "start", "scale": -0.4},
)


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g).to(device, dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("case", CASES)
def test_as_torch(case: str, device: str) -> None:
    *shapes, options = CASES[case]
    given = drawn(*shapes, dtype=torch.float32, device=device)
    options = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    got = scaled_dot_product_attention(*given, **options)
    wanted = functional.scaled_dot_product_attention(*given, **options)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(out, given, torch.ones_like(wanted).cumsum(-1)) for out in (got, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", OPTIONS, ids=["causal, capped", "window"])
def test_gradients(options: dict[str, Any]) -> None:
    """First and second derivatives by differences."""
    given = drawn((1, 3, 2, 4), (1, 4, 1, 4), (1, 4, 1, 4))
    torch.autograd.gradcheck(lambda *t: attention(*t, **options)[0], given, **FAST)
    torch.autograd.gradgradcheck(lambda *t: attention(*t, **options)[0], given, **FAST)


def test_gradient_of_a_mask() -> None:
    given = drawn((1, 3, 2, 4), (1, 4, 1, 4), (1, 4, 1, 4), (3, 4))
    torch.autograd.gradcheck(lambda q, k, v, m: attention(q, k, v, mask=m)[0], given, **FAST)


#: Starts of queries and keys: a row of none at either end, no query, no key, more queries than keys.
STARTS = torch.tensor([[1, 3, 3, 5, 9, 10], [0, 4, 6, 6, 8, 8]], dtype=torch.int32)


def test_gradients_of_a_sink_and_slopes() -> None:
    """The gradient of slopes is in plain torch, without it that of the sink is not."""
    q, k, v, sink, slopes = given = drawn((1, 2, 2, 2), (1, 3, 1, 2), (1, 3, 1, 1), (2,), (2,))
    for names in (("sink",), ("sink", "slopes")):

        def call(q: Any, k: Any, v: Any, *others: Any, names: Any = names) -> Any:
            return attention(q, k, v, **{"slopes": slopes.detach()} | dict(zip(names, others, strict=True)))[0]

        torch.autograd.gradcheck(call, given[: 3 + len(names)], **FAST)
        torch.autograd.gradgradcheck(call, given[: 3 + len(names)], **FAST)
    with pytest.raises(RuntimeError, match="one for each head"):
        attention(q, k, v, sink=sink[:1])


@pytest.mark.parametrize("options", OPTIONS, ids=["causal, capped", "window"])
def test_packed_sequences(options: dict[str, Any], device: str) -> None:
    """Each as it is alone, with its gradients and their derivatives; rows of none give 0."""
    q, k, v = given = drawn((11, 2, 4), (9, 1, 4), (9, 1, 3), device=device)
    starts = STARTS.to(device)
    out, lse = attention_varlen(q, k, v, *starts, **options)
    outs, lses = torch.zeros_like(out).detach(), torch.full_like(lse, -torch.inf)
    for (a, b), (c, d) in zip(STARTS.T[:-1].tolist(), STARTS.T[1:].tolist(), strict=True):
        rows = torch.arange(a, c, device=device)
        alone, own = attention(q[None, a:c], k[None, b:d], v[None, b:d], **options)
        outs, lses = outs.index_copy(0, rows, alone[0]), lses.index_copy(1, rows, own[0])
    torch.testing.assert_close((out, lse), (outs, lses))
    firsts = [torch.autograd.grad(t.square().sum(), given, create_graph=True) for t in (out, outs)]
    torch.testing.assert_close(*firsts)
    seconds = [torch.autograd.grad(sum(g.square().sum() for g in first), given) for first in firsts]
    torch.testing.assert_close(*seconds)


def test_packed_sequences_check_and_compile(device: str, fresh_compiler: None) -> None:
    q, k, v = given = drawn((11, 4, 8), (9, 2, 8), (9, 2, 6), dtype=torch.float32, device=device)
    starts = STARTS.to(device)
    how = (None, None, *starts, torch.ones(4, device=device), None, 0.5, True, "end", 3, None, 0.0, 0.0)
    torch.library.opcheck(torch.ops.triplan.attention.default, (q[None], k[None], v[None], *how))
    call = torch.compile(lambda *t: attention_varlen(*t, causal=True)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(*given, *starts), attention_varlen(*given, *starts, causal=True)[0])
    with pytest.raises(RuntimeError, match="i32"):
        attention_varlen(q, k, v, *starts.long())
    with pytest.raises(RuntimeError, match="rows, heads"):
        attention_varlen(q[None], k, v, *starts)


@pytest.mark.parametrize("key_heads", [None, 1])
def test_queries_keys_and_values_in_one_tensor(key_heads: int | None, device: str, fresh_compiler: None) -> None:
    """As apart, with the same bits, gradients and their derivatives."""
    (qkv,) = drawn((2, 5, 6, 4), device=device)
    how: dict[str, Any] = {"causal": True, "softcap": 2.0, "window_left": 3}

    def apart(t: torch.Tensor) -> Any:
        parts = t.unflatten(2, (3, 2)).unbind(2) if key_heads is None else t.split((4, 1, 1), 2)
        return attention(*parts, **how)

    calls = (lambda t: attention_qkvpacked(t, key_heads, **how), apart)
    assert all(map(torch.equal, *(call(qkv) for call in calls)))
    firsts = [torch.autograd.grad(call(qkv)[0].square().sum(), qkv, create_graph=True)[0] for call in calls]
    assert torch.equal(*firsts)
    torch.testing.assert_close(*(torch.autograd.grad(g.square().sum(), qkv)[0] for g in firsts))
    rest = (2 if key_heads is None else key_heads, None, True, "end", 3, None, 2.0, 0.0)
    torch.library.opcheck(torch.ops.triplan.attention_qkvpacked.default, (qkv, *rest))
    out, lse = calls[0](qkv.detach())
    torch.library.opcheck(torch.ops.triplan.attention_qkvpacked_backward.default, (out, qkv.detach(), out, lse, *rest))
    torch.testing.assert_close(torch.compile(calls[0], fullgraph=True, backend="aot_eager")(qkv)[0], apart(qkv)[0])


def test_one_tensor_of_odd_heads_is_refused() -> None:
    for given, key_heads, message in (
        ((2, 5, 4, 4), None, "expected"),
        ((2, 5, 4, 4), 2, "0 heads"),
        ((3, 3), 1, "expe"),
    ):
        with pytest.raises(RuntimeError, match=message):
            attention_qkvpacked(torch.zeros(given), key_heads)


def test_opcheck_and_compile(device: str, fresh_compiler: None) -> None:
    q, k, v = given = drawn((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6), dtype=torch.float32, device=device)
    how = (torch.ones(4, device=device), None, None, None, None, None, 0.5, True, "end", 3, None, 0.0, 0.0)
    torch.library.opcheck(torch.ops.triplan.attention.default, (q, k, v, *how))
    out, lse = attention(q.detach(), k.detach(), v.detach())
    rest = (*(t.detach() for t in (out, q, k, v, out, lse)), *(None,) * 6, False, "end", None, None, 0.0, 0.0)
    torch.library.opcheck(torch.ops.triplan.attention_backward.default, rest)
    call = torch.compile(lambda *t: attention(*t, causal=True)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(*given), attention(*given, causal=True)[0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dropout_p": 1.1}, ValueError, "dropout_p"),
        ({"is_causal": True, "attn_mask": torch.ones(7, 7)}, RuntimeError, "is_causal"),
        ({"key": torch.zeros(2, 4, 7, 9)}, RuntimeError, "do not fit"),
        ({"value": torch.zeros(K, dtype=torch.float16)}, RuntimeError, "one dtype"),
        ({"attn_mask": torch.ones(7, 7, dtype=torch.int64)}, RuntimeError, "mask"),
        (
            {"key": THREE, "value": THREE, "enable_gqa": True},
            RuntimeError,
            "multiple",
        ),
    ],
    ids=["dropout", "mask and causal", "width", "dtype", "mask's dtype", "heads"],
)
def test_refusals(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {name: torch.zeros(K) for name in ("query", "key", "value")} | change
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(**given)
