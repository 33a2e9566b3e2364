"""triplan's ops as torch.library sees them: opcheck, compiled graphs, fake tensors, dispatch modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.functional import FIXED, IN_PLACE, MODULES, WITH_OUT, SeenDispatch, fixed, integers
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import triplan.functional as F  # noqa: N812
from triplan.functional._ops import Op

pytestmark = pytest.mark.usefixtures("fresh_compiler")


OPS = {op.name: op for m in MODULES for op in vars(m).values() if isinstance(op, Op)}


def samples(device: str) -> dict[str, list[tuple[Any, ...]]]:
    """Arguments of every registered op, less ``check_indices``."""
    x = integers((4, 5), torch.float64, device, 1)
    index = torch.tensor([[3, 1, 0], [1, 2, 0]], device=device)
    vector = index[0]
    src, rows = integers((2, 3), torch.float64, device, 2), integers((3, 5), torch.float64, device, 3)
    return {
        "gather": [(x, 0, index), (x, 1, index.int()), (x[0, 0], 0, index[0, 2])],
        "gather_backward": [(src, 0, index, [4, 5]), (src, -1, index, [2, 4]), (src[0, 0], 0, index[0, 2], [])],
        "scatter_add": [(x, 0, index, rows), (x.t(), 1, index, src)],
        "scatter": [(x, 0, index, src)],
        "scatter_reduce": [(x, 0, index, rows, "prod"), (x.t(), 1, index, src, "amax", False)],
        "index_select": [(x, 1, vector), (x, -2, vector[0]), (x[0, 0], 0, vector[2])],
        "index_select_backward": [(rows, 0, vector, [4, 5])],
        "index_add": [(x, 0, vector, rows), (x, -2, vector.int(), rows, 0.5)],
        "index_put": [(x, [vector, vector], rows[0, :3]), (x, [vector], rows[:, :1], True)],
        "embedding": [(x, index), (x, index, 1), (x, index[0, 0])],
        "embedding_backward": [(integers((2, 3, 5), torch.float64, device, 4), index, 4, 1)],
    }


def test_every_registered_op_has_samples() -> None:
    assert samples("cpu").keys() == OPS.keys()


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_opcheck(name: str, requires_grad: bool, device: str) -> None:
    for args in samples(device)[name]:
        prepared = tuple(_leaf(a, requires_grad) for a in args)
        torch.library.opcheck(OPS[name].overload, prepared)


@pytest.mark.parametrize("name", OPS)
def test_opcheck_of_mutating_ops(name: str, device: str) -> None:
    op = OPS[name]
    for args in samples(device)[name]:
        torch.library.opcheck(op.out_overload, (torch.zeros_like(op.overload(*args)), *args))
        if op.update is not None:
            torch.library.opcheck(op.in_place_overload, tuple(_leaf(a, False) for a in args))


def _leaf(a: Any, requires_grad: bool) -> Any:
    if not isinstance(a, torch.Tensor) or not a.is_floating_point():
        return a
    return a.detach().clone().requires_grad_(requires_grad)


# --- torch.compile ---


def test_one_graph_for_every_size(device: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def function(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        picked = F.index_select(x, 0, index)
        return F.scatter_add(x, 0, index[:, None].expand(-1, x.shape[1]), picked)

    for rows, width, n in ((4, 5, 3), (7, 2, 9), (3, 8, 2)):
        x = integers((rows, width), torch.float64, device, n).requires_grad_()
        index = torch.arange(n, device=device) % rows
        got, expected = function(x, index), x.index_add(0, index, x.index_select(0, index))
        assert torch.equal(got, expected)
        assert torch.equal(torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", IN_PLACE)
def test_compiled_in_place_writes_its_argument(name: str, device: str) -> None:
    call = fixed(device)[name]
    compiled = torch.compile(lambda *values: call.run(call.ours, list(values)), fullgraph=True, backend="aot_eager")
    values = call.copies()
    assert compiled(*values) is values[0]
    assert torch.equal(values[0], call.run(call.theirs, call.copies()))


@pytest.mark.parametrize("rows", [3, 4])
def test_compiled_out_that_overlaps_itself_is_refused_untouched(rows: int) -> None:
    """Also where it would be resized first, which would make it packed, over what it is a view of."""
    base, a, b = torch.full((1, 1), 99.0), torch.ones(3, 4), torch.ones(4, 5)
    compiled = torch.compile(lambda out: F.mm(a, b, out=out), backend="aot_eager")
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        compiled(base.expand(rows, 5))
    assert base.item() == 99


@pytest.mark.parametrize("name", WITH_OUT)
def test_compiled_out(name: str, device: str) -> None:
    call = fixed(device)[name]
    expected = call.run(call.theirs, call.copies())
    compiled = torch.compile(
        lambda out: call.ours(*call.args, **call.kwargs, out=out), fullgraph=True, backend="aot_eager"
    )
    out = torch.zeros_like(expected)
    compiled(out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", FIXED)
def test_compiled_bad_index_raises(name: str, device: str) -> None:
    call = fixed(device)[name]
    big = integers((1,), torch.int64, device, 0) * 0 + 99
    args = [big.expand(a.shape) if isinstance(a, torch.Tensor) and not a.is_floating_point() else a for a in call.args]
    args = [tuple(big.expand(i.shape) for i in a) if isinstance(a, tuple) else a for a in args]
    compiled = torch.compile(
        lambda: call.ours(*args, **call.kwargs, check_indices=True), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(IndexError, match="99"):
        compiled()


# --- whoever watches sees the ops ---


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_dispatch_modes_see_one_op(name: str, requires_grad: bool, device: str) -> None:
    call = fixed(device)[name]
    values = call.copies(requires_grad)
    if call.name in IN_PLACE:
        values[0] = values[0].clone()
    with SeenDispatch() as seen:
        call.run(call.ours, values)
    registered = [op for op in seen.ops if op.startswith("triplan.")]
    assert registered == [f"triplan.{call.name.removesuffix('_with_grad')}.default"]
    assert not any("gather" in op or "index" in op or "scatter" in op for op in seen.ops if op not in registered)


@pytest.mark.parametrize(("indices", "ops"), [(1, 1), (2, 12)])
def test_ops_of_the_gradient_of_index_put(indices: int, ops: int, device: str) -> None:
    """Each is a launch: reading by one index is one, without torch's."""
    x, values = (torch.zeros(shape, device=device, requires_grad=True) for shape in ((4, 5, 6), (1,)))
    at = tuple(torch.tensor([2, -1], device=device) for _ in range(indices))
    out = F.index_put(x, at, values.expand(2, *x.shape[indices:]), True)
    grad = torch.ones_like(out)
    with SeenDispatch() as seen:
        torch.autograd.grad(out, values, grad)
    launched = [op for op in seen.ops if not any(free in op for free in ("view", "detach", "sum", "expand"))]
    assert len(launched) == ops


@pytest.mark.parametrize("name", FIXED)
def test_fake_tensors(name: str) -> None:
    call = fixed("cpu")[name]
    expected = call.run(call.ours, call.copies())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        got = call.run(call.ours, [mode.from_tensor(v) for v in call.copies()])
    assert isinstance(got, FakeTensor)
    assert (got.shape, got.dtype, got.stride()) == (expected.shape, expected.dtype, expected.stride())


def test_meta_tensors_are_checked() -> None:
    x, index = torch.empty(3, 4, device="meta"), torch.empty(2, 4, dtype=torch.int64, device="meta")
    assert F.gather(x, 0, index).shape == (2, 4)
    with pytest.raises(RuntimeError, match="no larger than input"):
        F.gather(x, 1, torch.empty(5, 4, dtype=torch.int64, device="meta"))
