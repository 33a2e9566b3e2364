"""What torch's functions do around their values, ours do too: autocast, tensor subclasses, graphs of any size."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from cases import drawing
from cases.derivatives import LOSSES, ROWS, derivable
from samples import same

import triplan.functional as F  # noqa: N812
from bench.functions import Call, Draw, calls
from triplan.functional import _autocast

Tensor = torch.Tensor
NAMES = sorted(calls(Draw(6, 8, torch.float32, torch.device("cpu"))))
#: Modules of torch have parameters of one width.
SIZED = [name for name in NAMES if name not in ("nn.LayerNorm", "nn.RMSNorm")]


def drawn(name: str, device: str, dtype: torch.dtype = torch.float32, m: int = 6, n: int = 8) -> Call:
    return drawing.drawn(Draw(m, n, dtype, torch.device(device)), name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("reduce_expression", "relu_squared", "sample", "swiglu")]
)  # torch has no such function
def test_autocast_gives_torchs_dtype(name: str, dtype: torch.dtype, device: str) -> None:
    call = drawn(name, device, dtype)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert call.ours(*call.given(False)).dtype == call.theirs(*call.given(False)).dtype


#: By function: the one of torch whose conversion it follows.
FOLLOWED = {name: name for name in ("rms_norm", "mm", "nll_loss")}
FOLLOWED["token_log_probs"] = "log_softmax"


@pytest.mark.parametrize("name", FOLLOWED)
def test_autocast_follows_torchs_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a torch that converts to f32 on the CPU what it converts on GPUs, and neither mm nor nll_loss."""
    changed = set(FOLLOWED.values())
    monkeypatch.setitem(_autocast.CONVERTED, "cpu", _autocast.CONVERTED["cpu"] ^ changed)
    given = torch.float32 if name == "mm" else torch.bfloat16
    call = drawn(name, "cpu", given)
    expected = given if name == "nll_loss" else torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call.ours(*call.given(False)).dtype == expected


@pytest.mark.parametrize("name", [*ROWS, *LOSSES])
def test_autocast_computes_in_f32(name: str, device: str) -> None:
    """Where it converts at all; results and gradients are those of converted arguments."""
    ours, _, leaves = derivable(name, device)
    if "added" in name:  # the product of both results would be converted too
        ours = lambda x, w, r: getattr(F, name.split()[0])(x, (4,), w, residual=r)[0]  # noqa: E731
    function = name.split()[0]
    torchs = {"l2_norm": "norm", "cross_entropy": "nll_loss"}.get(function, function)
    element = torch.float32 if torchs in _autocast.CONVERTED[device] else torch.bfloat16
    args = [a.detach().bfloat16().requires_grad_() for a in leaves]
    wide = [a.detach().to(element).requires_grad_() for a in args]
    with torch.autocast(device, dtype=torch.bfloat16):
        out = ours(*args)
    wanted = ours(*wide)
    assert out.dtype == element
    assert out.grad_fn.name() == wanted.grad_fn.name()  # by the same route: cross_entropy's keeps no logits if it can
    dout = torch.randn_like(out)
    converted = [g.bfloat16() for g in torch.autograd.grad(wanted, wide, dout)]
    same((out, *torch.autograd.grad(out, args, dout)), (wanted, *converted))
    with torch.autocast(device, dtype=torch.bfloat16):
        assert ours(*leaves).dtype == torch.float64


class Kept(Tensor):
    """Its functions return its type, which is torch's default."""

    seen: list[Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", NAMES)
def test_a_subclass_sees_one_call_and_is_kept(name: str, device: str) -> None:
    call = drawn(name, device)
    args = call.given(False)
    at = next(i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point())
    given = [a.as_subclass(Kept) if i == at else a for i, a in enumerate(args)]
    Kept.seen = []
    got = call.ours(*given)
    assert type(got) is Kept
    if hasattr(call.ours, "replays"):  # a module is no function
        assert Kept.seen == [call.ours]


def test_a_subclass_may_refuse(device: str) -> None:
    class Refused(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return NotImplemented

    call = drawn("softmax", device)
    with pytest.raises(TypeError, match=r"'triplan\.functional\.softmax\.softmax'.*Refused"):
        call.ours(call.args[0].as_subclass(Refused), -1)


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.usefixtures("fresh_compiler")
def test_one_graph_for_every_size(name: str, device: str) -> None:
    compiled = None
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m, n in ((6, 8), (10, 12), (14, 5)):
            call = drawn(name, device, m=m, n=n)
            if compiled is None:
                compiled = torch.compile(call.ours, backend="eager", dynamic=True, fullgraph=True)
            assert compiled(*call.given(True)).shape == call.theirs(*call.given(False)).shape


@pytest.mark.parametrize("name", ["gather", "index_select", "index_add", "scatter", "scatter_add", "index_copy_"])
def test_axis_is_dim_where_torch_takes_it(name: str) -> None:
    call = drawn(name, "cpu")
    (x, dim, *rest), again = call.given(False), call.given(False)
    named = dict(zip([*inspect.signature(call.ours).parameters][2:], rest, strict=False))
    assert torch.equal(call.ours(x, axis=dim, **named), call.theirs(*again))
    for wrong in ({"dim": dim, "axis": dim, **named}, named):
        with pytest.raises(TypeError, match="dim"):
            call.ours(x, **wrong)


@pytest.mark.parametrize(
    "name",
    ["argmax", "argsort", "count_nonzero", "cumprod", "log_softmax", "logsumexp", "mean", "softmax", "std", "sum"],
)
def test_an_axis_may_be_an_integer_of_numpy(name: str, device: str) -> None:
    x = torch.arange(6.0, device=device).reshape(2, 3)
    same(*(getattr(module, name)(x, dim=np.int64(0)) for module in (F, torch)))


@pytest.mark.parametrize("two", [np.int64(2), (np.int32(2), 2)], ids=["one", "list"])
def test_sizes_of_windows_may_be_integers_of_numpy(two: Any, device: str) -> None:
    x, w = torch.arange(32.0, device=device).reshape(1, 2, 4, 4), torch.ones(3, 2, 2, 2, device=device)
    same(*(module.conv2d(x, w, stride=two, dilation=two) for module in (F, torch.nn.functional)))
    same(*(module.avg_pool2d(x, two, two) for module in (F, torch.nn.functional)))


def test_rolls_take_integers_of_numpy(device: str) -> None:
    x, one = torch.arange(6.0, device=device).reshape(2, 3), np.int64(1)
    for dims in (None, 0, one, (one,)):
        same(F.roll(x, one, dims), torch.roll(x, 1, dims))
    same(F.roll(x, (one, 2), (0, one)), torch.roll(x, (1, 2), (0, 1)))
    same(F.flip(x, one), torch.flip(x, (1,)))  # type: ignore[arg-type]
