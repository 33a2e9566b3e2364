"""Patched models on two and four processes, divided by tensors, sequences and data, as on one; and what bits are the
same for any number of them."""

from __future__ import annotations

import copy
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import in_ranks
from torch import Tensor, distributed as dist, nn

import triplan.nn
import triplan.optim
from triplan import functional

ROWS, LENGTH, CLASSES, WIDTH, HEADS = 4, 8, 52, 32, 4


class Attention(nn.Module):
    """Half as many heads of keys as of queries, where that leaves each process whole ones."""

    def __init__(self, key_heads: int) -> None:
        super().__init__()
        keys = WIDTH // HEADS * key_heads
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, keys), nn.Linear(WIDTH, keys, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, WIDTH // HEADS)) for project in (self.q, self.k, self.v))
        found, _ = functional.attention(q, k, v, causal=True)
        out: Tensor = self.out(found.flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.first, self.second, self.attention = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), Attention(key_heads)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.add(x, self.attention(self.first(x)))
        return functional.add(x, self.mlp(self.second(x)))


class Model(nn.Module):
    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(CLASSES, WIDTH), nn.ModuleList(Block(key_heads) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def divide(model: Any, mesh: Any) -> None:
    """Tensors by columns and rows, the table and the loss by classes, norms by sequences."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    def whole() -> Any:
        return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))

    of_block = {"first": SequenceParallel(), "second": SequenceParallel(), "attention": whole(), "mlp": whole()}
    of_block |= {f"attention.{name}": ColwiseParallel(use_local_output=False) for name in "qkv"}
    of_block |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "mlp.2")}
    of_block |= {"mlp.0": ColwiseParallel()}
    plan: dict[str, Any] = {f"blocks.*.{name}": how for name, how in of_block.items()}
    plan |= {"table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel()}
    plan |= {"head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)}
    parallelize_module(model, mesh, plan)


def whole(t: Any) -> Tensor:
    found: Tensor = t.full_tensor() if hasattr(t, "full_tensor") else t
    return found.detach()


def loss_of(model: nn.Module, tokens: Tensor) -> Any:
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def trains_as_one(world: int, device: torch.device, *, by_data: bool) -> None:
    """Losses, gradients, norms and parameters of three steps. ``by_data``: half of the processes have half the rows."""
    from torch.distributed.fsdp import fully_shard

    groups = 2 if by_data else 1
    mesh = dist.init_device_mesh(device.type, (groups, world // groups), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    alone = Model(HEADS if world // groups == 4 else HEADS // 2).to(device)
    model = copy.deepcopy(alone)
    for each in (alone, model):
        report = triplan.nn.patch(each)
        assert not report.left
    divide(model, mesh["tensor"])
    if by_data:
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh["data"])
    tokens = torch.randint(CLASSES, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1)).to(device)
    mine = tokens.chunk(groups)[mesh.get_local_rank("data")]
    optimizers = [triplan.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (model, alone)]
    pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
    assert sum(p.to_local().numel() for p in model.parameters()) < 0.6 * sum(q.numel() for q in alone.parameters())  # type: ignore[attr-defined]
    for _ in range(3):
        losses = [loss_of(model, mine), loss_of(alone, tokens)]
        for loss in losses:
            loss.backward()
        mean = whole(losses[0])
        if by_data:
            dist.all_reduce(mean, group=mesh.get_group("data"))
        torch.testing.assert_close(mean / groups, losses[1].detach(), rtol=1e-5, atol=0)
        norms = [triplan.optim.clip_grad_norm_(m.parameters(), 0.5) for m in (model, alone)]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0)
        for p, q in pairs:
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-4, atol=1e-6)
            q.grad = whole(p.grad)  # AdamW divides small gradients by their size
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for p, q in pairs:
            torch.testing.assert_close(whole(p), q.detach(), rtol=1e-6, atol=1e-6)


def losses_by_classes(mesh: Any, device: torch.device) -> None:
    """With everything that they take, of classes that the processes divide unevenly; and by rows."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for shape in ((6, 11), (4, 7, 3)):
        g = torch.Generator().manual_seed(0)
        x, weight = torch.randn(shape, generator=g).to(device), torch.rand(shape[1], generator=g).to(device) + 0.1
        target = torch.randint(shape[1], (shape[0], *shape[2:]), generator=g).to(device)
        target.view(-1)[1] = -100
        x[0, 0].fill_(-torch.inf)
        for reduction in ("none", "sum", "mean"):
            for smoothing, table in ((0.0, None), (0.0, weight), (0.1, None), (0.1, weight)):
                options: Any = {"reduction": reduction, "label_smoothing": smoothing}
                # -inf times a share of smoothing is the loss of its row.
                values = x if not smoothing else x.clamp(min=-9)
                alone = values.clone().requires_grad_()
                expected = functional.cross_entropy(alone, target, table, **options)
                grad = torch.linspace(1, 2, expected.numel(), device=device).view_as(expected)
                expected.backward(grad)
                for placement in (Shard(0), Shard(1)):
                    logits = distribute_tensor(values, mesh, [placement]).requires_grad_()
                    found: Any = functional.cross_entropy(logits, target, table, **options)
                    found.backward(distribute_tensor(grad, mesh, [Replicate()]))
                    assert reduction == "none" or found.placements == (Replicate(),)
                    torch.testing.assert_close(whole(found), expected.detach(), rtol=1e-5, atol=1e-6)
                    assert logits.grad is not None
                    assert logits.grad.placements == (placement,)  # type: ignore[attr-defined]
                    torch.testing.assert_close(whole(logits.grad), alone.grad, rtol=1e-5, atol=1e-6)
    if device.type == "cpu":
        with pytest.raises(IndexError, match="11 is out of bounds"):
            functional.cross_entropy(distribute_tensor(torch.randn(2, 11), mesh, [Shard(1)]), torch.tensor([3, 11]))


def tables_by_rows(mesh: Any, device: torch.device) -> None:
    """Bits of one process: each row is read by the one that has it. Of 5 rows, the last of 4 processes has none."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for rows, padding in ((11, None), (5, 1)):
        g = torch.Generator().manual_seed(0)
        table = torch.randn(rows, 6, generator=g).to(device)
        indices = torch.randint(rows, (4, 5), generator=g).to(device)
        alone = table.clone().requires_grad_()
        expected = functional.embedding(indices, alone, padding)
        grad = torch.randn(expected.shape, generator=g).to(device)
        expected.backward(grad)
        for of_table in (Shard(0), Shard(1), Replicate()):
            for of_indices in (Shard(0), Replicate()):
                weight = distribute_tensor(table, mesh, [of_table]).requires_grad_()
                found: Any = functional.embedding(distribute_tensor(indices, mesh, [of_indices]), weight, padding)
                found.backward(distribute_tensor(grad, mesh, [Replicate()]))
                assert torch.equal(whole(found), expected)
                torch.testing.assert_close(whole(weight.grad), alone.grad)
    if device.type == "cpu":
        at, weight = distribute_tensor(torch.tensor([1, 7]), mesh, [Replicate()]), torch.randn(5, 6)
        with pytest.raises(IndexError, match="7 is out of bounds"):
            functional.embedding(at, distribute_tensor(weight, mesh, [Shard(0)]))


def sums_in_order(mesh: Any, world: int, device: torch.device) -> None:
    """Where torch is to be deterministic: the terms of ranks are added from the first on, on every rank."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    a = torch.randn(7, 4 * world, generator=torch.Generator().manual_seed(2)).to(device)
    b = torch.randn(4 * world, 5, generator=torch.Generator().manual_seed(3)).to(device)
    expected = torch.zeros(7, 5, device=device)
    for x, y in zip(a.chunk(world, 1), b.chunk(world), strict=True):
        expected = expected + functional.mm(x, y)
    torch.use_deterministic_algorithms(True)
    try:
        for placement in (Replicate(), Shard(0), Shard(1)):
            terms: Any = functional.mm(distribute_tensor(a, mesh, [Shard(1)]), distribute_tensor(b, mesh, [Shard(0)]))
            assert terms.placements[0].is_partial()
            assert torch.equal(whole(terms.redistribute(placements=[placement])), expected)
        # A bias is added once, unrounded by a division.
        bias = torch.full((5,), 1 / 3, device=device)
        found: Any = functional.linear(
            distribute_tensor(a, mesh, [Shard(1)]),
            distribute_tensor(b.t().contiguous(), mesh, [Shard(1)]),
            distribute_tensor(bias, mesh, [Replicate()]),
        )
        torch.testing.assert_close(whole(found), expected + bias, rtol=1e-6, atol=1e-6)
    finally:
        torch.use_deterministic_algorithms(False)


def random_numbers(mesh: Any, rank: int, device: torch.device) -> None:
    """Bits of one process, however the tensor is divided, and whatever the generators of other ranks than 0 hold."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x = torch.randn(6, 9, 5, generator=torch.Generator().manual_seed(4)).to(device)
    torch.manual_seed(5)
    expected = [functional.dropout(x, 0.5), functional.rand_like(x), functional.normal_(torch.empty_like(x))]
    expected.append(functional.bernoulli(x.sigmoid()))
    assert 0.3 < (expected[0] == 0).float().mean() < 0.7
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        torch.manual_seed(5 + rank)
        own = distribute_tensor(x, mesh, [placement]).requires_grad_()
        dropped: Any = functional.dropout(own, 0.5)
        found = [dropped, functional.rand_like(own), functional.normal_(torch.empty_like(own).detach())]
        found.append(functional.bernoulli(distribute_tensor(x.sigmoid(), mesh, [placement])))
        assert all(torch.equal(whole(t), e) for t, e in zip(found, expected, strict=True))
        assert dropped.placements == (placement,)
        dropped.sum().backward()
        assert torch.equal(whole(own.grad) != 0, expected[0] != 0)
    q = torch.randn(2, 8, 4, 16, generator=torch.Generator().manual_seed(7)).to(device)
    torch.manual_seed(8)
    alone, _ = functional.attention(q, q, q, dropout_p=0.5)
    assert not torch.allclose(alone, functional.attention(q, q, q)[0])
    torch.manual_seed(8 + rank)
    heads = distribute_tensor(q, mesh, [Shard(2)])
    assert torch.equal(whole(functional.attention(heads, heads, heads, dropout_p=0.5)[0]), alone)


def muon_of_two_axes(device: torch.device) -> None:
    """Matrices divided by rows and by columns, and by rows of copies: bits of one process."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh(device.type, (2, 2))
    for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(0)]):
        g = torch.Generator().manual_seed(9)
        drawn = [torch.randn(2, 6, 4, generator=g).to(device) for _ in range(3)]
        alone = [nn.Parameter(x.clone()) for x, _ in drawn]
        parts = [nn.Parameter(distribute_tensor(x.clone(), mesh, placements)) for x, _ in drawn]
        for (_, grad), p, q in zip(drawn, parts, alone, strict=True):
            p.grad, q.grad = distribute_tensor(grad, mesh, placements), grad
        for params in (parts, alone):
            triplan.optim.Muon(params, lr=0.1).step()
        assert all(torch.equal(whole(p), q) for p, q in zip(parts, alone, strict=True))


def compiles(mesh: Any, device: torch.device) -> None:
    """Of DTensors, in one graph; gradients too."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return functional.linear(functional.gelu(functional.linear(x, up)), down)

    g = torch.Generator().manual_seed(6)
    x, up, down = (torch.randn(shape, generator=g).to(device) for shape in ((5, 8), (12, 8), (8, 12)))
    leaves = [up.clone().requires_grad_(), down.clone().requires_grad_()]
    expected = mlp(x, *leaves)
    expected.sum().backward()
    parts = [distribute_tensor(t, mesh, [Shard(d)]).requires_grad_() for d, t in enumerate((up, down))]
    found: Any = torch.compile(mlp, backend="aot_eager", fullgraph=True)(
        distribute_tensor(x, mesh, [Replicate()]), *parts
    )
    found.sum().backward()
    torch.testing.assert_close(whole(found), expected.detach(), rtol=1e-4, atol=1e-4)
    for part, leaf in zip(parts, leaves, strict=True):
        torch.testing.assert_close(whole(part.grad), leaf.grad, rtol=1e-4, atol=1e-4)


def waits_no_longer(rank: int, folder: str) -> None:
    """Of an exchange to which another rank does not come, within the seconds that the group was made with."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (2,))
    terms: Any = functional.mm(*(distribute_tensor(torch.ones(4, 4), mesh, [Shard(d)]) for d in (1, 0)))
    dist.barrier()
    done, begin = Path(folder, "done"), time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            terms.full_tensor()
        assert 1 < time.monotonic() - begin < 20
        done.touch()
    while not done.exists() and time.monotonic() - begin < 30:
        time.sleep(0.05)


def work(rank: int, folder: str, kind: str, world: int) -> None:
    warnings.simplefilter("ignore")
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        mesh = dist.init_device_mesh(kind, (world,))
        trains_as_one(world, device, by_data=world == 4)
        if world == 2:
            losses_by_classes(mesh, device)
            compiles(mesh, device)
        else:
            tables_by_rows(mesh, device)
            sums_in_order(mesh, world, device)
            random_numbers(mesh, rank, device)
            muon_of_two_axes(device)
    finally:
        dist.destroy_process_group()
    if kind == "cpu" and world == 2:
        store, wait = f"file://{folder}/second", timedelta(seconds=2)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=wait)
        waits_no_longer(rank, folder)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_processes_compute_as_one(tmp_path: Path, kind: str, world: int) -> None:
    if kind == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"{torch.cuda.device_count()} GPUs")
    in_ranks(work, (str(tmp_path), kind, world), world)
