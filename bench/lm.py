"""Cases of what stands around attention in a language model: embedding and norm, the loss of the last layer, rotary
embedding, sampling, sorting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import triplan as tp
import triplan.functional as F  # noqa: N812
from bench import losses, rotary, sampling, sorting
from bench.rows import Buffers, Case, Run, compiled_by_torch, wrong_elements
from triplan.backends.triton.common.rows_entries import Entry

#: Rows of the table, width, tokens.
SIZES = (50304, 1024, 65536)
TINY = (64, 8, 16)
EPS = 1e-5


def cases(tiny: bool = False) -> list[Case]:
    """Every case; ``tiny`` shrinks them for a smoke test."""
    table, width, tokens = TINY if tiny else SIZES
    embedded = [
        NormedEmbeddingCase("embedding_rms_norm", tokens, width, torch.bfloat16, table, gradient)
        for gradient in (False, True)
    ]
    return [*embedded, *losses.of_linear(tiny), *rotary.cases(tiny), *sampling.cases(tiny), *sorting.cases(tiny)]


def _by_torch(at: Tensor, table: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    found = functional.embedding(at, table)
    return functional.rms_norm(found, weight.shape, weight, EPS), found


def _apart(at: Tensor, table: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    found = F.embedding(at, table)
    return F.rms_norm(found, tuple(weight.shape), weight, EPS), found


def _ours(at: Tensor, table: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return F.embedding_rms_norm(at, table, weight, EPS)


@dataclass(frozen=True)
class NormedEmbeddingCase(Case):
    """Rows of a table and their norm; with ``gradient``, also the gradients of the table and the norm's weight."""

    table: int
    gradient: bool
    in_sweep = False

    @property
    def name(self) -> str:
        return super().name.replace(self.op, f"{self.op}+backward") if self.gradient else super().name

    @property
    def bytes(self) -> int:
        """Forward, rows are read once and written twice. Backward, two gradients and the rows are read, and the
        gradient of the table is written."""
        moved = 3 * self.rows * self.n
        return (moved + (3 * self.rows + self.table) * self.n * self.gradient) * self.dtype.itemsize

    def make(self, device: torch.device, generator: torch.Generator) -> Buffers:
        def values(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=self.dtype, device=device, generator=generator)

        at = torch.randint(0, self.table, (self.rows,), device=device, generator=generator)
        given = {"at": at, "table": values(self.table, self.n), "weight": values(self.n)}
        return Buffers({**given, **{name: values(self.rows, self.n) for name in ("dnorm", "drows")}})

    def descriptor(self) -> tp.Descriptor:
        raise NotImplementedError("a case is a functional call")

    def spoil(self, b: Buffers) -> None:
        """Results are new tensors."""

    def planned(self, buffers: list[Buffers], device: torch.device, kernel: str | None = None) -> tuple[str, Run, int]:
        run = self._runner(buffers, _ours)

        def kept(i: int) -> Any:
            found = run(i)
            buffers[i].tensors.update({f"found{j}": t for j, t in enumerate(found)})
            return found

        return "functional", kept, 0

    def peers(self, buffers: list[Buffers], device: torch.device, tiny: bool) -> list[tuple[str, Run]]:
        ways: dict[str, Callable[..., Any]] = {"torch": _by_torch, "triplan apart": _apart}
        if not tiny:
            ways["torch.compile"] = compiled_by_torch(_by_torch, tiny)
        return [(name, self._runner(buffers, way)) for name, way in ways.items()]

    def _runner(self, buffers: list[Buffers], way: Callable[..., Any]) -> Run:
        if not self.gradient:
            return lambda i: way(buffers[i].at, buffers[i].table, buffers[i].weight)
        given = [[t.detach().requires_grad_() for t in (b.table, b.weight)] for b in buffers]

        def run(i: int) -> Any:
            b = buffers[i]
            return torch.autograd.grad(way(b.at, *given[i]), given[i], (b.dnorm, b.drows))

        return run

    def mismatch(self, b: Buffers) -> str:
        table, weight = (t.double().requires_grad_() for t in (b.table, b.weight))
        wanted: tuple[Tensor, ...] = _by_torch(b.at, table, weight)
        if self.gradient:
            wanted = torch.autograd.grad(wanted, (table, weight), (b.dnorm.double(), b.drows.double()))
        eps = 4 * torch.finfo(self.dtype).eps
        for i, ref in enumerate(wanted):
            got, size = b.tensors[f"found{i}"].detach().double(), ref.detach().square().mean().sqrt()
            if wrong := wrong_elements(f"result {i}", got, ref.detach(), eps, size):
                return wrong
        return ""

    def swept(self) -> Iterator[type[Entry]]:
        return iter(())
