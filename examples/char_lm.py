"""A character-level language model on triplan.functional, trained beside the same model on torch.

The text is Python's language reference, which comes with Python for its interactive help (``pydoc_data.topics``). The
model reads CONTEXT characters and predicts the next one: embedding, linear, ReLU, rms_norm, linear, cross_entropy. Both
models start from the same parameters, read the same characters and are trained by gradient descent. Their losses differ
only by rounding errors, which accumulate over the steps; ``allowed`` derives how far from the guarantee of the matrix
products. At the end, cross_entropy with a mean over bytes gives the loss on held-out text in bits per byte; a step's
host time is printed beside that on torch.

    python examples/char_lm.py [--steps 300] [--device cpu|cuda]

On a CPU the plans run the reference backend, and training takes seconds; on a GPU they run Triton kernels.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import statistics
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import triplan as tp
import triplan.functional

CONTEXT, WIDTH, HIDDEN, BATCH = 8, 16, 64, 128
RATE, STEPS = 0.2, 300
#: By how much the loss differs after one more step, relative to a relative error e in every product: at most 0.013 e,
#: measured in float64 on three scales of e (2**-24, 2**-22, 2**-11), uniform in every parameter and at every step.
GROWTH = 0.02

Parameters = dict[str, Tensor]


class Text(NamedTuple):
    """Text as numbers of characters, for training and held out; ``bytes`` is the length of each character in bytes."""

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
    """Logits (batch, classes) of the characters after ``contexts`` (batch, CONTEXT).

    ``f`` is ``triplan.functional`` or ``torch.nn.functional``.
    """
    x = f.embedding(contexts, p["embedding"]).reshape(len(contexts), CONTEXT * WIDTH)
    x = f.rms_norm(f.linear(x, p["first"]).relu(), (HIDDEN,), p["norm"])
    result: Tensor = f.linear(x, p["last"], p["bias"])
    return result


def step(f: Any, p: Parameters, contexts: Tensor, following: Tensor) -> Tensor:
    """Do one step of gradient descent; return the loss before it."""
    loss: Tensor = f.cross_entropy(scores(f, p, contexts), following)
    gradients = torch.autograd.grad(loss, list(p.values()))
    with torch.no_grad():
        for parameter, gradient in zip(p.values(), gradients, strict=True):
            parameter -= RATE * gradient
    return loss.detach()


def windows(data: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """The contexts that begin at the positions ``at``, and the characters after them."""
    found = data[at[:, None] + torch.arange(CONTEXT + 1)]
    return found[:, :-1].contiguous(), found[:, -1].contiguous()


def train(
    text: Text, ours: Parameters, theirs: Parameters, steps: int, generator: torch.Generator
) -> Iterator[tuple[float, float]]:
    """Train both models; yield (triplan's loss, torch's loss) before each step."""
    device = ours["bias"].device
    for _ in range(steps):
        at = torch.randint(0, len(text.training) - CONTEXT, (BATCH,), generator=generator)
        contexts, following = (t.to(device) for t in windows(text.training, at))
        mine = step(triplan.functional, ours, contexts, following)
        torchs = step(functional, theirs, contexts, following)
        yield float(mine), float(torchs)


def host_times(text: Text, ours: Parameters, theirs: Parameters, count: int = 100) -> tuple[float, float]:
    """Host microseconds of a step in steady state: (triplan's, torch's), the medians of steps that take turns."""
    device = ours["bias"].device
    contexts, following = (t.to(device) for t in windows(text.training, torch.arange(BATCH)))
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(count + 3):  # the first are recorded for replay
        for kept, f, p in zip(times, (triplan.functional, functional), (ours, theirs), strict=True):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            step(f, p, contexts, following)
            if i >= 3:
                kept.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times[0]), statistics.median(times[1])


def allowed(device: torch.device, steps: int) -> float:
    """The largest difference of the losses, relative to torch's, that rounding may cause in so many steps.

    An error of a product of at most ctol * sum|terms| is what a relative error of ctol in one of its factors causes.
    Both models have such errors. Those of the other ops are smaller than those of the products, whose ctol says what
    torch's settings allow: 2e-5 in f32, 2e-3 in tf32.
    """
    tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    product = tp.GemmDescriptor(
        m=BATCH, n=HIDDEN, k=CONTEXT * WIDTH, element="f32", math="tf32" if tf32 else None
    )  # its k is the largest, in the backward too
    guarantee = tp.plan(product, target=tp.Target.of(device)).precision_guarantee()
    return 2 * GROWTH * steps * guarantee.tolerance.ctol


def bits_per_byte(p: Parameters, text: Text, device: torch.device) -> float:
    """The loss on the held-out text in bits per byte."""
    f: ModuleType = triplan.functional
    contexts, following = windows(text.held_out, torch.arange(len(text.held_out) - CONTEXT))
    with torch.no_grad():
        logits = scores(f, p, contexts.to(device))
        nats = f.cross_entropy(logits, following.to(device), reduction="byte_mean", bytes=text.bytes.to(device))
    return float(nats) / math.log(2)


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a loss differs from torch's by more than is allowed, or if training did not reduce the loss."""
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
    limit = allowed(device, options.steps)
    print(f"last loss: {losses[-1]:.4f}; largest relative difference from torch: {farthest:.1e} (<= {limit:.0e})")
    print(f"held out: {bits_per_byte(ours, text, device):.3f} bits per byte")
    print("host time of a step: triplan {:.0f} us, torch {:.0f} us".format(*host_times(text, ours, theirs)))
    return 0 if farthest <= limit and losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
