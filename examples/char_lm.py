"""A character-level language model on triplan.functional, trained beside the same model on torch.

The text is Python's language reference, which comes with Python for its interactive help (``pydoc_data.topics``). The
model reads CONTEXT characters and predicts the next one: embedding, linear, ReLU, rms_norm, linear, cross_entropy. Both
models start from the same parameters, read the same characters and are trained by the same optimizer, of triplan.optim
and of torch.optim. Their losses differ only by rounding errors, which accumulate over the steps. How far they may is
shown by two more models in float64, one of them with errors as large as the guarantee of the matrix products allows. At
the end, cross_entropy with a mean over bytes gives the loss on held-out text in bits per byte; a step's host time is
printed beside that on torch.

    python examples/char_lm.py [--steps 300] [--device cpu|cuda] [--optimizer SGD|Adam|AdamW|Muon]

On a CPU the plans run the reference backend, and training takes seconds; on a GPU they run Triton kernels.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import triplan as tp
import triplan.functional
import triplan.optim

CONTEXT, WIDTH, HIDDEN, BATCH = 8, 16, 64, 128
STEPS = 300
RATES = {"SGD": 0.2, "Adam": 3e-3, "AdamW": 3e-3, "Lion": 1e-3, "Muon": 0.02}
#: How many times as far from float64 as the model with drawn errors each of the others may be.
MARGIN = 4

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


class Model(NamedTuple):
    """Parameters, the functions that compute the loss, and what updates the parameters."""

    f: Any
    parameters: Parameters
    optimizers: Sequence[torch.optim.Optimizer]
    #: Gives what is used in a parameter's place.
    disturbed: Callable[[Tensor], Tensor] = lambda t: t

    def step(self, contexts: Tensor, following: Tensor) -> Tensor:
        """Do one step of the optimizer; return the loss before it."""
        used = {name: self.disturbed(t) for name, t in self.parameters.items()}
        loss: Tensor = self.f.cross_entropy(scores(self.f, used, contexts), following)
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()


def optimizers(module: Any, name: str, p: Parameters) -> list[torch.optim.Optimizer]:
    """The optimizer ``name`` of triplan.optim or torch.optim. Muon moves the factors of products, AdamW the rest."""
    if name != "Muon":
        return [getattr(module, name)(p.values(), lr=RATES[name])]
    matrices = [p["first"], p["last"]]
    rest = [t for t in p.values() if all(t is not matrix for matrix in matrices)]
    return [module.Muon(matrices, lr=RATES["Muon"]), module.AdamW(rest, lr=RATES["AdamW"])]


def models(start: Parameters, device: torch.device, name: str, peer: Any = torch.optim) -> list[Model]:
    """Triplan's model, torch's, one in float64, and one in float64 with errors.

    An error of a product of at most ctol * sum|terms| is what a relative error of ctol in one of its factors causes, so
    the last model's parameters have relative errors up to ctol, drawn anew at every step. The ctol is what torch's
    settings allow, in f32 or in tf32. The other ops have smaller errors, but for Muon, which rounds what it multiplies
    to bf16: the gradients of its matrices have errors of such a rounding.
    """
    tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    product = tp.GemmDescriptor(
        m=BATCH, n=HIDDEN, k=CONTEXT * WIDTH, element="f32", math="tf32" if tf32 else None
    )  # its k is the largest, in the backward too
    ctol = tp.plan(product, target=tp.Target.of(device)).precision_guarantee().tolerance.ctol
    generator = torch.Generator().manual_seed(1)

    def with_errors(t: Tensor, largest: float = ctol) -> Tensor:
        drawn = torch.rand(t.shape, generator=generator, dtype=t.dtype) * 2 - 1
        return t * (1 + largest * drawn.to(device))

    found = []
    for f, module, dtype in (
        (triplan.functional, triplan.optim, torch.float32),
        (functional, peer, torch.float32),
        (functional, peer, torch.float64),
        (functional, peer, torch.float64),
    ):
        own = {k: v.to(device, dtype, copy=True).requires_grad_() for k, v in start.items()}
        found.append(Model(f, own, optimizers(module, name, own)))
    if name == "Muon":
        for matrix in ("first", "last"):
            own[matrix].register_hook(lambda gradient: with_errors(gradient, 2**-9))  # type: ignore[no-untyped-call]
    return [*found[:3], found[3]._replace(disturbed=with_errors)]


def windows(data: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """The contexts that begin at the positions ``at``, and the characters after them."""
    found = data[at[:, None] + torch.arange(CONTEXT + 1)]
    return found[:, :-1].contiguous(), found[:, -1].contiguous()


def train(text: Text, trained: list[Model], steps: int, generator: torch.Generator) -> Iterator[list[float]]:
    """Train the models on the same characters; yield their losses before each step."""
    device = trained[0].parameters["bias"].device
    for _ in range(steps):
        at = torch.randint(0, len(text.training) - CONTEXT, (BATCH,), generator=generator)
        contexts, following = (t.to(device) for t in windows(text.training, at))
        yield [float(model.step(contexts, following)) for model in trained]


def differences(losses: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The largest relative difference of triplan's losses from torch's, and what is allowed."""
    farthest = max(abs(ours - theirs) / theirs for ours, theirs, _, _ in losses)
    drawn = max(abs(disturbed - exact) / exact for _, _, exact, disturbed in losses)
    return farthest, 2 * MARGIN * drawn


def host_times(text: Text, ours: Model, theirs: Model) -> tuple[float, float]:
    """Host microseconds of a step in steady state: (triplan's, torch's), the medians of steps that take turns."""
    device = ours.parameters["bias"].device
    count = 100 if device.type == "cuda" else 10
    contexts, following = (t.to(device) for t in windows(text.training, torch.arange(BATCH)))
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(count + 3):  # the first are recorded for replay
        for kept, model in zip(times, (ours, theirs), strict=True):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            model.step(contexts, following)
            if i >= 3:
                kept.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times[0]), statistics.median(times[1])


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
    parser.add_argument("--optimizer", default="SGD", choices=[name for name in RATES if hasattr(torch.optim, name)])
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    text, generator = read_text(), torch.Generator().manual_seed(0)
    trained = models(initial(len(text.bytes), generator), device, options.optimizer)
    losses: list[list[float]] = []
    for found in train(text, trained, options.steps, generator):
        if len(losses) % max(options.steps // 15, 1) == 0:
            print(f"step {len(losses):4d}  triplan {found[0]:.6f}  torch {found[1]:.6f}")
        losses.append(found)
    last, (farthest, limit) = losses[-1][0], differences(losses)
    print(f"last loss: {last:.4f}; largest relative difference from torch: {farthest:.1e} (<= {limit:.0e})")
    print(f"held out: {bits_per_byte(trained[0].parameters, text, device):.3f} bits per byte")
    print("host time of a step: triplan {:.0f} us, torch {:.0f} us".format(*host_times(text, *trained[:2])))
    return 0 if farthest <= limit and last < losses[0][0] else 1


if __name__ == "__main__":
    sys.exit(main())
