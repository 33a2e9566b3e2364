"""The rowwise bench's cases of cross-entropy: forward, and forward with the backward of a loss whose gradient is 1."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import triplan as tp
from bench.rowwise_cases import COMPARED, Buffers, in_table, with_tile
from triplan.backends.triton import losses
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.rows import Tile
from triplan.backends.triton.common.rows_entries import Entry
from triplan.backends.triton.losses.looped import Loop

SHAPES = ((8192, 32768), (8192, 131072))
Run = Callable[[int], Any]


@dataclass(frozen=True)
class LossCase:
    rows: int
    n: int
    dtype: torch.dtype
    gradient: bool
    op: str = "cross_entropy"

    @property
    def name(self) -> str:
        with_backward = "+backward" if self.gradient else ""
        return f"{self.op}{with_backward} {self.rows}x{self.n} {tp.ElementKind.of(self.dtype)}"

    @property
    def bytes(self) -> int:
        """The fewest bytes: logits are read once, and their gradient is written once."""
        return (2 if self.gradient else 1) * self.rows * self.n * self.dtype.itemsize


def cases(tiny: bool = False) -> list[LossCase]:
    return [
        LossCase(max(rows >> 11, 2) if tiny else rows, n >> 9 if tiny else n, dtype, gradient)
        for dtype in (torch.bfloat16, torch.float32)
        for gradient in (False, True)
        for rows, n in SHAPES
    ]


def make(case: LossCase, device: torch.device, generator: torch.Generator) -> Buffers:
    x = torch.randn(case.rows, case.n, dtype=case.dtype, device=device, generator=generator)
    rows = [torch.empty(case.rows, device=device) for _ in range(2)]
    one = torch.ones(1, dtype=case.dtype, device=device)
    target = torch.randint(0, case.n, (case.rows,), device=device, generator=generator)
    found = {"x": x, "target": target, "losses": rows[0], "lse": rows[1], "loss": torch.empty_like(one), "one": one}
    return Buffers({**found, "dx": torch.empty_like(x)} if case.gradient else found)


# --- ours ---


def descriptor(case: LossCase) -> tp.Descriptor:
    element = tp.ElementKind.of(case.dtype)
    return tp.CrossEntropyDescriptor(input_shape=(case.rows, case.n), element=element, gradient=case.gradient)


def plan_args(case: LossCase, b: Buffers) -> Any:
    return tp.CrossEntropyArgs(**{name: t for name, t in b.tensors.items() if name != "one"})


def planned(
    case: LossCase, buffers: list[Buffers], device: torch.device, kernel: str | None = None
) -> tuple[str, Run, int]:
    """The kernel's name, its run, and what it needs beside the operands. The backward finds a gradient of 1."""
    preference = tp.PlanPreference(deterministic=False, kernel=kernel)
    target = tp.Target.of(device)
    plan = tp.plan(descriptor(case), preference=preference, target=target).prepare(device)
    workspace = tp.Workspace.allocate(plan, device)
    args = [plan_args(case, b) for b in buffers]
    if not case.gradient:
        return plan.sku().kernel, lambda i: plan.run(args[i], workspace), plan.workspace_size()
    element = tp.ElementKind.of(case.dtype)
    scaled = tp.ScaleGradientDescriptor(input_shape=(case.rows, case.n), element=element, in_place=True)
    scale = tp.plan(scaled, target=target).prepare(device)
    given = [tp.ScaleGradientArgs(dloss=b.one, dx=b.dx) for b in buffers]

    def run(i: int) -> None:
        plan.run(args[i], workspace)
        scale.run(given[i])

    return plan.sku().kernel, run, plan.workspace_size()


# --- peers ---


def peers(case: LossCase, buffers: list[Buffers], device: torch.device, tiny: bool) -> list[tuple[str, Run]]:
    torch._dynamo.reset()
    how: dict[str, Any] = {"backend": "eager"} if tiny else {"mode": "max-autotune-no-cudagraphs"}
    compiled = torch.compile(lambda x, target: functional.cross_entropy(x, target), dynamic=False, **how)
    found = [
        ("torch", _runner(case, buffers, functional.cross_entropy)),
        ("torch.compile", _runner(case, buffers, compiled)),
    ]
    try:
        liger = importlib.import_module("liger_kernel.transformers.functional").liger_cross_entropy
    except ImportError:
        return found
    # It writes the gradient over its logits: they had better be its own.
    own = [Buffers({**b.tensors, "x": b.x.clone()}) for b in buffers]
    return [*found, ("liger", _runner(case, own, lambda x, target: liger(x * 1 if tiny else x, target)))]


def _runner(case: LossCase, buffers: list[Buffers], loss: Callable[..., Tensor]) -> Run:
    if not case.gradient:
        return lambda i: loss(buffers[i].x, buffers[i].target)
    given = [(b.x.detach().requires_grad_(), b.target, b.one.reshape(())) for b in buffers]

    def run(i: int) -> Tensor:
        x, target, one = given[i]
        (dx,) = torch.autograd.grad(loss(x, target), x, one)
        return dx

    return run


# --- what is right ---


def mismatch(case: LossCase, b: Buffers) -> str:
    """What is wrong by more than a few roundings; empty if nothing is. The first and the last rows are compared with
    float64, and the loss with the mean of all rows' losses."""
    rows = sorted({*range(min(COMPARED, case.rows)), *range(max(case.rows - COMPARED, 0), case.rows)})
    at = torch.tensor(rows, device=b.x.device)
    x, target = b.x[at].double().requires_grad_(), b.target[at]
    of_rows = functional.cross_entropy(x, target, reduction="none")
    wanted = {"losses": of_rows.detach(), "lse": torch.logsumexp(x.detach(), 1), "loss": b.losses.double().mean()[None]}
    if case.gradient:
        (dx,) = torch.autograd.grad(of_rows.sum() / case.rows, x)
        wanted["dx"] = dx
    for name, ref in wanted.items():
        got = (b.tensors[name] if name == "loss" else b.tensors[name][at]).double()
        eps = torch.finfo(case.dtype).eps if name in ("dx", "loss") else 1e-6
        bad = ~((got - ref).abs() <= 4 * (eps + 1e-6) * (ref.abs() + ref.abs().mean()))  # NaN is bad
        if bool(bad.any()):
            return f"wrong: {int(bad.sum())} of {bad.numel()} compared elements of {name}"
    return ""


def spoil(b: Buffers) -> None:
    """NaN into all outputs: what is not written shows."""
    for name in ("losses", "lse", "loss", "dx"):
        if name in b.tensors:
            b.tensors[name].fill_(float("nan"))


# --- a sweep of tiles ---


def swept(case: LossCase) -> Iterator[Entry[Any]]:
    """Entries with other tiles."""
    vec = 16 // case.dtype.itemsize
    for warps, loads in ((w, n) for w in ((8, 16, 32) if case.gradient else (4, 8)) for n in (1, 2, 4)):
        loop = Loop(1, 32 * warps * loads * vec, warps, vec)
        yield with_tile(losses.looped.LOOPED, f"looped {loop.block} w{warps}", loop)
    block = ceil_power(case.n)
    if case.gradient and block <= 32768:
        for warps in (8, 16):
            yield with_tile(losses.rows.ROWS, f"rows {block} w{warps}", Tile(1, block, warps))


@contextmanager
def registered(case: LossCase) -> Iterator[list[str]]:
    """The swept entries of ``case`` in the kernel table, for as long as this lasts: their names."""
    with in_table(case.op, swept(case)) as names:
        yield names
