"""Fits the corrections of estimated costs to runs of ``bench anywhere``, and says what select gains by them.

Least squares on log(time / estimate), with a penalty on all weights but the constant, for each entry of a group of ops:
those of a family that the same entries solve. A group's corrections are kept only where they lower the regret of
problems that they were not fitted to: each quarter of its problems is judged by a fit to the other three.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import triplan as tp
from bench import determinism, timing
from bench.anywhere.drawing import MOST, case, entries_of, ops_of
from triplan.backends import fitted
from triplan.backends.fitted import BYTES, FEATURES, Correction, features

#: Penalties of weights, in problems, of which each group takes the one that leaves the least regret.
PENALTIES = (1.0, 4.0, 16.0, 64.0)
#: Parts of a group's problems that take turns as those that are judged.
PARTS = 4
#: Fewest problems of an entry.
FEWEST = 12
#: The relative gain, in the geometric mean of regret, below which a group keeps its estimates.
GAIN = 1.003

Corrections = Mapping[str, Correction]


@dataclass(frozen=True)
class Problem:
    """By entry: the features with the estimate, and the time in microseconds."""

    found: dict[str, tuple[tuple[float, ...], float]]

    def regret(self, by: Corrections) -> float:
        """The time of the entry that select would choose, over that of the fastest."""

        def cost(name: str) -> float:
            x = self.found[name][0]
            return math.exp(x[0]) * (by[name].factor(x) if name in by else 1.0)

        chosen = min(self.found, key=lambda name: (cost(name), name))
        return self.found[chosen][1] / min(us for _, us in self.found.values())


def problems(paths: Iterable[Path]) -> dict[tuple[str, ...], list[Problem]]:
    """By group, the problems of the runs that at least two entries solved."""
    target, found = tp.Target.preset("h200"), defaultdict(list)
    for path in paths:
        for desc, times in timed(path, target):
            own = {}
            for entry in tp.TABLE.rows(desc.op):
                us = times.get(entry.name)
                if us and entry.supports(desc, target) and (estimate := entry.rank(desc, target)) > 0:
                    own[entry.name] = (features(desc, estimate), us)
            if len(own) > 1:
                found[group(desc.op)].append(Problem(own))
    return found


@cache
def group(op: str) -> tuple[str, ...]:
    """The ops of the family of ``op`` that the same entries solve."""

    def entries(op: str) -> list[str]:
        return [entry.name for entry in entries_of(op)]

    family = fitted.family(tp.descriptor_types()[op])
    return tuple(other for other in sorted(ops_of(family)) if entries(other) == entries(op))


def timed(path: Path, target: tp.Target) -> Iterator[tuple[tp.Descriptor, dict[str, float]]]:
    """The problems of a run of ``bench anywhere`` or ``bench determinism --rows``: microseconds by entry."""
    run = json.loads(path.read_text())
    if "kernels" in run:
        yield from (
            (desc, times) for desc, pattern, times in determinism.problems(run["kernels"]) if pattern == "uniform"
        )
        return
    settings = run["settings"]
    for row in run["rows"]:
        drawn = case(settings["family"], settings["seed"], row["number"], target, MOST)
        if drawn.name != row["case"]:
            raise ValueError(f"{path}: problem {row['number']} is drawn otherwise by this version")
        yield drawn.desc, row.get("times", {})


def corrections(of: Sequence[Problem], penalty: float) -> dict[str, Correction]:
    """The corrections of each entry with at least FEWEST problems."""
    points = defaultdict(list)
    for problem in of:
        for name, (x, us) in problem.found.items():
            points[name].append((x, math.log(us) - x[0]))
    found = {}
    smallest = round(min(x[BYTES] for listed in points.values() for x, _ in listed), 3)
    for name, listed in sorted(points.items()):
        if len(listed) < FEWEST:
            continue
        measured = torch.tensor([p[0] for p in listed], dtype=torch.float64)
        y = torch.tensor([p[1] for p in listed], dtype=torch.float64)
        centred = measured - measured.mean(0)
        weights = torch.linalg.solve(centred.T @ centred + penalty * torch.eye(len(FEATURES)), centred.T @ y)
        constant = float(y.mean() - measured.mean(0) @ weights)
        lowest, highest = ([round(v, 3) for v in t.tolist()] for t in (measured.amin(0), measured.amax(0)))
        rounded = tuple(round(w, 4) for w in weights.tolist())
        found[name] = Correction(round(constant, 4), rounded, tuple(lowest), tuple(highest), smallest)
    return found


def judged(of: Sequence[Problem], penalty: float) -> list[float]:
    """The regret of each problem, by corrections that were fitted to problems of other parts."""
    found = []
    for part in range(PARTS):
        by = corrections([p for i, p in enumerate(of) if i % PARTS != part], penalty)
        found += [p.regret(by) for i, p in enumerate(of) if i % PARTS == part]
    return found


def run(paths: Sequence[Path], to: Path, console: Console) -> None:
    """Write the corrections to ``to``, where groups without a problem keep theirs, and print what they change."""
    table = Table("ops", "problems", "regret: mean", "95%", "corrected: mean", "95%", "kept")
    kept: dict[tuple[str, ...], dict[str, Correction]] = {}
    found = problems(paths)
    for ops, of in sorted(found.items()):
        left = {penalty: judged(of, penalty) for penalty in PENALTIES}
        penalty = min(left, key=lambda penalty: statistics.geometric_mean(left[penalty]))
        before, after = [p.regret({}) for p in of], left[penalty]
        means = [statistics.geometric_mean(r) for r in (before, after)]
        tails = [timing.quantile(r, 0.95) for r in (before, after)]
        if means[1] * GAIN <= means[0] and tails[1] <= tails[0] * GAIN:
            kept[ops] = corrections(of, penalty)
        shown = [f"{v:.3f}" for pair in zip(means, tails, strict=True) for v in pair]
        table.add_row(" ".join(ops), str(len(of)), *shown, "yes" if ops in kept else "no")
    console.print(table)
    earlier: dict[str, Any] = json.loads(to.read_text()) if to.exists() else {"features": ()}
    same = tuple(earlier["features"]) == FEATURES  # others' corrections say nothing
    groups = [group for group in earlier["groups"] if tuple(group["ops"]) not in found] if same else []
    groups += [
        {"ops": list(ops), "entries": {name: dataclasses.asdict(correction) for name, correction in own.items()}}
        for ops, own in kept.items()
    ]
    groups.sort(key=lambda group: group["ops"])
    to.write_text(json.dumps({"features": FEATURES, "groups": groups}, separators=(",", ":")) + "\n")
