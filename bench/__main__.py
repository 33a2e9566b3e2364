"""``python -m bench NAME``: run one bench and print its table; ``--out`` also writes JSON, CSV and PNG."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from bench import (
    attention,
    batch_norm,
    conv,
    copies,
    determinism,
    elementwise,
    fit,
    gemm,
    host,
    lm,
    losses,
    models,
    norms,
    optim,
    pooling,
    random,
    reductions,
    rotary,
    rows,
    sampling,
    scans,
    softmax,
    sorting,
)
from bench.anywhere import run as anywhere
from bench.anywhere.drawing import FAMILIES
from bench.indexing import run as indexing
from bench.indexing.cases import DTYPES
from triplan.backends.fitted import FILE

#: Timed runs and runs before them, unless the command line says otherwise.
REPEATS = {"indexing": (100, 10), "determinism": (20, 2), "gemm": (30, 3), "rowwise": (10, 1)}
REPEATS |= {"rotary": (10, 1), "anywhere": (9, 1), "attention": (20, 2), "copies": (10, 1), "elementwise": (10, 1)}
REPEATS |= {"conv": (10, 1), "random": (10, 1), "optim": (10, 1), "reductions": (10, 1), "sampling": (10, 1)}
REPEATS |= {"pooling": (10, 1), "batch_norm": (10, 1), "sorting": (10, 1), "lm": (10, 1), "models": (10, 1)}
#: Benches of one family's cases.
ONE_FAMILY: dict[str, Any] = {"conv": conv, "copies": copies, "random": random, "reductions": reductions}
ONE_FAMILY |= {"pooling": pooling, "batch_norm": batch_norm}
ONE_FAMILY |= {"rotary": rotary, "sampling": sampling, "sorting": sorting, "lm": lm}
HELP = {
    "indexing": "gather, scatter and embedding against torch, on a GPU",
    "determinism": "accumulation by index against torch's modes, on a GPU",
    "gemm": "matrix products against torch, on a GPU",
    "rowwise": "softmax, norms, cross-entropy, scans and elementwise ops against torch and torch.compile, on GPUs",
    "anywhere": "drawn problems of one family against torch and against every other kernel, on a GPU",
    "lm": "embedding with norm, the last layer's loss, rotary embedding, sampling, on GPUs",
    "rotary": "rotary embedding of q and k against torch and torch.compile, on GPUs",
    "attention": "attention against torch's flash and cuDNN backends, on a GPU",
    "conv": "convolutions and their gradients against cuDNN, on GPUs",
    "batch_norm": "batch normalisation and its gradients against torch and torch.compile, on GPUs",
    "pooling": "pooling and its gradients against torch, on GPUs",
    "copies": "copies, transposes, joins and fills against torch and torch.compile, on GPUs",
    "random": "random numbers and dropout against torch and torch.compile, on GPUs",
    "reductions": "reductions of rows, columns and whole tensors against torch and torch.compile, on GPUs",
    "sampling": "tokens from logits, with filters, against torch's sorts, on GPUs",
    "sorting": "the largest elements of rows, sorts and searches against torch, on GPUs",
    "elementwise": "elementwise functions and a fused expression against torch and torch.compile, on GPUs",
    "models": "forward and backward of Llama's layers and of ResNet-50, patched and not, on a GPU",
    "optim": "steps of optimizers against torch's fused and foreach ones, on a GPU",
    "host": "host time of planning and launching, and of every function beside torch's",
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m bench", description="triplan's benchmarks")
    names = top.add_subparsers(dest="name", required=True)
    of = {name: names.add_parser(name, help=text) for name, text in HELP.items()}
    of["indexing"].add_argument("--dtype", choices=sorted(DTYPES), default="fp16")
    of["determinism"].add_argument("--rows", action="store_true", help="also time each kernel alone, for the JSON")
    of["gemm"].add_argument("--dtype", choices=sorted(gemm.DTYPES), default="float16")
    of["gemm"].add_argument("--sweep", action="store_true", help="also time every tile of every kernel")
    of["gemm"].add_argument("--cases", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    of["attention"].add_argument("--cases", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    of["rowwise"].add_argument("--sweep", action="store_true", help="time tiles of every kernel, not other libraries")
    for name in ("rowwise", *ONE_FAMILY):
        of[name].add_argument(
            "--cases", nargs="+", default=[], metavar="TEXT", help="only cases whose name contains one of these"
        )
    add = of["anywhere"].add_argument
    add("family", choices=FAMILIES)
    add("--seed", type=_natural, default=0, help="the same problems for the same seed")
    add("--cases", type=_positive, default=100, help="problems to draw")
    add("--seconds", type=float, default=120.0, help="after these no other problem is begun")
    add("--compile", action="store_true", help="torch.compile takes part: seconds a problem")
    for name, (iterations, warmup) in REPEATS.items():
        add = of[name].add_argument
        add("--iterations", type=_positive, default=iterations, help="timed runs (fewer for slow kernels)")
        add("--warmup", type=_natural, default=warmup, help="runs before the timed ones")
        smoke = "cpu: a smoke test with tiny sizes, whose times mean nothing"
        add("--device", choices=("cuda", "cpu"), default="cuda", help=smoke)
    limit = "fewer timed loops (at least two) if this is over; 16 on a GPU take about four minutes"
    of["host"].add_argument("--seconds", type=float, default=math.inf, help=limit)
    for p in of.values():
        p.add_argument("--out", type=Path, help="folder for JSON, CSV and PNG")
    fits = names.add_parser("fit", help="fit select's costs to results of bench anywhere, and write them")
    fits.add_argument("results", nargs="+", type=Path, help="JSON files of bench anywhere")
    fits.add_argument("--to", type=Path, default=FILE, help="file to write")
    return top


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if a contestant failed or gave a wrong result, 2 if there is no GPU for the request."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    # For a pipe, which has no width, rich would assume 80 columns and wrap the tables.
    console = Console(width=None if sys.stdout.isatty() else 170)
    if options.name == "fit":
        fit.run(options.results, options.to, console)
        return 0
    if options.name != "host" and options.device == "cuda" and not torch.cuda.is_available():
        print(f"bench {options.name}: there is no GPU here; --device cpu runs a smoke test", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # tensors are tiny: starting threads would take most of the time
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was timed is reported
    # No automatic refresh: its thread would interrupt the timed loops.
    with Progress(console=console, auto_refresh=False) as bar:
        task = bar.add_task("", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total, refresh=True)

        if options.name == "host":
            report = host.run(progress, options.seconds)
        elif options.name == "anywhere":  # it starts processes before CUDA starts
            drawn = (options.family, options.seed, options.cases, options.seconds, options.compile)
            report = anywhere.run(*drawn, options.iterations, options.warmup, options.device == "cpu", progress)
        else:
            tiny = options.device == "cpu"
            device = torch.device("cpu") if tiny else torch.device("cuda", torch.cuda.current_device())
            timing = (options.iterations, options.warmup, device, tiny)
            if options.name == "indexing":
                report = indexing.run(options.dtype, *timing, progress)
            elif options.name == "gemm":
                report = gemm.run(options.dtype, *timing, options.sweep, options.cases, progress)
            elif options.name == "attention":
                report = attention.run(*timing, options.cases, progress)
            elif options.name == "rowwise":
                families = (softmax, norms, losses, elementwise, scans)
                cases = [case for family in families for case in family.cases(tiny)]
                report = rows.run(cases, *timing, options.sweep, options.cases, progress)
            elif options.name == "elementwise":
                report = elementwise.run(*timing, progress)
            elif options.name in ("models", "optim"):
                report = {"models": models, "optim": optim}[options.name].run(*timing, progress)
            elif options.name in ONE_FAMILY:
                listed = ONE_FAMILY[options.name].cases(tiny)
                report = rows.run(listed, *timing, False, options.cases, progress, options.name)
            else:
                report = determinism.run(*timing, options.rows, progress)
    report.show(console)
    if options.out is not None:
        for path in report.write(options.out, given):
            console.print(f"wrote {path}", soft_wrap=True)
    return 1 if any(row.get("error") for row in report.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
