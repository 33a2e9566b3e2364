"""mm, bmm, addmm and linear beside torch's own, on small integers: any order of adding then gives one result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.functional import FLOATS, integers, laid_out
from torch.autograd import gradcheck, gradgradcheck

import triplan.functional as F  # noqa: N812
from triplan.functional import _plans
from triplan.functional import gemm as multiplying
from triplan.functional._ops import Op

OPS = {op.name: op for op in vars(multiplying).values() if isinstance(op, Op)}
LAYOUTS = ("packed", "transposed", "gaps", "misaligned", "expanded")


pytestmark = pytest.mark.usefixtures("fresh_compiler")


Call = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], tuple[torch.Tensor, ...], dict[str, Any]]


def calls(device: str, dtype: torch.dtype = torch.float64, how: str = "packed") -> dict[str, Call]:
    """(ours, torch's, tensors, keywords) by name."""

    def x(*shape: int, seed: int) -> torch.Tensor:
        return laid_out(integers(shape, dtype, device, seed), how)

    a, b, w, bias = x(5, 16, seed=1), x(16, 24, seed=2), x(24, 16, seed=3), x(24, seed=4)
    torch_linear = torch.nn.functional.linear
    return {
        "mm": (F.mm, torch.mm, (a, b), {}),
        "mm_empty": (F.mm, torch.mm, (x(5, 0, seed=1), x(0, 3, seed=2)), {}),
        "bmm": (F.bmm, torch.bmm, (x(3, 5, 16, seed=1), x(3, 16, 24, seed=2)), {}),
        "bmm_empty": (F.bmm, torch.bmm, (x(3, 5, 0, seed=1), x(3, 0, 2, seed=2)), {}),
        "addmm": (F.addmm, torch.addmm, (x(5, 24, seed=5), a, b), {"beta": 2, "alpha": -3}),
        "addmm_row": (F.addmm, torch.addmm, (bias, a, b), {}),
        "addmm_column": (F.addmm, torch.addmm, (x(5, 1, seed=6), a, b), {"beta": 0.5}),
        "addmm_scalar": (F.addmm, torch.addmm, (x(1, seed=7), a, b), {}),
        "addmm_beta_zero": (F.addmm, torch.addmm, (torch.full_like(bias, torch.nan), a, b), {"beta": 0}),
        "linear": (F.linear, torch_linear, (a, w, bias), {}),
        "linear_no_bias": (F.linear, torch_linear, (a, w), {}),
        "linear_batch": (F.linear, torch_linear, (x(2, 3, 16, seed=8), w, bias), {}),
        "linear_vector": (F.linear, torch_linear, (x(16, seed=9), w, bias), {}),
        "linear_empty": (F.linear, torch_linear, (x(0, 16, seed=8), w, bias), {}),
    }


NAMES = tuple(calls("cpu"))


def leaves(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_values_are_torchs(name: str, dtype: torch.dtype, how: str, device: str) -> None:
    ours, theirs, tensors, keywords = calls(device, dtype, how)[name]
    for _ in range(3):  # the second call may go a shorter way
        got = ours(*tensors, **keywords)
        assert torch.equal(got, theirs(*tensors, **keywords))
        assert got.dtype == dtype
        assert got.is_contiguous()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_torchs(name: str, dtype: torch.dtype, device: str) -> None:
    found = []
    ours, theirs, tensors, keywords = calls(device, dtype)[name]
    for which in (ours, theirs):
        inputs = leaves(tensors)
        out = which(*inputs, **keywords)
        weight = integers(tuple(out.shape), dtype, device, 10)
        found.append(torch.autograd.grad(out, inputs, weight))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_expanded_ones(name: str, device: str) -> None:
    """``sum().backward()`` hands back a gradient of stride 0."""
    ours, theirs, tensors, keywords = calls(device)[name]
    mine, others = leaves(tensors), leaves(tensors)
    ours(*mine, **keywords).sum().backward()
    theirs(*others, **keywords).sum().backward()
    assert all(torch.equal(m.grad, o.grad) for m, o in zip(mine, others, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "addmm_column", "linear", "linear_batch"])
def test_gradcheck(name: str, device: str) -> None:
    ours, _, tensors, keywords = calls(device)[name]
    small = tuple(t[tuple(slice(3) for _ in t.shape)] for t in tensors)
    inputs = tuple(leaves(small))
    function = lambda *x: ours(*x, **keywords)  # noqa: E731
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """The operands of every plan that is run."""
    found: list[dict[str, torch.Tensor]] = []
    original = _plans.run
    monkeypatch.setattr(multiplying, "run", lambda cls, o, **k: (found.append(o), original(cls, o, **k))[1])
    for op in OPS.values():
        op.forget()
    return found


def test_only_wanted_gradients_are_computed(device: str, given: list[dict[str, torch.Tensor]]) -> None:
    a, w, bias = (integers(s, torch.float64, device, 1) for s in ((3, 4), (5, 4), (5,)))
    F.linear(a, w, bias.requires_grad_()).sum().backward()
    assert len(given) == 1  # forward
    F.linear(a, w.requires_grad_(), bias.detach()).sum().backward()
    assert [set(o) for o in given[2:]] == [{"a", "b", "c"}]
    F.linear(a, w, bias).sum().backward()
    assert [set(o) for o in given[4:]] == [{"dc", "a", "db", "dbias"}]
    F.mm(a.requires_grad_(), w.t()).sum().backward()
    assert [set(o) for o in given[6:]] == [{"dc", "a", "b", "da", "db"}]


def test_transposes_are_not_copied(device: str, given: list[dict[str, torch.Tensor]]) -> None:
    """Every factor that a plan is given lies in memory of the caller's."""
    a, w = integers((6, 16), torch.float64, device, 1).requires_grad_(), integers((24, 16), torch.float64, device, 2)
    w.requires_grad_()
    out = F.linear(a, w)
    weight = integers((6, 24), torch.float64, device, 3)
    _, to_w = torch.autograd.grad(out, (a, w), weight)
    assert to_w.is_contiguous()
    assert len(given) == 2
    theirs = {t.data_ptr() for t in (a, w, weight)}
    assert all(o[name].data_ptr() in theirs for o in given for name in ("dc", "a", "b") if name in o)


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, True), (False, True, False)])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_of_the_adjoint(wanted: tuple[bool, ...], requires_grad: bool, device: str) -> None:
    dc, a, w = (integers(s, torch.float64, device, 1) for s in ((5, 24), (5, 16), (24, 16)))
    given = [t.requires_grad_(requires_grad) for t in (dc, a, w.t())]
    torch.library.opcheck(torch.ops.triplan.gemm_backward.default, (*given, *wanted, 0.5))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((4,), (4,)),
        ((4,), (4, 3)),
        ((2, 4), (4,)),
        ((2, 4), (4, 3)),
        ((5, 2, 4), (4, 3)),
        ((5, 2, 4), (4,)),
        ((4,), (5, 4, 3)),
        ((2, 4), (5, 4, 3)),
        ((5, 2, 4), (5, 4, 3)),
        ((6, 1, 2, 4), (5, 4, 3)),
        ((1, 2, 4), (5, 4, 3)),
        ((0, 2, 4), (4, 3)),
        ((5, 2, 0), (5, 0, 3)),
    ],
)
def test_matmul_is_torchs(first: tuple[int, ...], second: tuple[int, ...], device: str) -> None:
    found = []
    for which in (F.matmul, torch.matmul):
        a, b = (integers(s, torch.float64, device, i).requires_grad_() for i, s in enumerate((first, second)))
        out = which(a, b)
        weight = integers(tuple(out.shape), torch.float64, device, 3)
        found.append((out, *torch.autograd.grad(out, (a, b), weight)))
    for got, want in zip(*found, strict=True):
        assert got.shape == want.shape
        assert torch.equal(got, want)


@pytest.mark.parametrize("shapes", [((), (2,)), ((2, 3), (4,)), ((2, 3, 4), (3, 4, 5))])
def test_matmul_refuses(shapes: tuple[tuple[int, ...], ...], device: str) -> None:
    with pytest.raises(RuntimeError):
        F.matmul(*(torch.ones(s, device=device) for s in shapes))


def test_matmul_compiles_whole(device: str) -> None:
    a, b = (integers(s, torch.float64, device, i) for i, s in enumerate(((6, 1, 2, 4), (5, 4, 3))))
    assert torch.equal(torch.compile(F.matmul, fullgraph=True, backend="aot_eager")(a, b), F.matmul(a, b))


def test_out(device: str) -> None:
    a, b, bias = (integers(s, torch.float32, device, 1) for s in ((3, 4), (4, 5), (5,)))
    for out in (torch.empty(3, 5, device=device), torch.empty(5, 3, device=device).t(), torch.empty(0, device=device)):
        assert F.mm(a, b, out=out) is out
        assert torch.equal(out, a @ b)
        F.addmm(bias, a, b, alpha=2, out=out)
        assert torch.equal(out, torch.addmm(bias, a, b, alpha=2))
    square = integers((4, 4), torch.float32, device, 2)
    want = square @ square
    assert torch.equal(F.mm(square, square, out=square), want)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(name: str, requires_grad: bool, device: str) -> None:
    ours, _, tensors, keywords = calls(device)[name]
    op = OPS[ours.__name__]
    extra: tuple[Any, ...] = (keywords.get("beta", 1), keywords.get("alpha", 1)) if ours is F.addmm else ()
    args = tuple(t.detach().clone().requires_grad_(requires_grad) for t in tensors)
    torch.library.opcheck(op.overload, (*args, *extra))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "addmm_row", "linear", "linear_batch", "linear_no_bias"])
def test_compiles_whole(name: str, dynamic: bool, backend: str, device: str) -> None:
    if backend == "inductor" and (dynamic or name not in ("linear", "addmm")):
        pytest.skip("inductor compiles for long: two calls stand for all")
    ours, _, tensors, keywords = calls(device)[name]
    function = lambda *x: ours(*x, **keywords) * 2  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    mine, others = leaves(tensors), leaves(tensors)
    got, want = compiled(*mine), function(*others)
    assert torch.equal(got, want)
    weight = integers(tuple(got.shape), got.dtype, device, 5)
    for g, w in zip(torch.autograd.grad(got, mine, weight), torch.autograd.grad(want, others, weight), strict=True):
        assert torch.equal(g, w)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: F.mm(x(2, 3), x(4, 5)), r"cannot be multiplied \(2x3 and 4x5\)"),
        (lambda x: F.mm(x(2), x(2, 5)), "must be a matrix"),
        (lambda x: F.bmm(x(2, 3), x(2, 5, 4)), "must be a 3D tensor"),
        (lambda x: F.bmm(x(2, 3, 4), x(3, 4, 5)), r"to be: \[2, 4\] but got: \[3, 4\]"),
        (lambda x: F.mm(x(2, 3), x(3, 5).half()), "same dtype"),
        (lambda x: F.mm(x(2, 3).int(), x(3, 5).int()), "not implemented"),
        (lambda x: F.addmm(x(3), x(2, 3), x(3, 5)), "cannot be expanded"),
        (lambda x: F.addmm(x(1, 1, 5), x(2, 3), x(3, 5)), "cannot be expanded"),
        (lambda x: F.linear(x(2, 3), x(5, 4)), "cannot be multiplied"),
        (lambda x: F.linear(x(2, 3), x(5, 3), x(4)), "bias"),
        (lambda x: F.linear(x(2, 3), x(3), x(1)), "matrix"),
        (lambda x: F.linear(x(2, 3), x(5, 3), x(3, 5)), "expanded"),
        (lambda x: F.linear(x(2, 3), x(5, 3), x(1, 1, 5)), "size"),
    ],
)
def test_what_does_not_fit(call: Callable[..., Any], match: str, device: str) -> None:
    with pytest.raises(RuntimeError, match=match):
        call(lambda *shape: torch.ones(shape, device=device))


@pytest.mark.gpu
def test_tf32_follows_torchs_setting() -> None:
    a = torch.full((8, 64), 1 + 2.0**-20, device="cuda")
    b = torch.eye(64, device="cuda")
    before = torch.get_float32_matmul_precision()
    try:
        for precision, exact in (("highest", True), ("high", False), ("highest", True)):
            torch.set_float32_matmul_precision(precision)
            assert torch.equal(F.mm(a, b), a) is exact
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
def test_halves_sum_the_bias_gradient_in_f32() -> None:
    x = torch.ones(4096, 8, device="cuda", dtype=torch.float16)
    w, bias = torch.ones(8, 8, device="cuda").half(), torch.zeros(8, device="cuda").half().requires_grad_()
    F.linear(x, w, bias).backward(torch.full((4096, 8), 1.0009765625, device="cuda").half())
    assert torch.equal(bias.grad, torch.full((8,), 4100.0, device="cuda").half())  # type: ignore[arg-type]
