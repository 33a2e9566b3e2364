"""Cases of cross-entropy: forward, and forward with the backward of a loss whose gradient is 1."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import triplan as tp
from bench.rows import DTYPES, Buffers, Case, Run, compiled_by_torch, with_tile, wrong_elements
from triplan.backends.triton.common.offsets import ceil_power
from triplan.backends.triton.common.rows_entries import Entry
from triplan.backends.triton.common.tiles import Tile
from triplan.backends.triton.losses import looped, rows
from triplan.backends.triton.losses.looped import Loop

#: (rows, classes)
SHAPES = ((8192, 32768), (8192, 131072))


#: Elements of a row that a linear layer makes the logits of.
FEATURES = 4096


def cases(tiny: bool = False) -> list[Case]:
    """Every dtype and shape, with and without the backward; ``tiny`` shrinks them for a smoke test. And the loss of a
    linear layer's output."""
    return [*of_linear(tiny), *_of_logits(tiny)]


def of_linear(tiny: bool) -> list[LinearCrossEntropyCase]:
    """The loss of a linear layer's output, with either accumulator of the weight's gradient."""
    rows, classes, features = (4, 64, 8) if tiny else (*SHAPES[1], FEATURES)
    return [
        LinearCrossEntropyCase("linear_cross_entropy", rows, classes, torch.bfloat16, features, compact)
        for compact in (False, True)
    ]


def _of_logits(tiny: bool) -> list[CrossEntropyCase]:
    return [
        CrossEntropyCase("cross_entropy", rows >> 11 if tiny else rows, n >> 9 if tiny else n, dtype, gradient)
        for dtype in DTYPES
        for gradient in (False, True)
        for rows, n in SHAPES
    ]


def _cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(x, target)


@dataclass(frozen=True)
class CrossEntropyCase(Case):
    gradient: bool

    @property
    def name(self) -> str:
        return super().name.replace(self.op, f"{self.op}+backward") if self.gradient else super().name

    @property
    def bytes(self) -> int:
        """The fewest bytes to move: logits are read once, and their gradient is written once."""
        return (2 if self.gradient else 1) * self.rows * self.n * self.dtype.itemsize

    @property
    def in_sweep(self) -> bool:
        return self.dtype is torch.bfloat16

    def make(self, device: torch.device, generator: torch.Generator) -> Buffers:
        x = torch.randn(self.rows, self.n, dtype=self.dtype, device=device, generator=generator)
        one = torch.ones(1, dtype=self.dtype, device=device)
        target = torch.randint(0, self.n, (self.rows,), device=device, generator=generator)
        losses, lse = (torch.empty(self.rows, device=device) for _ in range(2))
        found = {"x": x, "target": target, "losses": losses, "lse": lse, "loss": torch.empty_like(one), "one": one}
        return Buffers({**found, "dx": torch.empty_like(x)} if self.gradient else found)

    def descriptor(self) -> tp.Descriptor:
        shape, element = (self.rows, self.n), tp.ElementKind.of(self.dtype)
        return tp.CrossEntropyDescriptor(input_shape=shape, element=element, gradient=self.gradient)

    def args(self, b: Buffers) -> Any:
        return tp.CrossEntropyArgs(**{name: t for name, t in b.tensors.items() if name != "one"})

    def planned(self, buffers: list[Buffers], device: torch.device, kernel: str | None = None) -> tuple[str, Run, int]:
        """(the kernel's name, its run, bytes of the workspace). The backward is given a gradient of 1."""
        preference, target = tp.PlanPreference(deterministic=False, kernel=kernel), tp.Target.of(device)
        plan = tp.plan(self.descriptor(), preference=preference, target=target).prepare(device)
        workspace = tp.Workspace.allocate(plan, device)
        args = [self.args(b) for b in buffers]
        if not self.gradient:
            return plan.sku().kernel, lambda i: plan.run(args[i], workspace), plan.workspace_size()
        shape, element = (self.rows, self.n), tp.ElementKind.of(self.dtype)
        scaling = tp.ScaleGradientDescriptor(input_shape=shape, element=element, in_place=True)
        scale = tp.plan(scaling, target=target).prepare(device)
        scale_args = [tp.ScaleGradientArgs(dloss=b.one, dx=b.dx) for b in buffers]

        def run(i: int) -> None:
            plan.run(args[i], workspace)
            scale.run(scale_args[i])

        return plan.sku().kernel, run, plan.workspace_size()

    def peers(self, buffers: list[Buffers], device: torch.device, tiny: bool) -> list[tuple[str, Run]]:
        losses = {"torch": _cross_entropy, "torch.compile": compiled_by_torch(_cross_entropy, tiny)}
        found = [(name, self._runner(buffers, loss)) for name, loss in losses.items()]
        try:
            liger = importlib.import_module("liger_kernel.transformers.functional").liger_cross_entropy
        except ImportError:
            return found
        # liger writes the gradient over its logits, so it gets its own.
        own = [Buffers({**b.tensors, "x": b.x.clone()}) for b in buffers]
        return [*found, ("liger", self._runner(own, lambda x, target: liger(x * 1 if tiny else x, target)))]

    def _runner(self, buffers: list[Buffers], loss: Callable[..., Tensor]) -> Run:
        if not self.gradient:
            return lambda i: loss(buffers[i].x, buffers[i].target)
        given = [(b.x.detach().requires_grad_(), b.target, b.one.reshape(())) for b in buffers]

        def run(i: int) -> Tensor:
            x, target, one = given[i]
            (dx,) = torch.autograd.grad(loss(x, target), x, one)
            return dx

        return run

    def mismatch(self, b: Buffers) -> str:
        """As of any case; the loss is compared with the mean of all rows' losses."""
        at = self.compared(b.x.device)
        x, target = b.x[at].double().requires_grad_(), b.target[at]
        of_rows = functional.cross_entropy(x, target, reduction="none")
        wanted = {"losses": of_rows.detach(), "lse": torch.logsumexp(x.detach(), 1)}
        wanted["loss"] = b.losses.double().mean()[None]
        if self.gradient:
            (wanted["dx"],) = torch.autograd.grad(of_rows.sum() / self.rows, x)
        for name, ref in wanted.items():
            got = (b.tensors[name] if name == "loss" else b.tensors[name][at]).double()
            eps = torch.finfo(self.dtype).eps if name in ("dx", "loss") else 1e-6
            if wrong := wrong_elements(name, got, ref, eps, ref.abs().mean()):
                return wrong
        return ""

    def swept(self) -> Iterator[type[Entry]]:
        vec = 16 // self.dtype.itemsize
        for warps in (8, 16, 32) if self.gradient else (4, 8):
            for loads in (1, 2, 4):
                loop = Loop(1, 32 * warps * loads * vec, warps, vec)
                yield with_tile(looped.CrossEntropyLooped, f"looped {loop.block} w{warps}", loop)
        block = ceil_power(self.n)
        if self.gradient and block <= 32768:
            for warps in (8, 16):
                yield with_tile(rows.CrossEntropyRows, f"rows {block} w{warps}", Tile(1, block, warps))


@dataclass(frozen=True)
class Compact:
    """Of torch's LinearCrossEntropyOptions, which torch 2.11 does not have yet, what counts here."""

    acc_policy = "compact"


@dataclass(frozen=True)
class LinearCrossEntropyCase(Case):
    """The loss of a linear layer's output and the gradients of input and weight, from input and target. ``compact``:
    the weight's gradient is summed in its own dtype."""

    features: int
    compact: bool
    in_sweep = False

    @property
    def name(self) -> str:
        return super().name + (" compact" if self.compact else "")

    @property
    def bytes(self) -> int:
        """Input and weight, and their gradients; what matters is the products."""
        return 2 * (self.rows + self.n) * self.features * self.dtype.itemsize

    def make(self, device: torch.device, generator: torch.Generator) -> Buffers:
        def values(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=self.dtype, device=device, generator=generator)

        target = torch.randint(0, self.n, (self.rows,), device=device, generator=generator)
        return Buffers(
            {"x": values(self.rows, self.features), "w": values(self.n, self.features) / 64, "target": target}
        )

    def descriptor(self) -> tp.Descriptor:
        raise NotImplementedError("several plans")

    def spoil(self, b: Buffers) -> None:
        """Results are new tensors."""

    def planned(self, buffers: list[Buffers], device: torch.device, kernel: str | None = None) -> tuple[str, Run, int]:
        ours = importlib.import_module("triplan.functional").linear_cross_entropy
        options = Compact() if self.compact else None
        run = self._runner(buffers, lambda x, w, t: ours(x, w, t, options=options))

        def kept(i: int) -> Any:
            buffers[i].tensors["dx"], buffers[i].tensors["dw"] = found = run(i)
            return found

        return "chunks", kept, 0

    def peers(self, buffers: list[Buffers], device: torch.device, tiny: bool) -> list[tuple[str, Run]]:
        ours = importlib.import_module("triplan.functional")
        ways: dict[str, Callable[..., Tensor]] = {
            "torch": lambda x, w, t: functional.cross_entropy(functional.linear(x, w), t),
            "triplan by logits": lambda x, w, t: ours.cross_entropy(ours.linear(x, w), t),
        }
        try:
            liger = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
            ways["liger"] = lambda x, w, t: liger(x, w, t)
        except ImportError:
            pass
        return [(name, self._runner(buffers, way)) for name, way in ways.items()]

    def _runner(self, buffers: list[Buffers], loss: Callable[..., Any]) -> Run:
        given = [(b.x.detach().requires_grad_(), b.w.detach().requires_grad_(), b.target) for b in buffers]

        def run(i: int) -> Any:
            x, w, target = given[i]
            found = loss(x, w, target)
            return torch.autograd.grad(found[0] if isinstance(found, tuple) else found, (x, w))

        return run

    def mismatch(self, b: Buffers) -> str:
        at = self.compared(b.x.device)
        x, w, target = b.x[at].double().requires_grad_(), b.w.double(), b.target[at]
        losses = functional.cross_entropy(functional.linear(x, w), target, reduction="sum") / self.rows
        (wanted,) = torch.autograd.grad(losses, x)
        # Logits, their gradients and the result are rounded.
        eps = 4 * torch.finfo(self.dtype).eps
        return wrong_elements("dx", b.tensors["dx"][at].double(), wanted, eps, wanted.square().mean().sqrt())

    def swept(self) -> Iterator[type[Entry]]:
        return iter(())
