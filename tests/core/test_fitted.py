"""Corrections of estimated costs: what is fitted, what select makes of it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from samples import SAMPLES

import triplan as tp
from bench import fit
from bench.anywhere.drawing import MOST, case
from triplan.backends import fitted
from triplan.backends.fitted import FEATURES, Correction
from triplan.sku.facts import forget_facts

H200 = tp.Target.preset("h200")
NONE = (0.0,) * len(FEATURES)
WIDE = (NONE, (-100.0,) * len(FEATURES), (100.0,) * len(FEATURES))


def test_the_file_names_ops_and_entries_of_the_table() -> None:
    known = {(op, entry.name) for op in tp.TABLE.ops() for entry in tp.TABLE.rows(op)}
    assert set(fitted.read(fitted.FILE.read_text())) <= known


def test_other_features_are_refused() -> None:
    with pytest.raises(ValueError, match="features"):
        fitted.read(json.dumps({"features": ["estimate"], "groups": []}))


def test_select_takes_what_is_cheapest_after_the_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    desc = SAMPLES["softmax"]
    monkeypatch.setattr(fitted, "_corrections", dict)
    forget_facts()
    plan = tp.plan(desc, target=H200)
    costs = {c.kernel: c.cost_us for c in plan.candidates if c.cost_us}
    chosen = plan.sku().kernel
    slow = Correction(math.log(1000.0), *WIDE)
    monkeypatch.setattr(fitted, "_corrections", lambda: {(desc.op, chosen): slow})
    forget_facts()
    again = tp.plan(desc, target=H200)
    assert again.sku().kernel != chosen
    corrected = {c.kernel: c.cost_us for c in again.candidates if c.cost_us}
    assert corrected == {**costs, chosen: pytest.approx(1000.0 * costs[chosen])}


def test_what_was_not_measured_is_corrected_as_what_is_nearest() -> None:
    weights = (0.5, *NONE[1:])
    correction = Correction(0.0, weights, NONE, (2.0, *NONE[1:]))
    factors = [correction.factor((x, *(7.0 for _ in NONE[1:]))) for x in (-9.0, 0.0, 1.0, 2.0, 9.0)]
    assert factors == pytest.approx([1.0, 1.0, math.exp(0.5), math.e, math.e])


def test_problems_smaller_than_all_that_were_measured_keep_their_estimates() -> None:
    correction = Correction(math.log(3.0), NONE, NONE, NONE, smallest=5.0)
    factors = [correction.factor(tuple(x if name == "bytes" else 0.0 for name in fitted.FEATURES)) for x in (4.9, 5.0)]
    assert factors == pytest.approx([1.0, 3.0])


def test_a_known_error_of_estimates_is_found(tmp_path: Path) -> None:
    """Times of drawn problems that are the estimates, but of one entry four times as long, and of another by size."""
    true = {"rows": lambda us: 4.0 * us, "looped": lambda us: us**1.2}
    rows = []
    for number in range(80):
        drawn = case("softmax", 5, number, H200, MOST)
        times = {
            e.name: true.get(e.name, float)(e.rank(drawn.desc, H200))
            for e in tp.TABLE.rows(drawn.desc.op)
            if e.backend is tp.BackendKind.TRITON and e.supports(drawn.desc, H200)
        }
        rows.append({"case": drawn.name, "number": number, "times": times})
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"settings": {"family": "softmax", "seed": 5}, "rows": rows}))
    stale, other = (
        {"ops": [op], "entries": {"rows": dataclasses.asdict(Correction(1.0, *WIDE))}} for op in ("softmax", "norm")
    )
    stale["ops"] = next(list(ops) for ops in fit.problems([results]) if "softmax" in ops)
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"features": FEATURES, "groups": [stale, other]}))
    fit.run([results], costs, Console(quiet=True))
    found = fitted.read(costs.read_text())
    assert found["norm", "rows"] == Correction(1.0, *WIDE)  # these results say nothing about it
    assert found["softmax", "rows"] != Correction(1.0, *WIDE)
    for ops, of in fit.problems([results]).items():
        by = {entry: correction for (op, entry), correction in found.items() if op == ops[0]}
        before, after = (sum(math.log(p.regret(c)) for p in of) / len(of) for c in ({}, by))
        assert before > 0.05
        assert after < before / 3
    rows[0]["case"] = "another"
    results.write_text(json.dumps({"settings": {"family": "softmax", "seed": 5}, "rows": rows}))
    with pytest.raises(ValueError, match="drawn otherwise"):
        fit.problems([results])
