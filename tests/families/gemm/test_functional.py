"""Products beside torch's own, on small integers: every order of accumulation gives the same result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases.derivatives import Product, products
from cases.functional import FLOATS, integers
from samples import same
from torch.utils.flop_counter import FlopCounterMode

import triplan.functional as F  # noqa: N812

LAYOUTS = ("packed", "transposed", "gaps", "misaligned", "expanded")


pytestmark = pytest.mark.usefixtures("fresh_compiler")


NAMES = tuple(products("cpu"))


def leaves(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def with_gradients(
    call: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], expanded: bool = False
) -> tuple[torch.Tensor, ...]:
    """The result, and the gradients of a drawn gradient of it, or of one of stride 0, as ``sum()`` hands it back."""
    inputs = leaves(tensors)
    out = call(*inputs)
    weight = integers((1,) * out.dim() if expanded else tuple(out.shape), out.dtype, str(out.device), 10)
    return (out, *torch.autograd.grad(out, inputs, weight.expand(out.shape)))


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_values_are_torchs(name: str, dtype: torch.dtype, how: str, device: str) -> None:
    ours, theirs, tensors, keywords = products(device, dtype, how)[name]
    for _ in range(3):  # the second call may go a shorter way
        got = ours(*tensors, **keywords)
        assert torch.equal(got, theirs(*tensors, **keywords))
        assert got.dtype == dtype
        assert got.is_contiguous()


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_torchs(name: str, dtype: torch.dtype, expanded: bool, device: str) -> None:
    ours, theirs, tensors, keywords = products(device, dtype)[name]
    same(*(with_gradients(partial(which, **keywords), tensors, expanded) for which in (ours, theirs)))


def test_only_wanted_gradients_are_computed(device: str, ran: list[Any]) -> None:
    a, w, bias = (integers(s, torch.float64, device, 1) for s in ((3, 4), (5, 4), (5,)))
    F.linear(a, w, bias.requires_grad_()).sum().backward()
    assert len(ran) == 1  # forward
    F.linear(a, w.requires_grad_(), bias.detach()).sum().backward()
    assert [set(o) for _, o in ran[2:]] == [{"a", "b", "c"}]
    F.linear(a, w, bias).sum().backward()
    assert [set(o) for _, o in ran[4:]] == [{"dc", "a", "db", "dbias"}]
    F.mm(a.requires_grad_(), w.t()).sum().backward()
    assert [set(o) for _, o in ran[6:]] == [{"dc", "a", "b", "da", "db"}]


def test_transposes_are_not_copied(device: str, ran: list[Any]) -> None:
    """Every factor that a plan is given lies in memory of the caller's."""
    a, w = integers((6, 16), torch.float64, device, 1).requires_grad_(), integers((24, 16), torch.float64, device, 2)
    w.requires_grad_()
    out = F.linear(a, w)
    weight = integers((6, 24), torch.float64, device, 3)
    _, to_w = torch.autograd.grad(out, (a, w), weight)
    assert to_w.is_contiguous()
    assert len(ran) == 2
    theirs = {t.data_ptr() for t in (a, w, weight)}
    assert all(o[name].data_ptr() in theirs for _, o in ran for name in ("dc", "a", "b") if name in o)


@pytest.mark.parametrize(
    "wanted", [(True, True, True), (True, False, True), (False, True, False), (False, False, True)]
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_registered_backward(wanted: tuple[bool, ...], requires_grad: bool, device: str) -> None:
    dc, a, w = (integers(s, torch.float64, device, 1) for s in ((5, 24), (5, 16), (24, 16)))
    args = (*(t.requires_grad_(requires_grad) for t in (dc, a, w.t())), *wanted, 0.5)
    torch.library.opcheck(torch.ops.triplan.gemm_backward.default, args)
    expected = (0.5 * dc @ w, 0.5 * a.t() @ dc, dc.sum(0))
    for got, want, asked in zip(torch.ops.triplan.gemm_backward(*args), expected, wanted, strict=True):
        assert torch.equal(got, want if asked else got.new_empty(0))


LINEAR: tuple[tuple[tuple[int, ...], ...], ...] = (
    *(((16,), (24, 16), bias) for bias in ((), (1,), (1, 24))),
    *(((5, 16), (24, 16), bias) for bias in ((), (1,), (1, 24), (5, 1), (1, 1), (5, 24))),
    *(((2, 5, 16), (24, 16), bias) for bias in ((), (1,), (1, 24), (5, 24), (2, 5, 24))),
    *(((0, 16), (24, 16), bias) for bias in ((), (1, 24))),
    *((input, (16,)) for input in ((16,), (5, 16), (2, 5, 16), (0, 16))),
)


@pytest.mark.parametrize("shapes", LINEAR)
def test_every_bias_and_weight_that_torch_takes(shapes: tuple[tuple[int, ...], ...], device: str) -> None:
    tensors = tuple(integers(s, torch.float64, device, i) for i, s in enumerate(shapes))
    same(with_gradients(F.linear, tensors), with_gradients(torch.nn.functional.linear, tensors))


def test_linear_of_one_output(device: str) -> None:
    """A weight of one axis with a bias of none: torch says that it takes them, and does so for a vector."""
    x, w, bias = (integers(s, torch.float64, device, i) for i, s in enumerate(((2, 5, 16), (16,), ())))
    assert torch.equal(F.linear(x[0, 0], w, bias), torch.nn.functional.linear(x[0, 0], w, bias))
    assert torch.equal(F.linear(x, w, bias), x @ w + bias)


def test_out_may_be_a_transpose_or_a_factor(device: str) -> None:
    a, b, bias = (integers(s, torch.float32, device, 1) for s in ((3, 4), (4, 5), (5,)))
    out = torch.empty(5, 3, device=device).t()
    assert F.mm(a, b, out=out) is out
    assert torch.equal(out, a @ b)
    F.addmm(bias, a, b, alpha=2, out=out)
    assert torch.equal(out, torch.addmm(bias, a, b, alpha=2))
    square = integers((4, 4), torch.float32, device, 2)
    want = square @ square
    assert torch.equal(F.mm(square, square, out=square), want)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "linear_scalar_bias" and not n.startswith("matmul")])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(name: str, requires_grad: bool, device: str) -> None:
    ours, _, tensors, keywords = products(device)[name]
    op = getattr(torch.ops.triplan, ours.__name__).default
    extra: tuple[Any, ...] = (keywords.get("beta", 1), keywords.get("alpha", 1)) if ours is F.addmm else ()
    args = tuple(t.detach().clone().requires_grad_(requires_grad) for t in tensors)
    torch.library.opcheck(op, (*args, *extra))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: F.mm(x(2, 3), x(4, 5)), r"cannot be multiplied \(2x3 and 4x5\)"),
        (lambda x: F.mm(x(2), x(2, 5)), "must be a matrix"),
        (lambda x: F.bmm(x(2, 3), x(2, 5, 4)), "must be a 3D tensor"),
        (lambda x: F.bmm(x(2, 3, 4), x(3, 4, 5)), r"to be: \[2, 4\] but got: \[3, 4\]"),
        (lambda x: F.mm(x(2, 3), x(3, 5).half()), "same dtype"),
        (lambda x: F.mm(x(2, 3).int(), x(3, 5).int()), "not supported"),
        (lambda x: F.addmm(x(3), x(2, 3), x(3, 5)), "cannot be expanded"),
        (lambda x: F.addmm(x(1, 1, 5), x(2, 3), x(3, 5)), "cannot be expanded"),
        (lambda x: F.linear(x(2, 3), x(5, 4)), "cannot be multiplied"),
        (lambda x: F.linear(x(2, 3), x(5, 3), x(4)), "bias"),
        (lambda x: F.linear(x(2, 3), x(3), x(1)), "matrix"),
        (lambda x: F.linear(x(2, 3), x(5, 3), x(3, 5)), "expanded"),
        (lambda x: F.linear(x(2, 3), x(5, 3), x(1, 1, 5)), "size"),
        (lambda x: F.matmul(x(), x(2)), "at least 1D"),
        (lambda x: F.matmul(x(2, 3), x(4)), "cannot be multiplied"),
        (lambda x: F.matmul(x(2, 3, 4), x(3, 4, 5)), "broadcast"),
    ],
)
def test_what_does_not_fit(call: Callable[..., Any], match: str, device: str) -> None:
    with pytest.raises(RuntimeError, match=match):
        call(lambda *shape: torch.ones(shape, device=device))


# --- out= ---


def test_matmul_into(device: str) -> None:
    a, b = (integers(s, torch.float64, device, i) for i, s in enumerate(((6, 1, 2, 4), (5, 4, 3))))
    out = torch.empty(6, 5, 2, 3, dtype=torch.float64, device=device)
    assert F.matmul(a, b, out=out) is out
    assert torch.equal(out, a @ b)
    with pytest.warns(UserWarning, match="resized"):
        F.matmul(a[0, 0], b[0], out=out)
    assert torch.equal(out, a[0, 0] @ b[0])
    for first, into, match in (
        (a, out.float(), "dtype"),
        (a.clone().requires_grad_(), out, "automatic differentiation"),
    ):
        with pytest.raises(RuntimeError, match=match):
            F.matmul(first, b, out=into)


def test_out_may_be_a_lazy_negative(device: str) -> None:
    a, b = (integers(s, torch.float64, device, i) for i, s in enumerate(((3, 4), (4, 5))))
    memory = torch.zeros(3, 5, dtype=torch.complex128, device=device)
    out = memory.conj().imag
    assert out.is_neg()
    assert F.mm(a, b, out=out) is out
    assert torch.equal(out, a @ b)
    assert torch.equal(memory.imag, -(a @ b))


# --- what is not finite, and what is not wanted ---


def test_what_is_not_differentiated_again_does_not_count(device: str) -> None:
    """An infinite factor times the zeros of a gradient that there is none of would be NaN."""
    found = []
    for which in (F.mm, torch.mm):
        a, b = (integers(s, torch.float64, device, i) for i, s in enumerate(((3, 4), (4, 5))))
        b[0, 0] = torch.inf
        g = integers((3, 5), torch.float64, device, 3).requires_grad_()
        to_b = torch.autograd.grad(which(a.requires_grad_(), b.requires_grad_()), (a, b), g, create_graph=True)[1]
        found.append(torch.autograd.grad(to_b, g, torch.ones_like(to_b))[0])
    assert torch.equal(*found)
    assert bool(found[0].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_that_alpha_takes_away_are_not_read(dtype: torch.dtype, device: str) -> None:
    a, b = torch.full((3, 4), torch.nan, dtype=dtype, device=device), torch.ones(4, 5, dtype=dtype, device=device)
    for input in (integers((3, 5), dtype, device, 1), integers((5,), dtype, device, 1)):
        for beta in (2, 1, 0):
            # As in BLAS; torch's own does so on some devices only.
            assert torch.equal(F.addmm(input, a, b, alpha=0, beta=beta), beta * input.expand(3, 5))


@pytest.mark.parametrize("name", ["addmm", "baddbmm", "addbmm"])
@pytest.mark.parametrize(("beta", "alpha"), [(True, False), (False, True), (False, False)])
def test_scales_may_be_bools(name: str, beta: bool, alpha: bool, device: str) -> None:
    """As in torch: 0 or 1."""
    batch = () if name == "addmm" else (2,)
    shapes = ((3, 5), (*batch, 3, 4), (*batch, 4, 5))
    for dtype in (torch.int8, torch.float32):
        given = [integers(shape, dtype, "cpu", i) for i, shape in enumerate(shapes)]
        found = getattr(F, name)(*(t.to(device) for t in given), beta=beta, alpha=alpha)
        assert torch.equal(found.cpu(), getattr(torch, name)(*given, beta=beta, alpha=alpha))
    leaves = [t.to(device).requires_grad_() for t in given]
    found, expected = (getattr(module, name)(*leaves, beta=beta, alpha=alpha) for module in (F, torch))
    gradients = [torch.autograd.grad(product.sum(), leaves) for product in (found, expected)]
    assert all(map(torch.equal, *gradients))


# --- autocast ---

AUTOCAST = ("mm", "bmm", "addmm_row_scaled", "linear", "linear_batch", "linear_no_bias", "linear_scalar_bias")
AUTOCAST += ("matmul", "matmul_vector")


def mixed(device: str) -> dict[str, Product]:
    """A narrow first operand among f32's."""
    return {
        name: (ours, theirs, (first.bfloat16(), *others), keywords)
        for name, (ours, theirs, (first, *others), keywords) in products(device, torch.float32).items()
    }


def autocasting(call: Callable[..., torch.Tensor], device: str) -> Callable[..., torch.Tensor]:
    def within(*inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return call(*inputs)

    return within


@pytest.mark.parametrize("how", ["f32", "mixed", "f64"])
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_is_torchs(name: str, how: str, device: str) -> None:
    """The result's dtype and value, and gradients in the dtypes of what was passed."""
    dtype = torch.float64 if how == "f64" else torch.float32
    ours, theirs, tensors, keywords = (mixed(device) if how == "mixed" else products(device, dtype))[name]
    calling = (autocasting(partial(which, **keywords), device) for which in (ours, theirs))
    found, wanted = (with_gradients(call, tensors) for call in calling)
    assert found[0].dtype == (torch.float64 if how == "f64" else torch.bfloat16)
    same(found, wanted)


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_compiles_whole(name: str, device: str) -> None:
    ours, _, tensors, keywords = mixed(device)[name]
    function = partial(ours, **keywords)
    compiled = torch.compile(lambda *x: function(*x), fullgraph=True, backend="aot_eager")
    got, want = (with_gradients(autocasting(call, device), tensors) for call in (compiled, function))
    assert got[0].dtype == torch.bfloat16
    same(got, want)


def test_out_is_not_autocast(device: str) -> None:
    a, b = (integers(s, torch.float32, device, 1) for s in ((3, 4), (4, 5)))
    with torch.autocast(device, dtype=torch.bfloat16):
        for ours, theirs in ((F.mm, torch.mm), (F.matmul, torch.matmul)):
            out, want = torch.empty(3, 5, device=device), torch.empty(3, 5, device=device)
            assert torch.equal(ours(a, b, out=out), theirs(a, b, out=want))


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


@pytest.mark.parametrize("out", [False, True], ids=["new", "out"])
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("mm", [(3, 5), (5, 7)]),
        ("bmm", [(2, 3, 5), (2, 5, 7)]),
        ("addmm", [(7,), (3, 5), (5, 7)]),
        ("linear", [(2, 3, 5), (7, 5), (7,)]),
        ("matmul", [(2, 3, 5), (5, 7)]),
        ("matmul", [(2, 1, 3, 5), (4, 5, 7)]),
    ],
)
def test_torch_counts_as_many_flops_as_of_its_own(name: str, shapes: list[tuple[int, ...]], out: bool) -> None:
    counts = []
    for module in (F, torch.nn.functional if name == "linear" else torch):
        args = [torch.randn(shape, requires_grad=not out) for shape in shapes]
        with FlopCounterMode(display=False) as counter:
            found = getattr(module, name)(*args, **({"out": torch.empty(0)} if out and name != "linear" else {}))
            if not out:
                found.sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
