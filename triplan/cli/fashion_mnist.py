"""``triplan demo --train``: a convolutional network on Fashion-MNIST (Xiao, Rasul, Vollgraf, 2017), from the files to
the confusion matrix: convolutions, batch norms, pooling, dropout, linear layers, cross-entropy and AdamW are triplan's.

Beside it the same network trains on torch, from the same parameters, over the same images in the same order. What is
dropped differs: torch's dropout draws other random numbers. On a GPU triplan's step is captured as a CUDA graph.
"""

from __future__ import annotations

import gzip
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

import triplan.functional as F  # noqa: N812
import triplan.nn
import triplan.optim
from triplan.errors import InvalidProblem, Unsupported, shown

FOLDER = Path("/usr/share/datasets/fashion-mnist")  # of the Debian package
CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SIDE = 28
#: Mean and standard deviation of the training images' pixels.
MEAN, SPREAD = 72.94, 90.02
DROPOUT, RATE, WEIGHT_DECAY = 0.3, 2e-3, 1e-2
#: What five epochs over all images reach at least.
EXPECTED_ACCURACY, EPOCHS = 0.91, 5
ON_A_CPU = 1000  # images that take the reference backend less than two minutes
UNCAPTURED = 3  # steps before the capture: they compile kernels and find memory


# --- the data ---


@dataclass(frozen=True)
class Images:
    """``pixels`` (n, 1, 28, 28) f32, standardised; ``labels`` (n,) i64."""

    pixels: Tensor
    labels: Tensor

    @classmethod
    def load(cls, folder: Path, part: str, device: torch.device, count: int | None = None) -> Images:
        """The first ``count`` images of ``part``, "train" or "t10k"."""
        raw = read_idx(folder, f"{part}-images-idx3-ubyte")[:count].to(device)
        labels = read_idx(folder, f"{part}-labels-idx1-ubyte")[:count].to(device)
        if raw.dim() != 3 or raw.shape[1:] != (SIDE, SIDE) or labels.shape != raw.shape[:1] or not len(raw):
            raise InvalidProblem(f"{folder}: {tuple(raw.shape)} images and {tuple(labels.shape)} labels")
        pixels = F.mul(F.sub(raw[:, None], MEAN), 1 / SPREAD)
        return cls(pixels, F.cast(labels, torch.int64))

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return F.index_select(self.pixels, 0, index), F.index_select(self.labels, 0, index)


def read_idx(folder: Path, name: str) -> Tensor:
    """The u8 tensor of an IDX file, compressed or not.

    Raises ``Unsupported`` if there is none, ``InvalidProblem`` if it is no IDX file of bytes.
    """
    packed, plain = folder / f"{name}.gz", folder / name
    try:
        data = gzip.decompress(packed.read_bytes()) if packed.exists() else plain.read_bytes()
    except FileNotFoundError:
        raise Unsupported(
            f"{plain}: no such file, nor {packed.name}. Fashion-MNIST is in the Debian package dataset-fashion-mnist "
            "(apt install dataset-fashion-mnist); or name the folder that holds its four files: --data FOLDER"
        ) from None
    except (gzip.BadGzipFile, EOFError) as e:
        raise InvalidProblem(f"{packed}: {e}") from None
    rank = data[3] if len(data) >= 4 else 0
    start = 4 + 4 * rank
    shape = [int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4)]
    if data[:3] != b"\0\0\x08" or not rank or len(data) != start + torch.Size(shape).numel():
        raise InvalidProblem(f"{plain}: no IDX file of bytes, or cut short; it begins with {shown(data[:start])}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=start).reshape(shape)


# --- the network and its training ---


def network(nn: Any, dropout: float = DROPOUT) -> torch.nn.Sequential:
    """Of the modules of ``nn``, ``triplan.nn`` or ``torch.nn``: (n, 1, 28, 28) to logits (n, 10)."""
    return torch.nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(dropout), nn.Linear(128 * 7 * 7, 128), nn.ReLU()),
        *(nn.Dropout(dropout), nn.Linear(128, len(CLASSES))),
    )


class Captured:
    """A step as a CUDA graph, of index tensors of one length."""

    def __init__(self, step: Callable[[Tensor], Tensor], index: Tensor) -> None:
        self.index, self.graph = index.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = step(self.index)

    def __call__(self, index: Tensor) -> Tensor:
        self.index.copy_(index)
        self.graph.replay()
        return self.loss.clone()


@dataclass
class Training:
    """One network in training, on triplan or on torch. ``captures``: whether whole batches repeat a captured step."""

    name: str
    model: torch.nn.Module
    forward: Callable[[Tensor], Tensor]
    criterion: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    captures: bool = False
    captured: Captured | None = None
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def of(
        cls, name: str, device: torch.device, steps: int, seed: int, dropout: float = DROPOUT, eager: bool = False
    ) -> Training:
        """``name``: "triplan", "torch" or "torch.compile"; ``eager``: without a capture."""
        torch.manual_seed(seed)
        ours, on_gpu = name == "triplan", device.type == "cuda"
        model: torch.nn.Module = network(triplan.nn if ours else torch.nn, dropout).to(device)
        if on_gpu:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        captures = ours and on_gpu and not eager
        # A captured step reads the rate from the device, where the schedule changes it.
        rate = torch.tensor(RATE, device=device) if captures else RATE
        adamw: Any = triplan.optim.AdamW if ours else torch.optim.AdamW
        optimizer: torch.optim.Optimizer = adamw(model.parameters(), lr=rate, weight_decay=WEIGHT_DECAY)
        criterion = triplan.nn.CrossEntropyLoss() if ours else torch.nn.CrossEntropyLoss()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=max(steps, 2), cycle_momentum=False)
        forward = torch.compile(model) if name == "torch.compile" else model
        return cls(name, model, forward, criterion, optimizer, schedule, captures)

    def update(self, images: Images, index: Tensor) -> Tensor:
        """One step of the optimizer on some of the images; returns the loss before it, on the device."""
        pixels, labels = images.batch(index)
        with torch.autocast(pixels.device.type, torch.bfloat16, enabled=pixels.is_cuda):
            loss: Tensor = self.criterion(self.forward(pixels), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def step(self, images: Images, index: Tensor, batch: int) -> Tensor:
        """``update``, repeated from its capture where ``batch`` images are given; then one step of the schedule."""
        if self.captures and len(index) == batch and self.schedule.last_epoch >= UNCAPTURED:
            if self.captured is None:
                self.captured = Captured(lambda index: self.update(images, index), index)
            loss = self.captured(index)
        else:
            loss = self.update(images, index)
        self.schedule.step()
        return loss

    def epoch(self, images: Images, order: Tensor, batch: int, advance: Callable[[], None]) -> None:
        """One pass over the images in that order; the last batch may be smaller."""
        self.model.train()
        losses: list[Tensor] = []
        wait(images.pixels)
        begin = time.perf_counter()
        for index in torch.split(order, batch):
            losses.append(self.step(images, index, batch))
            advance()
        self.losses += [float(loss) for loss in losses]  # the only wait for the device
        self.seconds.append(time.perf_counter() - begin)

    @torch.no_grad()
    def confusion(self, images: Images, batch: int = 1000) -> Tensor:
        """How many images of each class (rows) the model takes for each class (columns): i64, (10, 10)."""
        self.model.eval()
        n = len(CLASSES)
        found = F.zeros(n * n, dtype=torch.int64, device=images.labels.device)
        for pixels, labels in zip(*(torch.split(t, batch) for t in (images.pixels, images.labels)), strict=True):
            predicted = F.argmax(self.model(pixels), 1)
            cell = F.add(F.mul(labels, n), predicted)
            found = F.index_add(found, 0, cell, F.ones(len(cell), dtype=torch.int64, device=cell.device))
        return found.reshape(n, n)


def wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def accuracy(confusion: Tensor) -> float:
    right, every = (int(sum(counts.tolist())) for counts in (confusion.diagonal(), confusion.flatten()))
    return right / every


def orders(n: int, epochs: int, device: torch.device, seed: int) -> Iterator[Tensor]:
    """A new order of the images for each epoch, of the seed alone."""
    g = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield torch.randperm(n, generator=g).to(device)


def train(
    console: Console, names: list[str], images: Images, epochs: int, batch: int, seed: int, eager: bool = False
) -> list[Training]:
    """Train by each of ``names``, an epoch in turn, with a progress bar."""
    device = images.pixels.device
    steps = -(-len(images.labels) // batch)
    runs = [Training.of(name, device, epochs * steps, seed, eager=eager) for name in names]
    shown_as = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*shown_as, console=console) as progress:
        for number, order in enumerate(orders(len(images.labels), epochs, device, seed), 1):
            for run in runs:
                task = progress.add_task(f"epoch {number}, {run.name}", total=steps)
                torch.manual_seed(seed + number)  # what is dropped is the same whatever else was trained between
                run.epoch(images, order, batch, lambda task=task: progress.advance(task))  # type: ignore[misc]
    return runs


# --- what is shown ---


def summary(run: Training, confusion: Tensor) -> tuple[str, ...]:
    warm = run.seconds[1:] or run.seconds  # kernels are compiled in the first epoch
    times = [f"{run.seconds[0]:.2f} s", f"{statistics.median(warm):.3f} s"]
    last = statistics.fmean(run.losses[-20:])
    return run.name, f"{run.losses[0]:.4f}", f"{last:.4f}", f"{accuracy(confusion):.2%}", *times


def confusions(found: Tensor) -> Table:
    table = Table("", *CLASSES, title="test images of a class (rows), and what they are taken for", show_lines=False)
    for name, row in zip(CLASSES, found.tolist(), strict=True):
        table.add_row(name, *(str(count) if count else "" for count in row))
    return table


def draw(path: Path, runs: list[Training], confusion: Tensor) -> None:
    """The losses of all runs, and the first one's confusion matrix, as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 6))
    for run in runs:
        left.plot(run.losses, label=run.name, linewidth=0.8)
    left.set(xlabel="step", ylabel="loss", yscale="log", title="training")
    left.legend()
    right.imshow(confusion.cpu().double().sqrt(), cmap="Blues")
    right.set_xticks(range(len(CLASSES)), CLASSES, rotation=45, ha="right")
    right.set_yticks(range(len(CLASSES)), CLASSES)
    for i, row in enumerate(confusion.tolist()):
        for j, count in enumerate(row):
            right.text(j, i, str(count), ha="center", va="center", fontsize=7)
    right.set_title(f"test accuracy {accuracy(confusion):.2%}: classes (rows), what they are taken for")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(
    console: Console,
    folder: Path = FOLDER,
    *,
    device: str | None = None,
    epochs: int = EPOCHS,
    batch: int | None = None,
    images: int | None = None,
    seed: int = 0,
    alone: bool = False,
    compiled: bool = False,
    eager: bool = False,
    twice: bool = False,
    out: Path | None = None,
) -> bool:
    """Train, test, and show both. False if a second training (``twice``) gave other bits, or the test accuracy of a
    whole training is below 91 %.

    ``images``: how many of the 60,000 are trained on, on a CPU 1,000 by default; ``batch``: of a step, by default 512,
    on a CPU 64; ``alone``: without torch beside; ``compiled``: under torch.compile too; ``eager``: without a capture;
    ``out``: where the PNG goes. Raises ``Unsupported`` without the data or the device, ``InvalidProblem`` for files
    that are not Fashion-MNIST's.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type not in ("cpu", "cuda") or (where.type == "cuda" and not torch.cuda.is_available()):
        raise Unsupported(f"device {shown(device)}: there is none here")
    if where.type == "cpu":
        images = images or ON_A_CPU
    batch = batch or (64 if where.type == "cpu" else 512)
    training = Images.load(folder, "train", where, images)
    test = Images.load(folder, "t10k", where, None if images is None else max(images // 6, 1))
    console.print(f"{len(training.labels)} images to train on, {len(test.labels)} to test with, on {where}")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(twice or before)
    try:
        names = ["triplan"] if alone else ["triplan", "torch", *["torch.compile"] * compiled]
        runs = train(console, names, training, epochs, batch, seed, eager)
        found = [one.confusion(test) for one in runs]
        again = train(console, ["triplan"], training, epochs, batch, seed, eager)[0] if twice else None
    finally:
        torch.use_deterministic_algorithms(before)
    table = Table("on", "first loss", "last 20", "test accuracy", "first epoch", "an epoch")
    for one, confusion in zip(runs, found, strict=True):
        table.add_row(*summary(one, confusion))
    console.print(table)
    console.print(confusions(found[0]))
    ok = True
    if again is not None:
        pairs = zip(runs[0].model.state_dict().values(), again.model.state_dict().values(), strict=True)
        ok = runs[0].losses == again.losses and all(torch.equal(a, b) for a, b in pairs)
        console.print(f"Trained again, deterministically: every loss and parameter {'equal' if ok else 'NOT equal'}.")
    if images is None and epochs >= EPOCHS:
        reached = accuracy(found[0])
        ok = ok and reached >= EXPECTED_ACCURACY
        console.print(f"Test accuracy {reached:.2%}; at least {EXPECTED_ACCURACY:.0%} is expected.")
    if out is not None:
        try:
            draw(out, runs, found[0])
        except ModuleNotFoundError:
            raise Unsupported("the picture needs matplotlib: pip install matplotlib") from None
        console.print(f"Curves and confusion matrix: {out}")
    return ok
