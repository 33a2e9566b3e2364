"""``triplan demo``: plan, explain, query the guarantee and run, on scikit-learn's 1,797 scanned digits.

The demo sums the images of each class, and runs two epochs of shuffled mini-batches selected by index. Everything shown
is computed here: whether repeated runs agree in every bit, and whether the sums are within the plan's own tolerance of
numpy's in float64. The images are standardised so that their sums round: sums of small integers are exact in any order,
and would show nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import triplan as tp

CLASSES, SIDE, PIXELS, BATCH = 10, 8, 64, 256
RUNS = 20
F32, I64 = tp.ElementKind.F32, tp.ElementKind.I64
SHADES = " ░▒▓█"


@dataclass(frozen=True)
class Digits:
    """``images`` (n, 64) f32, each of mean 0 and variance 1; ``labels`` (n,) i64."""

    images: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def load(cls, device: str, count: int | None = None) -> Digits:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        images = images[:count] - images[:count].mean(axis=1, keepdims=True)
        images /= images.std(axis=1, keepdims=True)
        return cls(
            torch.from_numpy(images).to(device=device, dtype=torch.float32),
            torch.from_numpy(labels[:count]).to(device=device, dtype=torch.int64),
        )

    def __len__(self) -> int:
        return len(self.labels)

    def oracle(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Sums by class of the images and of their magnitudes, in float64."""
        images, labels = self.images.double().cpu().numpy(), self.labels.cpu().numpy()
        sums, terms = np.zeros((2, CLASSES, PIXELS))
        np.add.at(sums, labels, images)
        np.add.at(terms, labels, np.abs(images))
        return sums, terms


def class_sum_plan(n: int, target: tp.Target, deterministic: bool) -> tp.Plan[Any, Any]:
    desc = tp.IndexAddDescriptor(src_shape=(n, PIXELS), add_dim=0, out_dim_size=CLASSES, element=F32)
    return tp.plan(desc, preference=tp.PlanPreference(deterministic=deterministic), target=target)


def class_sums(plan: tp.Plan[Any, Any], digits: Digits, workspace: tp.Workspace) -> torch.Tensor:
    out = torch.zeros(CLASSES, PIXELS, device=digits.images.device)
    plan.run(tp.IndexAddArgs(index=digits.labels, src=digits.images, out=out), workspace=workspace)
    return out


def worst_share(
    got: torch.Tensor, oracle: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]], plan: tp.Plan[Any, Any]
) -> float:
    """The largest |got - ref| divided by what the plan's guarantee allows: at most 1 if it holds."""
    (ref, terms), t = oracle, plan.precision_guarantee("out").tolerance
    allowed = t.rtol * np.abs(ref) + t.ctol * terms + t.underflow
    return float((np.abs(got.double().cpu().numpy() - ref) / allowed).max())


def distinct(runs: Iterator[torch.Tensor]) -> int:
    """The number of different bit patterns among the runs' results."""
    return len({out.cpu().numpy().tobytes() for out in runs})


def microseconds(call: Callable[[], object], device: str) -> float:
    """Median time of ``call``, in microseconds, until its result is complete."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    times = []
    for _ in range(RUNS):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def yes(ok: bool) -> str:
    return "[green]yes[/]" if ok else "[red]no[/]"


def run(console: Console) -> bool:
    """Run the whole demo. Returns False if a guarantee did not hold."""
    target = tp.Target.current()
    if target.interpret:
        raise tp.Unsupported("the demo starts Triton's interpreter in its own process: unset TRITON_INTERPRET")
    digits = Digits.load(target.device_type)
    console.print(f"{len(digits)} digits of {SIDE}x{SIDE} pixels on [bold]{target.name}[/]\n")
    parts = [_sums(console, digits, target), _epoch(console, digits, target)]
    if not target.is_gpu:
        parts.append(_interpreter(console))
    _compiled(console, len(digits), target if target.is_gpu else tp.Target.preset("h200"))
    _picture(console, digits, target)
    ok = all(parts)
    console.print(f"Every guarantee held: {yes(ok)}")
    return ok


def _sums(console: Console, digits: Digits, target: tp.Target) -> bool:
    """Plan the sums with and without determinism, print the guarantees, then run repeatedly and compare bits."""
    console.rule("sums by class with index_add: planned, explained, repeated")
    plans = {required: class_sum_plan(len(digits), target, required) for required in (False, True)}
    console.print(plans[True].explain(), highlight=False, markup=False, soft_wrap=True)
    console.print()
    oracle = digits.oracle()
    table = Table("deterministic", "kernel", "promised", f"in {RUNS} runs", "error / allowed", "time")
    ok = True
    for required, plan in plans.items():
        plan.prepare()
        workspace = tp.Workspace.allocate(plan)
        out = class_sums(plan, digits, workspace)
        patterns = distinct(class_sums(plan, digits, workspace) for _ in range(RUNS))
        share = worst_share(out, oracle, plan)
        took = microseconds(lambda p=plan, w=workspace: class_sums(p, digits, w), target.device_type)  # type: ignore[misc]
        promised = plan.precision_guarantee().deterministic
        ok = ok and share <= 1 and (patterns == 1 or not promised)
        table.add_row(
            "required" if required else "not required",
            plan.sku().kernel,
            "same bits" if promised else "bits may differ",
            "same bits" if patterns == 1 else f"{patterns} bit patterns",
            f"{share:.2g}",
            f"{took:.0f} us",
        )
    console.print(table)
    plan = plans[True]
    workspace = tp.Workspace.allocate(plan)

    def shuffled() -> Iterator[torch.Tensor]:
        for seed in range(RUNS):
            order = _order(len(digits), seed).to(digits.labels.device)
            yield class_sums(plan, Digits(digits.images[order], digits.labels[order]), workspace)

    console.print(
        f"The deterministic plan, on {RUNS} shuffled orders of the images: {distinct(shuffled())} bit patterns; "
        f"its guarantee says order_invariant={plan.precision_guarantee().order_invariant}.\n"
    )
    return ok


def _order(n: int, seed: int) -> torch.Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def _epoch(console: Console, digits: Digits, target: tp.Target) -> bool:
    """Two epochs of shuffled mini-batches with a plan cache: each batch size is planned once."""
    console.rule("two epochs of shuffled mini-batches")
    cache, device, n = tp.PlanCache(), digits.images.device, len(digits)
    exact, kernels, seconds = True, dict[str, int](), 0.0
    sums = torch.zeros(CLASSES, PIXELS, device=device)
    for epoch in range(2):
        order = _order(n, epoch).to(device)
        for start_row in range(0, n, BATCH):
            index = order[start_row : start_row + BATCH]
            b = len(index)
            images, labels = torch.empty(b, PIXELS, device=device), torch.empty(b, dtype=torch.int64, device=device)
            select = tp.IndexSelectDescriptor(
                out_shape=(b, PIXELS), select_dim=0, src_dim_size=n, element=F32, out_of_bounds="skip"
            )
            gather = tp.GatherDescriptor(out_shape=(b,), gather_dim=0, src_dim_size=n, element=I64)
            add = tp.IndexAddDescriptor(src_shape=(b, PIXELS), add_dim=0, out_dim_size=CLASSES, element=F32)
            for desc, args in (
                (select, tp.IndexSelectArgs(src=digits.images, index=index, out=images)),
                (gather, tp.GatherArgs(src=digits.labels, index=index, out=labels)),
                (add, tp.IndexAddArgs(index=labels, src=images, out=sums)),
            ):
                start = time.perf_counter()
                plan = cache.get(desc, preference=tp.PlanPreference(deterministic=True), target=target)
                seconds += time.perf_counter() - start
                plan.run(args, workspace=tp.Workspace.allocate(plan))
                kernels[plan.sku().id] = kernels.get(plan.sku().id, 0) + 1
            # The expected batch comes from torch's own indexing.
            exact = exact and torch.equal(images, digits.images[index]) and torch.equal(labels, digits.labels[index])
    for kernel, count in kernels.items():
        console.print(f"  {count:3d} x {kernel}", highlight=False)
    stats = cache.stats()
    calls = stats.hits + stats.misses
    console.print(f"Every batch equal to torch's own indexing: {yes(exact)}")
    console.print(
        f"Plan cache: {stats.misses} plans made, {stats.hits} of {calls} calls were hits, "
        f"{seconds / calls * 1e6:.0f} us per call, planning included.\n"
    )
    return exact


def _interpreter(console: Console) -> bool:
    """Run a Triton kernel on the CPU, in a new process: Triton reads TRITON_INTERPRET when it is imported."""
    console.rule("the Triton kernel itself, in Triton's interpreter")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "triplan.cli.demo"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        console.print(f"[red]failed:[/] {done.stderr.strip()}")
        return False
    r = json.loads(done.stdout)
    console.print(
        f"  {r['sku']}: sums of {r['images']} images by class in {r['seconds']:.1f} s, {r['patterns']} bit "
        f"pattern(s) in {r['runs']} runs, error / allowed {r['share']:.2g}\n",
        highlight=False,
    )
    return bool(r["share"] <= 1 and r["patterns"] == 1)


def interpreted(count: int = 48, runs: int = 2) -> dict[str, Any]:
    """What ``_interpreter`` prints; to be called in a process with ``TRITON_INTERPRET=1``."""
    digits, target = Digits.load("cpu", count), tp.Target.current()
    plan = class_sum_plan(count, target, deterministic=True)
    workspace = tp.Workspace.allocate(plan)
    start = time.perf_counter()
    outs = [class_sums(plan, digits, workspace) for _ in range(runs)]
    return {
        "sku": plan.sku().id,
        "backend": str(plan.sku().backend),
        "images": count,
        "runs": runs,
        "seconds": (time.perf_counter() - start) / runs,
        "patterns": distinct(iter(outs)),
        "share": worst_share(outs[0], digits.oracle(), plan),
    }


def _compiled(console: Console, n: int, target: tp.Target) -> None:
    """Plan and compile for a GPU, with or without one."""
    console.rule(f"compiled for {target.name} ({target.arch})")
    table = Table("plan", "kernel", "registers", "spilled", "shared", "PTX", "cubin", caption="sizes in bytes")
    for deterministic in (False, True):
        plan = class_sum_plan(n, target, deterministic)
        for r in plan.compile():
            counts = (r.registers, r.spill_bytes, r.shared_bytes, len(r.ptx), len(r.cubin))
            table.add_row(plan.sku().kernel, r.name, *map(str, counts))
    console.print(table)
    console.print()


def _picture(console: Console, digits: Digits, target: tp.Target) -> None:
    """The mean image of each class, drawn from the sums."""
    console.rule("the mean digits")
    plan = class_sum_plan(len(digits), target, deterministic=True)
    sums = class_sums(plan, digits, tp.Workspace.allocate(plan)).cpu()
    means = (sums / torch.bincount(digits.labels.cpu(), minlength=CLASSES)[:, None]).reshape(CLASSES, SIDE, SIDE)
    low, high = means.min(), means.max()
    shade = ((means - low) / (high - low) * (len(SHADES) - 1)).round().int()
    for first in range(0, CLASSES, CLASSES // 2):
        for row in range(SIDE):
            drawn = ("".join(SHADES[s] * 2 for s in shade[c][row]) for c in range(first, first + CLASSES // 2))
            console.print(Text(" ".join(drawn)), soft_wrap=True)
        console.print()


if __name__ == "__main__":
    print(json.dumps(interpreted()))
