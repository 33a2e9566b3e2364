"""A character-level language model on triplan.functional, trained beside the same model on torch.

The text is the language reference that Python carries for its interactive help (``pydoc_data.topics``). The model reads
CONTEXT characters and predicts the next: embedding, linear, ReLU, rms_norm, linear, cross_entropy. Both start from the
same numbers, see the same characters and are stepped by plain gradient descent; at every step their losses differ by
at most TOLERANCE, relative to torch's: rounding, carried on from step to step. At the end the held-out text is judged
in bits per byte, by a mean over bytes.

    python examples/char_lm.py [--steps 300] [--device cpu|cuda]

On the CPU it runs on the reference backend and takes seconds; on a GPU the kernels are Triton's.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import triplan.functional

CONTEXT, WIDTH, HIDDEN, BATCH = 8, 16, 64, 128
RATE, STEPS = 0.2, 300
#: Of a loss at any step, relative to torch's.
TOLERANCE = 1e-3

Parameters = dict[str, Tensor]


class Text(NamedTuple):
    """Characters as numbers, for training and held out, and the length of each character in bytes."""

    training: Tensor
    held_out: Tensor
    bytes: Tensor


def read_text() -> Text:
    topics: dict[str, str] = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    characters = sorted(set(text))
    number = {c: i for i, c in enumerate(characters)}
    data = torch.tensor([number[c] for c in text])
    split = len(data) - 10_000
    return Text(data[:split], data[split:], torch.tensor([float(len(c.encode())) for c in characters]))


def initial(classes: int, generator: torch.Generator) -> Parameters:
    def tensor(*shape: int, spread: float) -> Tensor:
        return torch.randn(shape, generator=generator) * spread

    return {
        "embedding": tensor(classes, WIDTH, spread=0.5),
        "first": tensor(HIDDEN, CONTEXT * WIDTH, spread=math.sqrt(2 / (CONTEXT * WIDTH))),
        "norm": torch.ones(HIDDEN),
        "last": tensor(classes, HIDDEN, spread=0.02),
        "bias": torch.zeros(classes),
    }


def scores(f: Any, p: Parameters, contexts: Tensor) -> Tensor:
    """Logits (batch, classes) of the characters that follow ``contexts`` (batch, CONTEXT). ``f`` is
    ``triplan.functional`` or ``torch.nn.functional``."""
    x = f.embedding(contexts, p["embedding"]).reshape(len(contexts), CONTEXT * WIDTH)
    x = f.rms_norm(f.linear(x, p["first"]).relu(), (HIDDEN,), p["norm"])
    result: Tensor = f.linear(x, p["last"], p["bias"])
    return result


def step(f: Any, p: Parameters, contexts: Tensor, following: Tensor) -> Tensor:
    """One step of gradient descent; the loss before it."""
    loss: Tensor = f.cross_entropy(scores(f, p, contexts), following)
    gradients = torch.autograd.grad(loss, list(p.values()))
    with torch.no_grad():
        for parameter, gradient in zip(p.values(), gradients, strict=True):
            parameter -= RATE * gradient
    return loss.detach()


def windows(data: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Contexts that begin at the positions ``at``, and the characters that follow them."""
    found = data[at[:, None] + torch.arange(CONTEXT + 1)]
    return found[:, :-1].contiguous(), found[:, -1].contiguous()


def train(
    text: Text, ours: Parameters, theirs: Parameters, steps: int, generator: torch.Generator
) -> Iterator[tuple[float, float]]:
    """Before each step: the loss with our parameters and functions, and that with torch's."""
    device = ours["bias"].device
    for _ in range(steps):
        at = torch.randint(0, len(text.training) - CONTEXT, (BATCH,), generator=generator)
        contexts, following = (t.to(device) for t in windows(text.training, at))
        mine = step(triplan.functional, ours, contexts, following)
        torchs = step(functional, theirs, contexts, following)
        yield float(mine), float(torchs)


def bits_per_byte(p: Parameters, text: Text, device: torch.device) -> float:
    """Of the held-out text, each character weighted by its bytes."""
    f: ModuleType = triplan.functional
    contexts, following = windows(text.held_out, torch.arange(len(text.held_out) - CONTEXT))
    with torch.no_grad():
        logits = scores(f, p, contexts.to(device))
        nats = f.cross_entropy(logits, following.to(device), reduction="byte_mean", bytes=text.bytes.to(device))
    return float(nats) / math.log(2)


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a loss is farther from torch's than TOLERANCE, or did not fall."""
    parser = argparse.ArgumentParser(description="A character-level model, trained beside torch.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    text, generator = read_text(), torch.Generator().manual_seed(0)
    start = initial(len(text.bytes), generator)
    ours, theirs = ({k: v.to(device, copy=True).requires_grad_() for k, v in start.items()} for _ in range(2))
    losses: list[float] = []
    farthest = 0.0
    for mine, torchs in train(text, ours, theirs, options.steps, generator):
        if len(losses) % max(options.steps // 15, 1) == 0:
            print(f"step {len(losses):4d}  triplan {mine:.6f}  torch {torchs:.6f}")
        losses.append(mine)
        farthest = max(farthest, abs(mine - torchs) / torchs)
    print(f"last: {losses[-1]:.4f}, at most {farthest:.1e} of a loss from torch's; {TOLERANCE:.0e} is allowed")
    print(f"held out: {bits_per_byte(ours, text, device):.3f} bits per byte")
    return 0 if farthest <= TOLERANCE and losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
