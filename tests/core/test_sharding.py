"""Every function and module on DTensors: each argument divided in each way between two processes, as on one.

The processes are started once and run every case; a test a case reads what they found.
"""

from __future__ import annotations

import copy
import json
import traceback
import warnings
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replaying import noted, replays_on_cpu
from samples import in_ranks
from torch import Tensor, distributed as dist

from bench.functions import ALIKE, Call, Draw, calls

WORLD = 2
#: Functions that take no DTensors.
LOCAL = ("cached_rotary",)
#: Of the modules, those with parameters of their own or more than one function.
NAMES = sorted(
    name
    for name, call in calls(Draw(6, 8, torch.float32, torch.device("cpu"))).items()
    if name not in (*ALIKE, *LOCAL)
    and (
        not name.startswith("nn.")
        or (isinstance(call.ours, torch.nn.Module) and any(True for _ in call.ours.parameters()))
        or "ttention" in name
    )
)
KINDS = [
    pytest.param("cpu", id="gloo"),
    pytest.param("cuda", id="nccl", marks=[pytest.mark.gpu, pytest.mark.skipif("torch.cuda.device_count() < 2")]),
]


#: By function: an argument and how it is divided, and how the result then is, without a copy of the whole.
DIVIDED = {
    "linear": {"0 S(0)": "S(0)", "0 S(1)": "P(sum)", "1 S(0)": "S(1)", "1 S(1)": "P(sum)"},
    "bmm": {"0 S(0)": "S(0)", "0 S(2)": "P(sum)", "1 S(2)": "S(2)"},
    "matmul": {"0 S(2)": "P(sum)", "1 S(1)": "S(2)"},
    "conv2d": {"0 S(0)": "S(0)", "0 S(1)": "P(sum)", "1 S(0)": "S(1)"},
    "attention": {"0 S(0)": "S(0)", "0 S(2)": "S(2)", "1 S(2)": "S(2)"},
    "layer_norm": {"0 S(0)": "S(0)"},
    "rms_norm": {"0 S(0)": "S(0)"},
    "group_norm": {"0 S(0)": "S(0)"},
    "batch_norm": {"0 S(1)": "S(1)", "3 S(0)": "S(1)"},
    "batch_norm_relu": {"0 S(1)": "S(1)", "3 S(0)": "S(1)", "8 S(1)": "S(1)"},
    "softmax": {"0 S(0)": "S(0)"},
    "cumsum": {"0 S(0)": "S(0)"},
    "sum": {"0 S(0)": "S(0)", "0 S(1)": "P(sum)"},
    "amax": {"0 S(0)": "S(0)"},
    "max": {"0 S(0)": "S(0)"},
    "reduce_expression": {"0 S(0)": "S(0)", "0 S(1)": "P(sum)"},
    "add": {"0 S(0)": "S(0)", "1 S(1)": "S(1)"},
    "gelu": {"0 S(0)": "S(0)", "0 S(1)": "S(1)"},
    "expression": {"0 S(1)": "S(1)", "2 S(0)": "S(1)"},
    "embedding": {"0 S(0)": "S(0)", "1 S(0)": "P(sum)", "1 S(1)": "S(1)"},
    "gather": {"0 S(1)": "S(1)", "2 S(0)": "S(0)"},
    "scatter_add": {"0 S(1)": "S(1)", "3 S(0)": "P(sum)"},
    "index_select": {"0 S(1)": "S(1)", "2 S(0)": "S(0)"},
    "index_add": {"0 S(1)": "S(1)", "3 S(0)": "P(sum)"},
    "rotary": {"0 S(0)": "S(0)"},
    "sample": {"0 S(0)": "S(0)"},
    "dropout": {"0 S(0)": "S(0)", "0 S(1)": "S(1)"},
    "max_pool2d": {"0 S(0)": "S(0)", "0 S(1)": "S(1)"},
    "interpolate": {"0 S(1)": "S(1)"},
    "cat": {"0 S(0)": "S(0)"},
    "pad": {"0 S(0)": "S(0)"},
    "cast": {"0 S(1)": "S(1)"},
}
#: Functions whose calls of local tensors are seen to be replayed: with views, copies, several results, lists, scratch.
REPLAYED = (
    "addbmm",
    "attention",
    "cat",
    "conv2d",
    "cross_entropy",
    "embedding",
    "gelu",
    "index_add",
    "layer_norm",
    "linear",
)
#: Calls that hold tensors of their own, which are the same on each rank.
CLOSED = ("attention_varlen", "nn.MultiheadAttention")


@cache
def drawn(device: str) -> dict[str, Call]:
    torch.manual_seed(0)
    return calls(Draw(6, 8, torch.float32, torch.device(device)))


def tensors(value: Any) -> list[Any]:
    return [t for t in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(t, Tensor)]


def placements(t: Tensor) -> list[Any]:
    """Every way to divide ``t``: along an axis, or into terms of a sum."""
    from torch.distributed.tensor import Partial, Shard

    return [*(Shard(d) for d in range(t.dim()) if t.size(d) >= WORLD), *([Partial()] if t.is_floating_point() else [])]


def divided(value: Any, mesh: Any, placement: Any) -> Any:
    """``value`` with DTensors for its tensors."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(value, (list, tuple)):
        return type(value)(divided(v, mesh, placement) for v in value)
    if not isinstance(value, Tensor):
        return value
    if not placement.is_partial():
        return distribute_tensor(value.detach(), mesh, [placement])
    term = value.detach() if mesh.get_local_rank() == 0 else torch.zeros_like(value)
    return DTensor.from_local(term, mesh, [placement])


def whole(t: Any) -> Tensor:
    found: Tensor = t.full_tensor() if hasattr(t, "full_tensor") else t
    return found.detach()


def function_of(call: Call, mesh: Any | None) -> Any:
    if not isinstance(call.ours, torch.nn.Module):
        return call.ours
    from torch.distributed.tensor import distribute_module

    module = copy.deepcopy(call.ours)
    return module if mesh is None else distribute_module(module, mesh)


def outcome(name: str, device: str, mesh: Any, at: int = 0, placement: Any = None) -> list[Any]:
    """Results and gradients of whole tensors, or with argument ``at`` divided by ``placement`` and others copied."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.experimental import implicit_replication

    call, in_place, sharded = drawn(device)[name], name.endswith("_"), placement is not None
    args: list[Any] = [copy.deepcopy(a) for a in call.args]
    if sharded:
        args = [divided(a, mesh, placement if i == at else Replicate()) for i, a in enumerate(args)]
    for i in call.grads:
        args[i] = args[i].detach().requires_grad_()
    function, leaves = function_of(call, mesh if sharded else None), [args[i] for i in call.grads]
    if isinstance(function, torch.nn.Module):
        leaves += function.parameters()
    torch.manual_seed(1)
    with implicit_replication() if sharded and name in CLOSED else nullcontext():
        made = tensors(function(*args))
        if in_place:
            made.append(args[0])
        if leaves:
            grad = torch.linspace(-1, 1, made[0].numel(), device=device).reshape(made[0].shape).to(made[0].dtype)
            made += torch.autograd.grad(made[0], leaves, divided(grad, mesh, Replicate()) if sharded else grad)
    return made


def compare(name: str, device: str, mesh: Any, at: int, placement: Any, alone: list[Tensor]) -> str:
    """The placement of the first result. Raises if a result or gradient differs."""
    if name.endswith("_") and at == 0 and placement.is_partial():
        with pytest.raises(RuntimeError, match="terms of a sum"):
            outcome(name, device, mesh, at, placement)
        return "refused"
    made = outcome(name, device, mesh, at, placement)
    for mine, expected in zip(map(whole, made), map(whole, alone), strict=True):
        assert (mine.shape, mine.dtype) == (expected.shape, expected.dtype)
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    return str(getattr(made[0], "placements", ("plain",))[0])


def replay_of(name: str, device: str, mesh: Any) -> list[bool]:
    """Of the third call with a divided first argument: whether each replay that was asked answered."""
    from torch.distributed.tensor import Shard

    alone = outcome(name, device, mesh)
    with replays_on_cpu() if device == "cpu" else noted() as answers:
        for _ in range(3):
            answers.clear()
            compare(name, device, mesh, 0, Shard(0), alone)
        return list(answers)


def work(rank: int, folder: str, kind: str, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False  # as tests/running.py in the process that starts this one
    else:
        torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", init_method=store, rank=rank, world_size=WORLD)
    wrong, made = dict[str, dict[str, str]](), dict[str, dict[str, str]]()
    replays = dict[str, list[bool]]()
    try:
        mesh = dist.init_device_mesh(kind, (WORLD,))
        for name in names:
            wrong[name], made[name], alone = {}, {}, outcome(name, str(device), mesh)
            for at, argument in enumerate(drawn(str(device))[name].args):
                for placement in placements(argument) if isinstance(argument, Tensor) else ():
                    if name == "attention_varlen" and placement.is_shard(1) and torch.__version__ < "2.13":
                        continue  # the call itself flattens, which torch then refuses
                    way = f"{at} {placement}"
                    try:
                        made[name][way] = compare(name, str(device), mesh, at, placement, alone)
                    except Exception:
                        wrong[name][way] = traceback.format_exc()
        replays = {name: replay_of(name, str(device), mesh) for name in REPLAYED}
        dist.barrier()  # gloo's thread has done what nothing waited for: it may not outlive the group
    finally:
        Path(folder, f"{rank}.json").write_text(json.dumps({"wrong": wrong, "made": made, "replays": replays}))
        dist.destroy_process_group()


@pytest.fixture(scope="module", params=KINDS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each process: by function and way, what went wrong, and the placements of results."""
    folder = tmp_path_factory.mktemp("ranks")
    in_ranks(work, (str(folder), request.param, NAMES), WORLD)
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("name", NAMES)
def test_divided_arguments_give_what_whole_ones_do(name: str, found: list[dict[str, Any]]) -> None:
    for of in found:
        assert not of["wrong"][name], "\n".join(f"argument {way}:\n{text}" for way, text in of["wrong"][name].items())
        assert of["made"][name] or not any(isinstance(a, Tensor) for a in drawn("cpu")[name].args)


@pytest.mark.parametrize("name", DIVIDED)
def test_what_is_divided_stays_divided(name: str, found: list[dict[str, Any]]) -> None:
    for of in found:
        assert {way: of["made"][name][way] for way in DIVIDED[name]} == DIVIDED[name]


@pytest.mark.parametrize("name", REPLAYED)
def test_the_calls_of_local_tensors_are_replayed(name: str, found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["replays"][name]
        assert all(of["replays"][name])


@pytest.mark.parametrize("t", [torch.arange(6.0)[::2], torch.ones(1).expand(3), torch.ones(3, 4).t()])
def test_terms_are_gathered_from_contiguous_memory(t: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses other memory, gloo copies it."""
    from triplan.functional._sharding.sums import gathered

    def gather(to: Tensor, own: Tensor, group: Any) -> None:
        assert own.is_contiguous()
        to.copy_(own)

    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    mesh: Any = SimpleNamespace(size=lambda axis: 1, get_group=lambda axis: None)
    assert torch.equal(gathered(t, mesh, 0), t[None])
