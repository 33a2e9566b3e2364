"""What ``gpt.py`` shows of a training: its curves, speed and memory."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from gpt_ranks import ranks
from rich.console import Console


def draw(path: Path, training: Any, name: str) -> None:
    """The losses and the norms of the gradients, as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, sides = plt.subplots(1, 2, figsize=(12, 5))
    curves = (("loss", training.losses), ("norm of the gradients before clipping", training.norms))
    for side, (title, values) in zip(sides, curves, strict=True):
        side.plot(range(1, len(values) + 1), values, linewidth=0.8)
        side.set(xlabel="step", title=f"{title}, {name}", yscale="log")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(console: Console, training: Any, seconds: list[float], flops_per_token: float, peak: float) -> None:
    """The loss, speed and memory. The first look is left out if there are others: kernels are compiled in it."""
    step, losses = statistics.median(seconds[1:] or seconds), training.losses
    per_second = training.fixed["batch"] * training.fixed["length"] / step
    console.print(f"loss {losses[0]:.4f} at step 1, {losses[-1]:.4f} at step {training.step}")
    console.print(f"{step * 1e3:.1f} ms a step, {per_second:,.0f} tokens/s")
    if training.device.type == "cuda":
        used = per_second * flops_per_token / (peak * 1e12 * ranks()[1])
        allocated, reserved = (n / 2**30 for n in (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        console.print(f"model FLOP utilisation {used:.1%} of {peak:g} TFLOP/s")
        console.print(f"peak memory {allocated:.1f} GiB allocated, {reserved:.1f} GiB reserved")
    console.print(f"parameters after step {training.step}: {training.digest()}")
