"""triplan.functional against torch: results, out=, in-place, refusals."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from cases.functional import DEVICES, FIXED, IN_PLACE, SUMMED, WITH_OUT, Call, calls, fixed, integers
from hypothesis import given, settings, strategies as st

import triplan
import triplan.functional as F  # noqa: N812

# --- results ---


@pytest.mark.parametrize("device_type", DEVICES)
@settings(max_examples=250)
@given(data=st.data())
def test_equals_torch(device_type: str, data: st.DataObject) -> None:
    call = data.draw(calls(device_type))
    mine, torchs = call.copies(), call.copies()
    got, expected = call.run(call.ours, mine), call.run(call.theirs, torchs)
    assert got.dtype == expected.dtype
    assert got.device == expected.device
    assert got.shape == expected.shape
    assert torch.equal(got, expected)
    for ours, theirs in zip(mine, torchs, strict=True):  # only an in-place call writes, and only its first argument
        assert torch.equal(ours, theirs)
    assert (got is mine[0]) == (call.name in IN_PLACE)


@pytest.mark.parametrize("dtype", SUMMED, ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", FIXED)
def test_every_dtype(name: str, dtype: torch.dtype, index_dtype: torch.dtype, device: str) -> None:
    call = fixed(device, dtype, index_dtype)[name]
    assert torch.equal(call.run(call.ours, call.copies()), call.run(call.theirs, call.copies()))


@pytest.mark.usefixtures("deterministic")
def test_half_sums_round_once(device: str) -> None:
    """2⁻¹² is less than half of f16's step at 1: rounded one by one, all 512 additions would be lost."""
    index = torch.zeros(512, dtype=torch.int64, device=device)
    tiny = torch.full((512,), 2.0**-12, dtype=torch.float16, device=device)
    assert F.index_add(torch.ones(1, dtype=torch.float16, device=device), 0, index, tiny).item() == 1.125


@pytest.mark.parametrize("rank", [1, 8])
def test_high_ranks(rank: int, device: str) -> None:
    shape = (2,) * rank
    x, index = integers(shape, torch.float32, device, 3), integers(shape, torch.int64, device, 4) % 2
    assert torch.equal(F.gather(x, -1, index), torch.gather(x, -1, index))
    rows = integers((2, 3), torch.float32, device, 5)
    assert torch.equal(F.embedding(index, rows), torch.nn.functional.embedding(index, rows))


@pytest.mark.usefixtures("deterministic")
def test_last_write_stays_when_deterministic(device: str) -> None:
    index = torch.tensor([[1, 1, 1]], device=device)
    src = torch.tensor([[5.0, 6.0, 7.0]], device=device)
    assert F.scatter(torch.zeros(1, 2, device=device), 1, index, src).tolist() == [[0, 7]]
    assert F.index_put(torch.zeros(2, device=device), (index[0],), src[0]).tolist() == [0, 7]


#: Indices of a tensor (2, 3, 4), and the shape of what they choose.
ROWS, COLUMNS, MASK = torch.tensor([0, 1]), torch.tensor([2, -3]), torch.tensor([[True, False, True], [False] * 3])
INDICES = {
    "trailing None": ((ROWS, COLUMNS, None), (2, 4)),
    "i32 and i64": ((ROWS.int(), COLUMNS), (2, 4)),
    "leading None": ((None, COLUMNS), (2, 2, 4)),
    "two adjacent": ((None, COLUMNS, ROWS), (2, 2)),
    "two apart": ((ROWS, None, COLUMNS), (2, 3)),
    "mask": ((MASK,), (2, 4)),
    "mask behind None": ((None, MASK[0], ROWS), (2, 2)),
    "mask of all": ((MASK[..., None].expand(2, 3, 4),), (1,)),
}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("what", INDICES)
def test_index_put_takes_what_torch_takes(what: str, accumulate: bool, device: str) -> None:
    indices, shape = INDICES[what]
    given = [i if i is None else i.to(device) for i in indices]
    theirs = [i.long() if i is not None and i.dtype == torch.int32 else i for i in given]
    for dtype in (torch.float32, torch.int8):
        x, values = integers((2, 3, 4), dtype, device, 1), integers(shape, dtype, device, 2)
        expected = x.clone()
        chosen = tuple(slice(None) if i is None else i for i in theirs)  # torch.index_put takes no None from Python
        expected[chosen] = x[chosen] + values if accumulate else values
        assert torch.equal(F.index_put(x, given, values, accumulate), expected)
        assert F.index_put_(x, given, values, accumulate) is x
        assert torch.equal(x, expected)


def test_lazy_negation_is_resolved(device: str) -> None:
    x = torch._neg_view(torch.arange(4.0, device=device))
    assert x.is_neg()
    index = torch.tensor([3, 1], device=device)
    assert F.gather(x, 0, index).tolist() == [-3, -1]
    assert F.index_add(torch.zeros(4, device=device), 0, index, x[:2]).tolist() == [0, -1, 0, 0]
    assert F.index_select(x, 0, index).tolist() == [-3, -1]


# --- indices out of bounds ---


def _bad(name: str, device: str, position: int) -> Call:
    """The op's fixed call with one index replaced; the others are in bounds."""
    call = fixed(device)[name]

    def replaced(a: Any) -> Any:
        if isinstance(a, tuple):
            return (*a[:-1], replaced(a[-1]))
        if not isinstance(a, torch.Tensor) or a.is_floating_point():
            return a
        a = a.clone()
        a.view(-1)[-1] = position
        return a

    return Call(call.name, tuple(map(replaced, call.args)), call.values, call.theirs, call.kwargs)


# -1 is the last of index_put's.
BAD = [(n, p) for n in FIXED for p in (5, 9, -1, -6, 2**31 - 1, -(2**31)) if p != -1 or not n.startswith("index_put")]


@pytest.mark.parametrize(("name", "position"), BAD)
def test_bad_index_raises(name: str, position: int, device: str) -> None:
    call = _bad(name, device, position)
    for checks in ({"check_indices": True}, *([{}] if device == "cpu" else [])):  # the CPU always checks
        with pytest.raises(IndexError, match=rf"= \(?.*{position}\)? is out of bounds"):
            call.ours(*call.args, **call.kwargs, **checks)
    torch.ones(1, device=device).add_(1).cpu()  # the device is still usable


@pytest.mark.parametrize("name", FIXED)
def test_checked_good_indices_pass(name: str, device: str) -> None:
    call = fixed(device)[name]
    got = call.run(partial(call.ours, check_indices=True), call.copies())
    assert torch.equal(got, call.run(call.theirs, call.copies()))


@pytest.mark.gpu
def test_cuda_skips_unless_asked() -> None:
    x = torch.ones(4, device="cuda", requires_grad=True)
    index = torch.tensor([3, 4, -1], device="cuda")
    src = torch.full((3,), 2.0, device="cuda", requires_grad=True)
    assert F.gather(x, 0, index).tolist() == [1, 0, 0]
    assert F.index_select(x, 0, index).tolist() == [1, 0, 0]
    assert F.index_add(x, 0, index, src).tolist() == [1, 1, 1, 3]
    assert F.index_put(x, (index,), src).tolist() == [1, 1, 1, 2]  # -1 is the last, too
    F.scatter_add(x, 0, index, src).sum().backward()
    assert src.grad is not None
    assert src.grad.tolist() == [1, 0, 0]


# --- refusals ---

X, V, I64 = torch.zeros(3, 4), torch.zeros(3), torch.zeros(3, dtype=torch.int64)
I2 = torch.zeros(2, 4, dtype=torch.int64)
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "gather: axis": (lambda: F.gather(X, 2, I2), IndexError, r"range of \[-2, 1\], but got 2"),
    "gather: axis of a scalar": (lambda: F.gather(V[0], 1, I64[0]), IndexError, r"range of \[-1, 0\], but got 1"),
    "gather: index dtype": (lambda: F.gather(X, 0, I2.float()), RuntimeError, "Expected dtype int32/int64 for index"),
    "gather: index i16": (lambda: F.gather(X, 0, I2.short()), RuntimeError, "Expected dtype int32/int64 for index"),
    "gather: rank": (lambda: F.gather(X, 0, I64), RuntimeError, "same number of dimensions as input"),
    "gather: too wide": (lambda: F.gather(X, 1, I2.repeat(2, 1)), RuntimeError, r"\[4, 4\] to be no larger than input"),
    "gather: element": (lambda: F.gather(X.cfloat(), 0, I2), triplan.InvalidProblem, "complex64"),
    "scatter_add: dtype": (lambda: F.scatter_add(X, 0, I2, X.double()), RuntimeError, "self.dtype to be equal"),
    "scatter_add: src small": (lambda: F.scatter_add(X, 0, I2, X[:1]), RuntimeError, "no larger than src"),
    "scatter_add: index wide": (lambda: F.scatter_add(X[:, :2], 0, I2, X), RuntimeError, "no larger than self"),
    "scatter_add: src rank": (lambda: F.scatter_add(X, 0, I2, V), RuntimeError, "dimensions as src tensor"),
    "scatter: neither": (lambda: F.scatter(X, 0, I2), TypeError, "src or value must be given"),
    "scatter: reduce": (lambda: F.scatter(X, 0, I2, 1, reduce="mean"), RuntimeError, "either add or multiply"),
    "scatter_reduce: reduce": (lambda: F.scatter_reduce(X, 0, I2, X, "max"), RuntimeError, "one of sum, prod, mean"),
    "index_copy: shape": (lambda: F.index_copy(X, 0, I64[:2], X), RuntimeError, "source is"),
    "index_fill: value": (lambda: F.index_fill(X, 0, I64, V), RuntimeError, "0-dimensional value"),
    "masked_scatter: mask": (lambda: F.masked_scatter(X, I2, X), RuntimeError, "expected a bool mask"),
    "masked_scatter: short": (lambda: F.masked_scatter(X, X == 0, X[:0]), IndexError, "out of bounds"),
    "embedding: sparse": (lambda: F.embedding(I64, X, sparse=True), triplan.Unsupported, "sparse gradients"),
    "embedding_bag: mode": (lambda: F.embedding_bag(I2, X, mode="min"), ValueError, "sum, mean or max"),
    "embedding_bag: offsets": (lambda: F.embedding_bag(I64, X), ValueError, "1D tensor of offsets"),
    "embedding_bag: devices": (lambda: F.embedding_bag(I64, X, I64.to("meta")), RuntimeError, "on the same device"),
    "mm: i32": (lambda: F.mm(X.int(), X.int()), triplan.Unsupported, "i8 and u8"),
    "scatter: dtype": (lambda: F.scatter(X, 0, I2, X.half()), RuntimeError, "Expected self.dtype to be equal"),
    "index_select: matrix": (lambda: F.index_select(X, 0, I2), IndexError, "Index is supposed to be a vector"),
    "index_select: dtype": (lambda: F.index_select(X, 0, V), RuntimeError, "Expected dtype int32/int64"),
    "index_select: scalar": (lambda: F.index_select(V[0], 0, I64), RuntimeError, "scalar can have only 1 value"),
    "index_add: length": (lambda: F.index_add(X, 0, I64[:2], X), RuntimeError, r"indices \(2\) .* source.size\(dim\)"),
    "index_add: shape": (lambda: F.index_add(X, 0, I64, X[:, :2]), RuntimeError, "source tensor shape must match"),
    "index_add: rank": (lambda: F.index_add(X, 0, I64, V), RuntimeError, "dimensions"),
    "index_add: alpha": (lambda: F.index_add(I64, 0, I64, I64, alpha=0.5), RuntimeError, "not be a floating point"),
    "index_add_: dtype": (lambda: F.index_add_(X, 0, I64, X.half()), RuntimeError, "source.dtype"),
    "index_put: none": (lambda: F.index_put(X, (), V), IndexError, "at least one index"),
    "index_put: too many": (lambda: F.index_put(V, (I64, I64), V), IndexError, r"dimension 1 \(got 2\)"),
    "index_put: mask": (lambda: F.index_put(X, (V == 0, V == 0), V), IndexError, r"shape of the mask \[3\] at index 1"),
    "index_put: float index": (lambda: F.index_put(V, (V,), V), IndexError, "must be int32 or int64"),
    "index_put: indices": (lambda: F.index_put(X, (I64, I64[:2]), V), IndexError, "could not be broadcast together"),
    "index_put: values": (lambda: F.index_put(X, (I64,), V), RuntimeError, r"value tensor of shape \[3\]"),
    "index_put: values wide": (lambda: F.index_put(V, (I64[:1],), V), RuntimeError, r"value tensor of shape \[3\]"),
    "index_put: dtype": (lambda: F.index_put(V, (I64,), V.half()), RuntimeError, "dtypes match"),
    "embedding: weight": (lambda: F.embedding(I64, V), RuntimeError, "'weight' must be 2-D"),
    "embedding: index": (lambda: F.embedding(V, X), RuntimeError, "Expected dtype int32/int64"),
    "embedding: padding": (lambda: F.embedding(I64, X, 3), RuntimeError, "within num_embeddings = 3"),
    "embedding: padding low": (lambda: F.embedding(I64, X, -4), RuntimeError, "within num_embeddings = 3"),
    "index_add_: overlap": (
        lambda: F.index_add_(V[:1].expand(3), 0, I64, V), RuntimeError, "more than one element of the written-to",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refuses(what: str) -> None:
    call, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        call()
    assert not X.any()
    assert not V.any()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("alpha", [True, False])
def test_index_add_takes_a_bool_as_a_number(alpha: bool, dtype: torch.dtype, device: str) -> None:
    input, source = integers((3, 2), dtype, device, 1), integers((3, 2), dtype, device, 2)
    index = torch.tensor([0, 2, 0], device=device)
    expected = torch.index_add(input, 0, index, source, alpha=int(alpha))
    assert torch.equal(F.index_add(input, 0, index, source, alpha=alpha), expected)
    assert torch.equal(F.index_add_(input, 0, index, source, alpha=alpha), expected)


@pytest.mark.gpu
def test_refuses_two_devices() -> None:
    with pytest.raises(RuntimeError, match="found at least two devices"):
        F.gather(X.cuda(), 0, I2)
    with pytest.raises(RuntimeError, match="found at least two devices"):
        F.index_add_(X.cuda(), 0, I64.cuda(), X)


# --- out= ---


def _out_call(name: str, device: str) -> tuple[Call, torch.Tensor]:
    call = fixed(device)[name]
    return call, call.run(call.theirs, call.copies())


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", WITH_OUT)
def test_out_is_written_and_returned(name: str, strided: bool, device: str) -> None:
    call, expected = _out_call(name, device)
    whole = torch.full((*reversed(expected.shape), 2), 99, dtype=expected.dtype, device=device)
    out = whole[..., 0].t() if strided else torch.full_like(expected, 99)
    version = out._version
    assert call.ours(*call.args, **call.kwargs, out=out) is out
    assert torch.equal(out, expected)
    assert out._version > version
    assert (whole[..., 1] == 99).all()


@pytest.mark.parametrize("name", WITH_OUT)
def test_out_is_resized(name: str, device: str) -> None:
    call, expected = _out_call(name, device)
    empty = torch.empty(0, dtype=expected.dtype, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(call.ours(*call.args, **call.kwargs, out=empty), expected)
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        assert torch.equal(call.ours(*call.args, **call.kwargs, out=torch.ones(7, out=empty)), expected)


@pytest.mark.parametrize("name", WITH_OUT)
def test_out_refusals(name: str, device: str) -> None:
    call, expected = _out_call(name, device)
    with pytest.raises(RuntimeError, match=r"Expected out .* dtype torch\.float64, but got torch\.float32"):
        call.ours(*call.args, **call.kwargs, out=expected.float())
    out = torch.full_like(expected, 99)
    for values in ([v.requires_grad_(i == 0) for i, v in enumerate(call.copies())], call.copies(requires_grad=True)):
        call.kwargs["out"] = out
        with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
            call.run(call.ours, values)
        assert (out == 99).all()
        with torch.no_grad():
            assert torch.equal(call.run(call.ours, values), expected)
        out.fill_(99)
    call.kwargs["out"] = out.requires_grad_()
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        call.run(call.ours)
    call.kwargs["out"] = expected[:1, :1].expand(expected.shape)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        call.run(call.ours)


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("name", WITH_OUT)
def test_an_out_that_overlaps_itself_is_refused_untouched(name: str, fits: bool, device: str) -> None:
    """Also where it would be resized: then it would overwrite what it is a view of."""
    call, expected = _out_call(name, device)
    base = torch.full((1, 1), 99, dtype=expected.dtype, device=device)
    shape = expected.shape if fits else (expected.shape[0] + 1, *expected.shape[1:])
    out = base.expand(shape)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        call.ours(*call.args, **call.kwargs, out=out)
    assert out.shape == shape
    assert base.item() == 99


@pytest.mark.parametrize("name", ["scatter_add", "scatter", "index_add"])
def test_out_may_be_an_input(name: str, device: str) -> None:
    call, expected = _out_call(name, device)
    target, src = call.copies()
    call.kwargs["out"] = target
    assert torch.equal(call.run(call.ours, [target, src]), expected)
    target, src = call.copies()
    wide = torch.zeros(8, 5, dtype=src.dtype, device=device)
    wide[:3] = src
    call.kwargs["out"] = wide[1:5]
    assert torch.equal(call.run(call.ours, [target, wide[:3]]), expected)


# --- in place ---


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_reads_before_it_writes(name: str, device: str) -> None:
    index = torch.tensor([2, 0, 0], device=device)
    got, expected = (integers((3,), torch.float32, device, 6) for _ in range(2))
    getattr(F, name)(got, 0, index, got)
    getattr(expected, name)(0, index, expected.clone())
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_on_a_slice(name: str, device: str) -> None:
    index = torch.tensor([2, 0, 0], device=device)
    got, expected = (integers((5, 4), torch.float32, device, 6) for _ in range(2))
    src = integers((3,), torch.float32, device, 7)
    version = got._version
    getattr(F, name)(got[1:, 1], 0, index, src)
    getattr(expected[1:, 1], name)(0, index, src)
    assert torch.equal(got, expected)
    assert got._version > version


# --- modes ---


@pytest.mark.parametrize("name", FIXED)
def test_inference_mode(name: str, device: str) -> None:
    with torch.inference_mode():
        call = fixed(device)[name]
        got = call.run(call.ours, call.copies())
        assert got.is_inference()
        assert torch.equal(got, call.run(call.theirs, call.copies()))
    if name in IN_PLACE:
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
            call.ours(*call.args, **call.kwargs)


@pytest.mark.parametrize("name", FIXED)
def test_autocast_changes_nothing(name: str, device: str) -> None:
    call = fixed(device, torch.float32)[name]
    expected = call.run(call.ours, call.copies())
    with torch.autocast(device, dtype=torch.bfloat16):
        got = call.run(call.ours, call.copies(requires_grad=name not in IN_PLACE))
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)


def test_import_of_triplan_does_not_register_ops() -> None:
    import subprocess
    import sys

    code = (
        "import sys, triplan; assert 'triplan.functional' not in sys.modules; import triplan.functional as F; F.gather"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
