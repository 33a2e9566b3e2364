"""Modules, optimizers and clipping of parameters that fully_shard divides between two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from samples import in_ranks
from torch import Tensor, distributed as dist, nn

import triplan.nn
import triplan.optim as ours
from triplan.errors import InvalidProblem

WORLD, ROWS, LENGTH, CLASSES, WIDTH = 2, 4, 9, 51, 16
CASES = [
    pytest.param("cpu", id="gloo"),
    pytest.param("cuda", id="nccl", marks=[pytest.mark.gpu, pytest.mark.skipif("torch.cuda.device_count() < 2")]),
]


class Block(nn.Module):
    """A bias of one element, of which the second process has none; rows that two do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = triplan.nn.LayerNorm(WIDTH), triplan.nn.Linear(WIDTH, 1)
        self.up, self.down = triplan.nn.Linear(WIDTH, 33), triplan.nn.Linear(33, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y: Tensor = x + self.down(triplan.functional.gelu(self.up(h))) * self.gate(h)
        return y


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        triplan.nn.Embedding(CLASSES, WIDTH),
        Block(),
        Block(),
        triplan.nn.RMSNorm(WIDTH),
        triplan.nn.Linear(WIDTH, CLASSES),
    )


def whole(t: Any) -> Tensor:
    found: Tensor = t.full_tensor()
    return found


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return triplan.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def sharded(mesh: Any, device: torch.device) -> nn.Sequential:
    from torch.distributed.fsdp import fully_shard

    model = network().to(device)
    for block in model[1:3]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trains_as_one(mesh: Any, rank: int, device: torch.device, folder: str) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
    from torch.distributed.tensor import DTensor

    alone, model = network().to(device), sharded(mesh, device)
    tokens = torch.randint(CLASSES, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1)).to(device)
    mine = tokens.chunk(WORLD)[rank]
    optimizers = [ours.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (model, alone)]
    pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
    for step in range(4):
        losses = [loss_of(model, mine), loss_of(alone, tokens)]
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]
        mean = losses[0].detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / WORLD, losses[1].detach(), rtol=1e-5, atol=0)
        for p, q in pairs:
            assert isinstance(p.grad, DTensor)
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-4, atol=1e-7)
            q.grad = whole(p.grad)  # from here on, bits are compared
        limit = 0.5 if step % 2 else 1e3
        norms = [ours.clip_grad_norm_(m.parameters(), limit) for m in (model, alone)]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)
        assert (norms[1] > limit) == step % 2
        every = [torch.empty_like(norms[0]) for _ in range(WORLD)]
        dist.all_gather(every, norms[0])
        assert torch.equal(*every)
        for p, q in pairs:
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-6, atol=0)
            q.grad = whole(p.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for p, q in pairs:
            assert torch.equal(whole(p), q)
    state = optimizers[0].state[next(model.parameters())]
    assert isinstance(state["exp_avg"], DTensor)
    kept = get_optimizer_state_dict(model, optimizers[0], options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        for name, q in alone.named_parameters():
            assert torch.equal(kept["state"][name]["exp_avg_sq"].to(device), optimizers[1].state[q]["exp_avg_sq"])
    goes_on_from_a_checkpoint(mesh, device, folder, model, optimizers[0], mine)


def goes_on_from_a_checkpoint(
    mesh: Any, device: torch.device, folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor
) -> None:
    """What torch.distributed.checkpoint wrote and read again takes the same next step, in every bit."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    other = sharded(mesh, device)
    restored = ours.AdamW(other.parameters(), lr=0.5)  # the rate is read too
    names = "model", "optimizer"
    checkpoint.save(dict(zip(names, get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
    read = dict(zip(names, get_state_dict(other, restored), strict=True))
    checkpoint.load(read, checkpoint_id=folder)
    set_state_dict(other, restored, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    for trained, by in ((model, optimizer), (other, restored)):
        loss_of(trained, tokens).backward()  # type: ignore[no-untyped-call]
        by.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(p), whole(q))


def narrow_parameters(mesh: Any, device: torch.device) -> None:
    """Of bf16, with masters in f32: bits of one process."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    g = torch.Generator().manual_seed(2)
    values, grads = torch.randn(7, 3, generator=g).bfloat16(), torch.randn(5, 7, 3, generator=g).bfloat16()
    alone = nn.Parameter(values.to(device, copy=True))
    p = nn.Parameter(distribute_tensor(values.to(device, copy=True), mesh, [Shard(0)]))
    optimizers = [ours.AdamW([q], lr=1e-2, master_weights=True) for q in (p, alone)]
    for grad in grads:
        p.grad, alone.grad = distribute_tensor(grad.to(device), mesh, [Shard(0)]), grad.to(device)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(whole(p), alone)
    master = optimizers[0].state[p]["master"]
    assert isinstance(master, DTensor)
    assert torch.equal(whole(master), optimizers[1].state[alone]["master"])
    copies = nn.Parameter(distribute_tensor(values.to(device), mesh, [Replicate()]))
    for parameter, placement in ((copies, Replicate()), (p, Shard(0))):
        parameter.grad = distribute_tensor(grads[0].to(device), mesh, [placement])
    ours.AdamW([p], stochastic_rounding=True).step()
    with pytest.raises(InvalidProblem, match="copies of a parameter"):
        ours.AdamW([copies], stochastic_rounding=True).step()


def muon_as_one(mesh: Any, device: torch.device) -> None:
    """Whole matrices move between ranks: the bits of one process, of rows that two do not divide, and of fewer."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    shapes = [(7, 12)] * 3 + [(12, 5)] * 2 + [(1, 6), (16, 16)]
    for placement in (Shard(0), Shard(1), Replicate()):
        g = torch.Generator().manual_seed(3)
        drawn = [torch.randn(shape, generator=g).to(device) for shape in shapes]
        alone = [nn.Parameter(t.clone()) for t in drawn]
        parts = [nn.Parameter(distribute_tensor(t.clone(), mesh, [placement])) for t in drawn]
        optimizers = [ours.Muon(params, lr=0.02) for params in (parts, alone)]
        for step in range(3):
            for p, q in zip(parts, alone, strict=True):
                q.grad = torch.randn(q.shape, generator=g).to(device)
                p.grad = distribute_tensor(q.grad.clone(), mesh, [placement])
                if step == 2:  # terms of a sum, of which the other ranks have none
                    term = q.grad if mesh.get_rank() == 0 else torch.zeros_like(q.grad)
                    p.grad = DTensor.from_local(term, mesh, [Partial()])
            if step == 1:
                parts[3].grad = alone[3].grad = None
            for optimizer in optimizers:
                optimizer.step()
            for p, q in zip(parts, alone, strict=True):
                assert torch.equal(whole(p), q), (placement, step, tuple(q.shape))
        buffer = optimizers[0].state[parts[0]]["momentum_buffer"]
        assert torch.equal(whole(buffer), optimizers[1].state[alone[0]]["momentum_buffer"])


def refuses_and_redistributes(mesh: Any, rank: int, device: torch.device) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    values = torch.arange(10.0, device=device).view(5, 2)
    p = nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))
    p.grad = DTensor.from_local(torch.full_like(values, rank + 1.0), mesh, [Partial()])
    with pytest.raises(InvalidProblem, match="terms of a sum"):
        ours.get_total_norm([p.grad], 1.0)
    terms = p.grad
    ours.SGD([p], lr=1.0).step()
    assert torch.equal(whole(p), values - 3)
    p.grad = terms
    assert ours.clip_grad_norm_([p], 1e3, 1.0) == 30
    assert p.grad.placements == (Shard(0),)
    assert torch.equal(whole(p.grad), torch.full_like(values, 3.0))
    p.grad = distribute_tensor(values.clone(), mesh, [Shard(1)])
    copy = nn.Parameter(distribute_tensor(values.clone(), mesh, [Replicate()]))
    copy.grad = distribute_tensor(values.clone(), mesh, [Replicate()])
    plain = nn.Parameter(values.clone())
    plain.grad = values.clone()
    both = [p.grad, copy.grad, plain.grad]
    for order in (2.0, 1.0, 3.0, float("inf")):
        norm = ours.get_total_norm(both, order)
        expected = torch.linalg.vector_norm(values.double().repeat(3, 1), order)
        torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
    with pytest.raises(InvalidProblem, match="must be positive"):
        ours.get_total_norm(both, -1.0)
    ours.clip_grads_with_norm_(
        [p, copy, plain], 1.0, distribute_tensor(torch.tensor(2.0, device=device), mesh, [Replicate()])
    )
    for grad in (whole(p.grad), whole(copy.grad), plain.grad):
        torch.testing.assert_close(grad, values / (2 + 1e-6))
    ours.clip_grad_value_([p, copy, plain], 2.0)
    for grad in (whole(p.grad), whole(copy.grad), plain.grad):
        torch.testing.assert_close(grad, (values / (2 + 1e-6)).clamp(max=2))


def work(rank: int, store: str, kind: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD
    )
    try:
        mesh = dist.init_device_mesh(kind, (WORLD,))
        trains_as_one(mesh, rank, device, f"{store}-checkpoint")
        narrow_parameters(mesh, device)
        muon_as_one(mesh, device)
        refuses_and_redistributes(mesh, rank, device)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", CASES)
def test_two_processes_train_as_one(tmp_path: Path, kind: str) -> None:
    in_ranks(work, (str(tmp_path / "store"), kind), WORLD)
