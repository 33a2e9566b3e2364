"""linear_cross_entropy beside float64 torch's linear and cross_entropy: chunks, gradients, memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from samples import SetConstant
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import triplan.functional as F  # noqa: N812
from triplan import nn

Tensor = torch.Tensor
MODULE: Any = importlib.import_module("triplan.functional.losses.linear_cross_entropy")
#: Two whole chunks of 128 rows and a part of one.
ROWS, FEATURES, CLASSES = 300, 16, 37
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"linear_bias": True},
    "ignored": {"ignore_index": 3, "linear_bias": True},
    "smooth": {"label_smoothing": 0.2},
    "weighted": {"weight": torch.linspace(0.1, 2, CLASSES, dtype=torch.float64), "label_smoothing": 0.1},
    "softcap": {"softcap": 2.0, "linear_bias": True},
}


def wanted(
    x: Tensor, w: Tensor, t: Tensor, linear_bias: Tensor | None = None, softcap: float = 0.0, **how: Any
) -> Tensor:
    z = functional.linear(x, w, linear_bias)
    return functional.cross_entropy(softcap * torch.tanh(z / softcap) if softcap else z, t, **how)


def leaves(dtype: torch.dtype, device: str, bias: bool) -> tuple[list[Tensor], Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(ROWS, FEATURES), (CLASSES, FEATURES), (CLASSES,)][: 3 if bias else 2]
    found = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).to(device).requires_grad_() for s in shapes]
    return found, torch.randint(0, CLASSES, (ROWS,), generator=g).to(device)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("how", OPTIONS)
def test_results_and_gradients(how: str, reduction: str, chunked: bool, device: str, constant: SetConstant) -> None:
    if chunked:
        constant(MODULE, "CHUNK_BYTES", 1)
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in OPTIONS[how].items()}
    given, t = leaves(torch.float64, device, options.pop("linear_bias", False))
    bias = {"linear_bias": given[2]} if len(given) > 2 else {}
    for dtype, eps in ((torch.float64, 1e-11), (torch.bfloat16, 0.03)):
        mine = [g.detach().to(dtype).requires_grad_() for g in given]
        theirs = [g.detach().double().requires_grad_() for g in mine]
        got = F.linear_cross_entropy(
            *mine[:2], t, **({"linear_bias": mine[2]} if bias else {}), reduction=reduction, **options
        )
        ref = wanted(*theirs[:2], t, **({"linear_bias": theirs[2]} if bias else {}), reduction=reduction, **options)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), ref, rtol=eps, atol=eps * max(1.0, float(ref.detach().abs().max())))
        d = torch.linspace(0.5, 1.5, ref.numel(), dtype=torch.float64, device=device).reshape(ref.shape)
        for a, b in zip(torch.autograd.grad(got, mine, d.to(dtype)), torch.autograd.grad(ref, theirs, d), strict=True):
            assert a.dtype == dtype
            torch.testing.assert_close(a.double(), b, rtol=eps, atol=eps * float(b.abs().max()))


def test_rows_that_are_all_ignored(device: str) -> None:
    """As cross_entropy: a mean over nothing is NaN, and its gradient 0."""
    (x, w), t = leaves(torch.float64, device, False)
    for reduction, value in (("mean", torch.nan), ("sum", 0.0)):
        loss = F.linear_cross_entropy(x, w, torch.full_like(t, -100), reduction=reduction)
        torch.testing.assert_close(loss, torch.full_like(loss, value), equal_nan=True)
        assert all(not g.any() for g in torch.autograd.grad(loss, (x, w)))
    empty = F.linear_cross_entropy(x[:0], w, t[:0], reduction="sum")
    assert not torch.autograd.grad(empty, w)[0].any()


@pytest.mark.parametrize("wrt", [(0,), (1,), (0, 1)])
def test_only_what_is_asked_for(wrt: tuple[int, ...], device: str) -> None:
    given, t = leaves(torch.float64, device, False)
    for i, leaf in enumerate(given):
        leaf.requires_grad_(i in wrt)
    got, ref = F.linear_cross_entropy(*given, t), wanted(*given, t)
    of = [given[i] for i in wrt]
    for a, b in zip(torch.autograd.grad(got, of), torch.autograd.grad(ref, of), strict=True):
        torch.testing.assert_close(a, b)


def test_a_retained_graph_and_second_derivatives(device: str) -> None:
    given, t = leaves(torch.float64, device, True)
    small = [g.detach()[:3].clone().requires_grad_() for g in given]
    for reduction in ("mean", "none"):

        def ours(x: Tensor, w: Tensor, b: Tensor, how: str = reduction) -> Tensor:
            return F.linear_cross_entropy(x, w, t[:3] % 3, linear_bias=b, reduction=how, softcap=3.0)

        loss = ours(*small).sum()
        once, again = (torch.autograd.grad(loss, small, retain_graph=True) for _ in range(2))
        assert all(map(torch.equal, once, again))
        assert torch.autograd.gradgradcheck(ours, small)


def test_class_probabilities_and_further_axes_as_in_torch(device: str) -> None:
    """In plain torch; the unbatched form too. (torch's own function is new.)"""
    (x, w), t = leaves(torch.float64, device, False)
    shares = torch.softmax(torch.randn(ROWS, CLASSES, dtype=torch.float64, device=device), 1)
    torch.testing.assert_close(F.linear_cross_entropy(x, w, shares), wanted(x, w, shares))
    torch.testing.assert_close(F.linear_cross_entropy(x[0], w, t[0]), wanted(x[0], w, t[0]))
    deep = w[:36].reshape(9, 4, FEATURES)
    targets = torch.arange(ROWS * 4, device=device).reshape(ROWS, 4) % 9
    logits = (x @ w[:36].t()).reshape(ROWS, 9, 4)
    torch.testing.assert_close(F.linear_cross_entropy(x, deep, targets), functional.cross_entropy(logits, targets))


def test_autocast_does_not_round_the_gradient_of_an_f32_weight(device: str, constant: SetConstant) -> None:
    """The product is of rounded factors, and is neither rounded within the op nor by autograd."""
    constant(MODULE, "CHUNK_BYTES", 1)
    given, t = leaves(torch.float32, device, True)
    with torch.autocast(device, torch.bfloat16):
        loss = F.linear_cross_entropy(*given[:2], t, linear_bias=given[2])
    dx, dw, db = torch.autograd.grad(loss, given)
    assert dw.dtype == torch.float32
    assert not torch.equal(dw, dw.bfloat16().float())
    theirs = [g.detach().bfloat16().double().requires_grad_() for g in given]
    for got, expected in zip((dx, dw, db), torch.autograd.grad(wanted(*theirs[:2], t, theirs[2]), theirs), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0.03, atol=0.03 * float(expected.abs().max()))
    narrow = [g.detach().bfloat16() for g in given]
    with pytest.raises(RuntimeError, match="dtypes differ"):  # without autocast
        F.linear_cross_entropy(narrow[0], given[1], t)


@pytest.mark.parametrize(("rows", "chunks"), [(127, 1), (640, 1), (641, 2), (1024, 2), (1300, 3)])
def test_chunks_are_of_one_size(rows: int, chunks: int, constant: SetConstant) -> None:
    """Of whole tiles, as many as CHUNK_BYTES goes into all logits, rounded: at most a half more than it each."""
    classes = 50
    constant(MODULE, "CHUNK_BYTES", 427 * classes * 4)
    found = MODULE._Chunks(torch.zeros(rows, 8), torch.zeros(classes, 8), None, 0.0, 0, False)
    assert len(found.starts) == chunks
    assert found.rows == rows or found.rows % MODULE.CHUNK_ROWS == 0
    assert found.rows * classes * 4 <= 1.5 * MODULE.CHUNK_BYTES + MODULE.CHUNK_ROWS * classes * 4


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any op makes, and every dtype and size that one makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = [t.untyped_storage().nbytes() // t.element_size() for t in tree_leaves(found) if isinstance(t, Tensor)]
        self.elements = max([self.elements, *made])
        return found


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_is_as_large_as_all_logits(reduction: str, constant: SetConstant) -> None:
    rows, classes = 1024, 500
    constant(MODULE, "CHUNK_BYTES", 128 * classes * 4)
    x, w, t = torch.randn(rows, 8), torch.randn(classes, 8), torch.arange(rows) % classes
    how = (reduction, -100, 0.0, False)
    with Largest() as made:
        lse = MODULE._kernel(x, w, None, t, None, 0.0, 3, False, False, False, *how)[1]
    assert 128 * classes <= made.elements <= 1.1 * 128 * classes
    if reduction == "none":
        with Largest() as made:
            MODULE._backward_kernel(torch.ones(rows), x, w, None, t, None, lse, 0.0, 3, False, *how)
        assert made.elements <= 1.1 * 128 * classes


@dataclass(frozen=True)
class Options:
    """Of torch's LinearCrossEntropyOptions, which torch has since 2.12, those that count."""

    acc_policy: str = "auto"
    allow_retain_graph: bool = False


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("policy", ["auto", "compact"])
def test_a_gradient_of_the_weight_that_is_summed_in_its_dtype(
    policy: str, reduction: str, device: str, constant: SetConstant
) -> None:
    """It is rounded for each chunk."""
    constant(MODULE, "CHUNK_BYTES", 1)
    given, t = leaves(torch.bfloat16, device, True)
    theirs = [g.detach().double().requires_grad_() for g in given]
    ref = wanted(*theirs[:2], t, theirs[2], reduction=reduction)
    expected = torch.autograd.grad(ref.sum(), theirs)

    def gradients(options: object) -> tuple[Tensor, ...]:
        got = F.linear_cross_entropy(*given[:2], t, linear_bias=given[2], reduction=reduction, options=options)
        return torch.autograd.grad(got.sum(), given)

    def sum_of_chunks(compact: bool) -> Tensor:
        x, w, bias = (g.detach() for g in given)
        how, ones = (reduction, -100, 0.0, False), torch.ones(ROWS, device=device)
        found: tuple[Tensor, ...]
        if reduction == "none":
            found = MODULE._backward_kernel(ones, x, w, bias, t, None, ones, 0.0, 7, compact, *how)
        else:
            found = MODULE._kernel(x, w, bias, t, None, 0.0, 7, False, compact, compact, *how)[3:]
        return found[1]

    assert sum_of_chunks(True).dtype == torch.bfloat16
    assert sum_of_chunks(False).dtype == torch.float32
    with Largest():  # which sees plain ops of torch
        found = [gradients(Options(policy))]
    found += [gradients(Options(policy)) for _ in range(3)]  # the last one is a replay
    for got in found:
        assert all(map(torch.equal, got, found[0]))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=0.03, atol=0.03 * float(b.abs().max()))
    assert not torch.equal(gradients(Options("accurate"))[1], found[0][1])  # the roundings show


def test_a_gradient_that_is_written_over_is_given_once(device: str, constant: SetConstant) -> None:
    constant(MODULE, "CHUNK_BYTES", 1)
    given, t = leaves(torch.bfloat16, device, True)
    for _ in range(3):
        loss = F.linear_cross_entropy(*given[:2], t, linear_bias=given[2], options=Options())
        torch.autograd.grad(loss, given, retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, given)
    for _ in range(3):
        loss = F.linear_cross_entropy(*given[:2], t, linear_bias=given[2], options=Options("compact", True))
        once, again = (torch.autograd.grad(loss, given, retain_graph=True) for _ in range(2))
        assert all(map(torch.equal, once, again))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad: bool, device: str) -> None:
    given, t = leaves(torch.float64, device, True)
    tensors = [g.detach().requires_grad_(requires_grad) for g in given]
    ops: Any = torch.ops.triplan
    for reduction in ("mean", "none"):
        torch.library.opcheck(
            ops.linear_cross_entropy.default,
            (*tensors, t, None, 2.0, 7 * requires_grad, False, False, False, reduction, -100, 0.1, False),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


REFUSALS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], type[Exception], str]] = {
    "features": (lambda x, w, t: F.linear_cross_entropy(x[:, 1:], w, t), RuntimeError, "do not fit"),
    "bias": (lambda x, w, t: F.linear_cross_entropy(x, w, t, linear_bias=w[0]), RuntimeError, "linear_bias"),
    "dtype": (lambda x, w, t: F.linear_cross_entropy(x, w.float(), t), RuntimeError, "dtypes differ"),
    "reduction": (lambda x, w, t: F.linear_cross_entropy(x, w, t, reduction="max"), ValueError, "max"),
    "softcap": (lambda x, w, t: F.linear_cross_entropy(x, w, t, softcap=-1.0), ValueError, "softcap"),
    "target": (lambda x, w, t: F.linear_cross_entropy(x, w, t[1:]), RuntimeError, "target"),
    "class": (
        lambda x, w, t: F.linear_cross_entropy(x, w, t + 30, check_indices=True),
        IndexError,
        r"target\[\d+\] = ",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str, device: str) -> None:
    call, error, message = REFUSALS[name]
    (x, w), t = leaves(torch.float64, device, False)
    with pytest.raises(error, match=message):
        call(x, w, t)


def test_module(device: str) -> None:
    torch.manual_seed(0)
    (x, _), t = leaves(torch.float32, device, False)
    module = nn.LinearCrossEntropyLoss(FEATURES, CLASSES, bias=True, label_smoothing=0.1, softcap=5.0, device=device)
    assert set(module.state_dict()) == {"linear.weight", "linear.bias"}
    ref = wanted(x, module.linear.weight, t, module.linear.bias, 5.0, label_smoothing=0.1)
    loss = module(x, t)
    torch.testing.assert_close(loss, ref)
    assert not loss._is_view()
    compact = nn.LinearCrossEntropyLoss(FEATURES, CLASSES, options=Options(), device=device, dtype=torch.bfloat16)
    loss = compact(x.bfloat16(), t)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_and_transformed(reduction: str, device: str) -> None:
    given, t = leaves(torch.float64, device, True)

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear_cross_entropy(x, w, t, linear_bias=b, reduction=reduction, softcap=3.0).sum()

    compiled: Any = torch.compile(ours, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(ours(*given), given)
    torch.testing.assert_close(torch.autograd.grad(compiled(*given), given), expected)
    plain = tuple(g.detach() for g in given)
    torch.testing.assert_close(torch.func.grad(ours, (0, 1, 2))(*plain), expected)
    _, tangent = torch.func.jvp(ours, plain, plain)
    torch.testing.assert_close(tangent, sum(((g * p).sum() for g, p in zip(expected, plain, strict=True))))
