"""GPT-2 (124M parameters), trained on real text by triplan, by torch or under torch.compile.

    python examples/gpt.py --out FOLDER [--backend triplan|torch|torch.compile] [--steps 200] [--resume]
    torchrun --nproc-per-node 8 examples/gpt.py --out FOLDER [--fsdp | --tp] ...

The text is the source code of Python's standard library, or the file that --text names; its words become tokens (see
``gpt_tokens``). All backends train the same model from the same parameters on the same batches. On triplan every
module, loss, optimizer and clipping is ours; torch holds the tensors, converts between dtypes for autocast, copies, and
adds the gradients where autograd meets two. The whole step of triplan is a CUDA graph, on one GPU and with ``--tp``.
Under torchrun the ranks divide the batch, the parameters and the optimizer's states (fully_shard); with ``--tp`` they
have the whole batch and divide heads, columns and rows of the layers, and the vocabulary of the embedding and of the
loss. The exchange that a rank does not come to ends the others with an error after ``--timeout`` seconds; the last
checkpoint stays.

Prints the loss, tokens per second, model FLOP utilisation and peak memory, and a digest of the parameters: on triplan
it is the same in each run on the same hardware, also in one that was stopped (--stop) and resumed. FOLDER receives
the checkpoint, the tokens and a PNG of the curves. --layers, --width and others make it small enough for a CPU. Needs
the extras ``cli`` and, for the PNG, ``bench``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpt_checkpoint import load_checkpoint, save_checkpoint
from gpt_ranks import (
    RefusedError,
    by_kind,
    clip_grad_norm_,
    divide,
    divide_layers,
    ranks,
    whole,
)
from gpt_shown import draw, report
from gpt_tokens import BYTES, Tokens, read_text
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel

import triplan.functional as F  # noqa: N812
import triplan.nn
import triplan.optim

BETAS, DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
UNCAPTURED = 3  # steps before the capture: they compile kernels and write the optimizer's tables
LOGGED = 10  # steps between two looks at the loss, which wait for the device
PEAK = 989.5  # TFLOP/s of dense bf16 products: H100 and H200 SXM, by their data sheets


# --- the model ---


class Kit(NamedTuple):
    """What the model and its training take from a library."""

    nn: Any  # the modules
    add: Callable[[Tensor, Tensor], Tensor]
    #: (batch, length, 3 * heads, width), of q, k and v, to a third of the heads; a query sees the keys up to its own.
    attend: Callable[[Tensor], Tensor]
    #: A norm, what a layer adds to the stream, and the stream: the norm of their sum, and the sum.
    add_norm: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]
    #: Rows, the weight of the last linear layer, targets: the mean cross-entropy.
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    clip: Callable[..., Tensor]

    @classmethod
    def of(cls, backend: str) -> Kit:
        if backend == "triplan":
            return cls(
                triplan.nn,
                F.add,
                lambda qkv: F.attention_qkvpacked(qkv, causal=True)[0],
                lambda norm, x, stream: norm(x, residual=stream),
                F.linear_cross_entropy,
                triplan.optim.clip_grad_norm_,
            )
        f = torch.nn.functional

        def attend(qkv: Tensor) -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in qkv.chunk(3, 2))
            return f.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        def add_norm(norm: Any, x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
            stream = stream + x
            return norm(stream), stream

        def loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            return f.cross_entropy(f.linear(x, weight), targets)

        return cls(torch.nn, torch.add, attend, add_norm, loss, clip_grad_norm_)


class Sizes(NamedTuple):
    """By default those of GPT-2 with 124M parameters; the vocabulary is rounded up to a multiple of 128."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    length: int = 1024
    vocabulary: int = 50304


class Block(torch.nn.Module):
    """Attention, then a norm and an MLP. The norms around a block add to the stream what a layer returns."""

    def __init__(self, kit: Kit, sizes: Sizes) -> None:
        super().__init__()
        self.kit, self.heads, width, nn = kit, sizes.heads, sizes.width, kit.nn
        self.by_heads = False  # the columns of ``qkv``: those of q, k and v, or those of each head
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gelu, self.down = nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        qkv = self.qkv(x)
        if self.by_heads:  # of those that this rank has
            qkv = qkv.unflatten(-1, (-1, 3, self.qkv.in_features // self.heads)).transpose(2, 3).flatten(2, 3)
        else:
            qkv = qkv.unflatten(-1, (3 * self.heads, -1))
        x = self.out(self.kit.attend(qkv).flatten(2))
        x, stream = self.kit.add_norm(self.norm, x, stream)
        return self.down(self.gelu(self.up(x))), stream


class GPT(torch.nn.Module):
    """GPT-2 (Radford et al., 2019), without dropout: its embedding is also the weight of the last layer."""

    def __init__(self, kit: Kit, sizes: Sizes, seed: int = 0) -> None:
        super().__init__()
        self.kit = kit
        self.embedding = kit.nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = torch.nn.Parameter(torch.empty(sizes.length, sizes.width))
        self.blocks = torch.nn.ModuleList(Block(kit, sizes) for _ in range(sizes.layers))
        self.norms = torch.nn.ModuleList(kit.nn.LayerNorm(sizes.width) for _ in range(sizes.layers + 1))
        g = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() < 2:  # biases 0, weights of norms 1
                torch.nn.init.constant_(p, float("norm" in name and name.endswith("weight")))
            else:  # the stream is a sum of 2 * layers results
                shrunk = math.sqrt(2 * sizes.layers) if name.endswith(("out.weight", "down.weight")) else 1
                torch.nn.init.normal_(p, std=0.02 / shrunk, generator=g)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of (batch, length) tokens, given the tokens after them."""
        stream = self.kit.add(self.embedding(inputs), self.positions)
        first, *norms = self.norms
        x = first(stream)
        for block, norm in zip(self.blocks, norms, strict=True):
            x, stream = self.kit.add_norm(norm, *block(x, stream))
        x, weight = x.flatten(0, 1), self.embedding.weight
        if not isinstance(weight, DTensor) or isinstance(x, DTensor):
            return self.kit.loss(x, weight, targets.flatten())
        # Every rank has x, and the logits of its part of the vocabulary.
        mesh = weight.device_mesh
        found: Any = self.kit.loss(DTensor.from_local(x, mesh, [Replicate()]), weight, targets.flatten())
        local: Tensor = found.to_local()
        return local


def flops_per_token(model: GPT, sizes: Sizes) -> float:
    """6N + 12LHQT (Chowdhery et al., 2022, PaLM, appendix B): N without the positions, of L layers, H heads of width Q
    and T tokens; attention as if it were not causal."""
    n = sum(p.numel() for p in model.parameters()) - model.positions.numel()
    return 6 * n + 12 * sizes.layers * sizes.width * sizes.length


# --- training ---


def rate(step: int, steps: int, most: float) -> float:
    """Linear to ``most`` in the first twentieth of the steps, then a cosine down to a tenth of it."""
    warm = max(steps // 20, 1)
    if step < warm:
        return most * (step + 1) / warm
    return most * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(steps - warm, 1)))


def optimizer(options: argparse.Namespace, model: GPT) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not. Muon moves the matrices of the blocks, AdamW the rest."""
    ours, device = options.backend == "triplan", torch.device(options.device)
    if options.optimizer == "muon" and not ours:
        raise RefusedError("--optimizer muon: needs --backend triplan (torch's takes no embeddings and vectors)")
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    tables = [model.embedding.weight, model.positions]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    lr: Any = torch.tensor(options.rate, device=device) if ours else options.rate
    if options.optimizer == "muon":
        adamw = {"use_muon": False, "betas": BETAS}
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": tables, **adamw},
            {"params": vectors, **adamw, "weight_decay": 0.0},
        ]
        return triplan.optim.Muon(groups, lr=lr, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    both: list[dict[str, Any]] = [{"params": [*matrices, *tables]}, {"params": vectors, "weight_decay": 0.0}]
    if ours:
        return triplan.optim.AdamW(both, lr=lr, betas=BETAS, weight_decay=DECAY)
    # Torch's fused step takes either DTensors or other tensors.
    kinds = [group | {"params": ps} for group in both for ps in by_kind(group["params"])]
    return torch.optim.AdamW(kinds, lr=lr, betas=BETAS, weight_decay=DECAY, fused=True)


class Captured:
    """A step as a CUDA graph."""

    def __init__(self, step: Callable[[Tensor], tuple[Tensor, Tensor]], windows: Tensor) -> None:
        self.windows, self.graph = windows.clone(), torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()  # the graph has memory of its own
        # (NCCL's own thread calls CUDA meanwhile, which another mode would refuse.)
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.found = step(self.windows)

    def __call__(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        self.windows.copy_(windows)
        self.graph.replay()
        loss, norm = self.found
        return loss.clone(), norm.clone()

    def drop(self) -> None:
        """Before the group of ranks ends: that waits for graphs with exchanges in them."""
        self.graph.reset()


@dataclass
class Training:
    """A model in training. ``fixed``: the options that decide the bits of its parameters, and a digest of the text."""

    model: GPT
    forward: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    clip: Callable[..., Tensor]
    tokens: Tokens
    device: torch.device
    fixed: dict[str, Any]
    captures: bool
    timeout: float
    step: int = 0
    made: int = 0  # of the steps, those of this process
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    captured: Captured | None = None

    @classmethod
    def of(cls, options: argparse.Namespace, tokens: Tokens, digest: str) -> Training:
        device, kit = torch.device(options.device), Kit.of(options.backend)
        sizes = Sizes(*(getattr(options, name) for name in Sizes._fields))
        model, world = GPT(kit, sizes, options.seed).to(device), ranks()[1]
        if options.tp:
            if options.backend == "torch.compile":
                raise RefusedError("--tp: not with torch.compile")
            if world > 1:
                divide_layers(model, device)
        elif options.batch % world:
            raise RefusedError(f"--batch {options.batch} cannot be divided between {world} ranks")
        elif world > 1:
            divide(model, device)
        forward: Any = torch.compile(model, dynamic=False) if options.backend == "torch.compile" else model
        fixed = {name: getattr(options, name) for name in (*Sizes._fields, *FIXED)}
        fixed |= {"text": digest, "ranks": world}
        captures = options.backend == "triplan" and device.type == "cuda" and not options.eager
        captures &= world == 1 or options.tp
        return cls(
            model, forward, optimizer(options, model), kit.clip, tokens, device, fixed, captures, options.timeout
        )

    def divides(self) -> contextlib.AbstractContextManager[None]:
        """Torch's cross-entropy of classes that ranks divide, and its gradient, are computed within a context."""
        if self.fixed["tp"] and self.fixed["backend"] == "torch":
            return loss_parallel()
        return contextlib.nullcontext()

    def update(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """One step of the optimizer; returns the loss and the norm of the gradients before it, on the device."""
        with self.divides():
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.fixed["precision"] == "bf16"):
                loss = self.forward(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
            loss.backward()  # type: ignore[no-untyped-call]
        norm = self.clip(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = loss.detach()
        if dist.is_initialized() and not self.fixed["tp"]:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return loss, whole(norm)

    def advance(self) -> tuple[Tensor, Tensor]:
        """The next step."""
        rank, world = ranks()
        windows = self.tokens.batch(self.step, *(self.fixed[name] for name in ("seed", "batch", "length")))
        windows = windows if self.fixed["tp"] else windows.chunk(world)[rank]
        if self.device.type == "cuda":
            windows = windows.pin_memory().to(self.device, non_blocking=True)
        now = rate(self.step, self.fixed["steps"], self.fixed["rate"])
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(now)  # where a captured step reads it
            else:
                group["lr"] = now
        if self.captures and self.made == UNCAPTURED:
            self.captured = Captured(self.update, windows)
        self.step, self.made = self.step + 1, self.made + 1
        return (self.captured or self.update)(windows)

    def wait(self) -> None:
        """For the device, where a captured step exchanges: NCCL's own timeout does not see a graph."""
        if self.captured is None or ranks()[1] == 1:
            return
        stream, end = torch.cuda.current_stream(), time.monotonic() + self.timeout
        while not stream.query():
            if time.monotonic() > end:
                rank, world = ranks()
                late = f"rank {rank} of {world}: step {self.step} was not done after {self.timeout:g} seconds"
                print(f"gpt.py: {late}; --resume goes on from the last checkpoint", file=sys.stderr, flush=True)
                os._exit(1)  # what ends a process in good order would wait for the device, too
            time.sleep(1e-4)

    def several(self, count: int) -> float:
        """So many steps; returns how many seconds they took."""
        begin = time.perf_counter()
        found = [self.advance() for _ in range(count)]
        self.wait()
        for loss, norm in found:  # waits for the device
            self.losses.append(float(loss))
            self.norms.append(float(norm))
        if not math.isfinite(self.losses[-1]):
            raise RefusedError(f"the loss of step {self.step} is {self.losses[-1]}: try a smaller --rate")
        return time.perf_counter() - begin

    def digest(self) -> str:
        """Of the bits of all parameters."""
        found = hashlib.sha256()
        for p in self.model.parameters():
            found.update(whole(p).detach().cpu().numpy().tobytes())
        return found.hexdigest()[:16]


#: Options beside the sizes that decide the bits of the parameters.
FIXED = ("backend", "precision", "optimizer", "batch", "steps", "rate", "seed", "tp", "deterministic")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GPT-2, trained on real text by triplan, torch or torch.compile.")
    parser.add_argument("--backend", choices=("triplan", "torch", "torch.compile"), default="triplan")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("bf16", "f32"), help="autocast to bf16; f32 on a CPU by default")
    for name, value in Sizes._field_defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200, help="of the whole training; the rate follows a cosine")
    parser.add_argument("--stop", type=int, help="stop after this step, with a checkpoint")
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, help="a file; by default the standard library's modules")
    parser.add_argument("--out", type=Path, default=Path("gpt-run"), help="a folder for checkpoint, tokens and curves")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in the folder")
    parser.add_argument("--other-ranks", action="store_true", help="also from one of other ranks: bits may change")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--fsdp", action="store_true", help="under torchrun: divide batch and parameters (the default)")
    how.add_argument("--tp", action="store_true", help="under torchrun: divide the layers, not the batch")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that a rank waits for another one")
    parser.add_argument("--eager", action="store_true", help="triplan: without a CUDA graph")
    either = argparse.BooleanOptionalAction
    parser.add_argument("--deterministic", action=either, help="torch's deterministic mode: triplan's default")
    parser.add_argument("--peak", type=float, default=PEAK, help="TFLOP/s that the utilisation is of")
    options = parser.parse_args(arguments)
    if options.width % options.heads:
        parser.error(f"--width {options.width} is no multiple of --heads {options.heads}")
    if options.vocabulary <= BYTES:
        parser.error(f"--vocabulary {options.vocabulary}: {BYTES} tokens are bytes, so there must be more")
    if options.deterministic is None:
        options.deterministic = options.backend == "triplan"
    if options.precision is None:
        options.precision = "f32" if options.device == "cpu" else "bf16"
    return options


def train(console: Console, options: argparse.Namespace) -> Training:
    text = read_text(options.text)
    tokens = Tokens.cached(text, options.vocabulary, options.out)
    console.print(f"{len(text):,} bytes of text: {len(tokens.ids):,} tokens of {BYTES + len(tokens.pieces):,} kinds")
    if len(tokens.ids) <= options.length:
        raise RefusedError(f"the text has {len(tokens.ids)} tokens: more than --length {options.length} are needed")
    training = Training.of(options, tokens, hashlib.sha256(text).hexdigest()[:16])
    checkpoint = options.out / "checkpoint.pt"
    if options.resume:
        load_checkpoint(training, checkpoint, options.other_ranks)
        console.print(f"resumed after step {training.step}")
    try:
        take_steps(console, training, options, checkpoint)
    finally:
        if training.captured is not None:
            training.captured.drop()
    return training


def take_steps(console: Console, training: Training, options: argparse.Namespace, checkpoint: Path) -> None:
    last = min(options.stop or options.steps, options.steps)
    if training.step >= last:
        raise RefusedError(f"{training.step} steps of {last} are done already")
    seconds: list[float] = []  # a step's, of each look
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(options.backend, total=last, completed=training.step)
        while training.step < last:
            count = min(LOGGED, last - training.step, options.every - training.step % options.every)
            seconds.append(training.several(count) / count)
            shown = f"{options.backend}, loss {training.losses[-1]:.4f}"
            progress.update(task, completed=training.step, description=shown)
            if training.step == last or training.step % options.every == 0:
                save_checkpoint(training, checkpoint)
    sizes = Sizes(*(training.fixed[name] for name in Sizes._fields))
    report(console, training, seconds, flops_per_token(training.model, sizes), options.peak)
    if ranks()[0]:
        return
    try:
        draw(options.out / "curves.png", training, options.backend)
    except ModuleNotFoundError:
        console.print("no curves: they need matplotlib (pip install matplotlib)")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(options.deterministic)
    memory.fill_uninitialized_memory = False  # every element is written before it is read
    begun = "RANK" in os.environ and not dist.is_initialized()  # by torchrun
    if begun:
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        wait = timedelta(seconds=options.timeout)
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo", timeout=wait)
    try:
        train(Console(quiet=ranks()[0] > 0), options)
    except RefusedError as e:
        print(f"gpt.py: {e}", file=sys.stderr)
        return 1
    except Exception:
        rank, world = ranks()
        if world > 1:  # also where another rank has died, and this one waited for it
            where = f"--resume goes on from the last checkpoint in {options.out}, with as many ranks"
            print(f"gpt.py: rank {rank} of {world} has failed, or another one; {where}", file=sys.stderr)
        raise
    finally:
        if begun:
            dist.destroy_process_group()
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]
    return 0


if __name__ == "__main__":
    sys.exit(main())
