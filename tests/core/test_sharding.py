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
from typing import Any

import pytest
import torch
from torch import Tensor, distributed as dist

from bench.functions import ALIKE, Call, Draw, calls

WORLD = 2
NAMES = sorted(n for n in calls(Draw(6, 8, torch.float32, torch.device("cpu"))) if n not in ALIKE)
KINDS = [
    pytest.param("cpu", id="gloo"),
    pytest.param("cuda", id="nccl", marks=[pytest.mark.gpu, pytest.mark.skipif("torch.cuda.device_count() < 2")]),
]


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


def outcome(name: str, device: str, mesh: Any, at: int = 0, placement: Any = None) -> list[Tensor]:
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
    return [whole(t) for t in made]


def compare(name: str, device: str, mesh: Any, at: int, placement: Any, alone: list[Tensor]) -> None:
    if name.endswith("_") and at == 0 and placement.is_partial():
        with pytest.raises(RuntimeError, match="terms of a sum"):
            outcome(name, device, mesh, at, placement)
        return
    for mine, expected in zip(outcome(name, device, mesh, at, placement), alone, strict=True):
        assert (mine.shape, mine.dtype) == (expected.shape, expected.dtype)
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def work(rank: int, folder: str, kind: str, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", init_method=store, rank=rank, world_size=WORLD)
    found: dict[str, dict[str, str]] = {}
    try:
        mesh = dist.init_device_mesh(kind, (WORLD,))
        for name in names:
            found[name], alone = {}, outcome(name, str(device), mesh)
            for at, argument in enumerate(drawn(str(device))[name].args):
                for placement in placements(argument) if isinstance(argument, Tensor) else ():
                    if name == "attention_varlen" and placement.is_shard(1) and torch.__version__ < "2.13":
                        continue  # the call itself flattens, which torch then refuses
                    try:
                        compare(name, str(device), mesh, at, placement, alone)
                    except Exception:
                        found[name][f"argument {at}, {placement}"] = traceback.format_exc()
    finally:
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        dist.destroy_process_group()


@pytest.fixture(scope="module", params=KINDS)
def failures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each process: by function and way, what went wrong."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(work, (str(folder), request.param, NAMES), nprocs=WORLD)
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("name", NAMES)
def test_divided_arguments_give_what_whole_ones_do(name: str, failures: list[dict[str, Any]]) -> None:
    for of in failures:
        assert not of[name], "\n".join(f"{way}:\n{text}" for way, text in of[name].items())
