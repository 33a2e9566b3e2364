"""Every entry of the kernel table keeps every word of its guarantees, and each proof is shown to be able to fail.

References run on the CPU, Triton kernels in the interpreter and on the GPU. ``proofs.py`` says what a family brings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache, lru_cache
from itertools import islice
from typing import Any

import digests
import pytest
import torch
from cases import pinned
from proofs import (
    COUNT,
    FAMILIES,
    KINDS,
    RUNS,
    as_args,
    bits,
    cases,
    claimed,
    claims,
    digest_bytes,
    first_run,
    guarantees_of,
    places,
    repeated,
    run,
    target,
)
from samples import ACCUMULATING, NORMS, REPRESENTED, SAMPLES, known
from sanitized import plans_of_samples

import triplan as tp
from triplan.sku import interpreting
from triplan.testing import args_for, check_plan, magnitudes, oracle, wrong_results
from triplan.testing.oracle import bit_oracle, judge, moved_bits

#: An interpreted segment longer than any piece that a kernel sums at once.
LONG = 300
BUSY_RUNS = 200
H200 = tp.Target.preset("h200")
#: Draws of values among which each wrong result must show: the mean of a row may be nearly 0, or a loss round well.
SEEDS = 12


def test_every_op_of_the_table_joins() -> None:
    assert {REPRESENTED[op] for op in tp.TABLE.ops() if "::" not in op} == set(FAMILIES)  # a user's ops have two colons


def test_every_entry_has_a_problem() -> None:
    """What no problem is for would be held to nothing."""
    entries = [(op, entry) for op in sorted(FAMILIES) for entry in tp.TABLE.rows(op)]
    missing = [(where, op, e.name) for op, e in entries for where in places(e) if not guarantees_of(where, op, e)]
    assert missing == []


def test_what_has_small_problems_has_problems_of_the_gpus_size() -> None:
    """Claims are collected from small problems: one that only those can be run for would fail on a GPU alone."""
    entries = [(op, entry) for op in sorted(FAMILIES) for entry in tp.TABLE.rows(op) if "gpu" in places(entry)]
    small = [(op, entry) for op, entry in entries if guarantees_of("gpu", op, entry)]
    assert small
    assert [(op, entry.name) for op, entry in small if not any(cases("gpu", op, entry, COUNT["gpu"]))] == []


def same_bits(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(bits(t.cpu()), bits(b[name])) for name, t in a.items())


def differing(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> str:
    """The first elements that differ: where, and both values."""
    found = []
    for name, t in a.items():
        x, y = t.cpu(), b[name]
        for at in (bits(x) != bits(y)).nonzero()[:4].tolist():
            found.append(f"{name}{at}: {x[tuple(at)].item()!r} for {y[tuple(at)].item()!r}")
    return ", ".join(found)


# --- deterministic ---


def is_deterministic(g: tp.PrecisionGuarantee) -> bool:
    return g.deterministic


def sums_in_any_order(g: tp.PrecisionGuarantee) -> bool:
    """(Entries whose guarantee says that any of several writes may stay have said it in that word.)"""
    return not g.deterministic and g.duplicates is tp.Duplicates.SUM


@pytest.mark.parametrize(("where", "op", "entry"), claims(is_deterministic))
def test_deterministic(where: str, op: str, entry: str) -> None:
    """Run after run the same bits: on the GPU beside other work, everywhere over other rubbish."""
    for problem, plan in claimed(where, op, entry, is_deterministic):
        first = first_run(plan, problem)
        for outputs in repeated(plan, problem.values, range(1, RUNS[where])):
            assert same_bits(outputs, first), f"other bits from {plan.key}: {differing(outputs, first)}"


@pytest.mark.parametrize(("where", "op", "entry"), claims(sums_in_any_order, only=("gpu",)))
def test_what_is_not_called_deterministic_is_not(where: str, op: str, entry: str) -> None:
    """Other bits are seen to come, so the test above is known to be able to fail."""
    for problem, plan in claimed(where, op, entry, sums_in_any_order):
        first = first_run(plan, problem)
        again = repeated(plan, problem.values, range(1, BUSY_RUNS))
        assert not all(same_bits(outputs, first) for outputs in again), (
            f"{BUSY_RUNS} runs gave the same bits: {plan.key}"
        )


# --- batch_invariant ---


def is_batch_invariant(g: tp.PrecisionGuarantee) -> bool:
    return g.batch_invariant


def hold_parts(problem: Any, plan: tp.Plan[Any, Any], whole: Mapping[str, torch.Tensor]) -> None:
    parts = list(problem.parts())
    assert parts
    for part in parts:
        smaller = pinned(part.problem.desc, plan.sku().kernel, plan.target)
        assert smaller is not None
        assert smaller.sku().numerics_id == plan.sku().numerics_id
        got = run(smaller, part.problem.values)
        assert part.own(got).numel() > 0
        assert torch.equal(bits(part.own(got)), bits(part.whole(whole))), f"{smaller.key} against {plan.key}"


@pytest.mark.parametrize(("where", "op", "entry"), claims(is_batch_invariant))
def test_batch_invariant(where: str, op: str, entry: str) -> None:
    """A segment alone, or amid others, here or elsewhere, in plans of other batch sizes: the same bits."""
    for problem, plan in claimed(where, op, entry, is_batch_invariant):
        hold_parts(problem, plan, first_run(plan, problem))


def test_the_proof_of_batch_invariance_can_fail() -> None:
    """Parts that are summed in another order than within the whole are told apart."""
    problem = FAMILIES["index_add"].make(COUNT["cpu"], tp.ElementKind.F32, "cancelling")
    plan = tp.plan(problem.desc, target=target("cpu"))
    whole = run(plan, problem.values)
    for part in problem.parts():
        other = part.problem.reordered().problem
        again = pinned(other.desc, "reference", plan.target)
        assert again is not None
        assert not torch.equal(bits(part.own(run(again, other.values))), bits(part.whole(whole)))


@pytest.mark.interpret
@pytest.mark.parametrize(
    "entry",
    [
        entry
        for _, op, entry in (p.values for p in claims(is_batch_invariant, only=("interpret",)))
        if op == "index_add"
    ],
)
def test_batch_invariant_where_interpreted_segments_are_long(entry: str) -> None:
    """Long segments may be summed in pieces: where the pieces part must not depend on the batch."""
    (row,) = (e for e in tp.TABLE.rows("index_add") if e.name == entry)
    element = tp.ElementKind.F32 if tp.ElementKind.F32 in row.elements else min(row.elements)
    problem = FAMILIES["index_add"].make(LONG, element, "cancelling")
    plan = pinned(problem.desc, entry, target("interpret"))
    assert plan is not None
    if plan.precision_guarantee().batch_invariant:
        hold_parts(problem, plan, run(plan, problem.values))


#: Ops that add up along rows.
SUMS = ("cross_entropy", *(op for op in FAMILIES if "softmax" in op or op in NORMS))
STRIDED, NARROW = tp.Layout.strided(), tp.Layout(alignment=4)


def along(op: str, axis: int, lanes: int, layouts: Sequence[tp.Layout]) -> Any:
    """``lanes`` rows of 200 elements along ``axis``, with the layouts of operands of that shape."""
    cls, shape = tp.descriptor_types()[op], (200, lanes) if axis == 0 else (lanes, 200)
    options = {"softmax_axis": axis, "class_axis": axis, "reduction": "none", "weight": False, "bias": False}
    desc = cls(input_shape=shape, element="f32", **{k: v for k, v in options.items() if k in cls.model_fields})
    return desc.replace(layouts=dict(zip((o.name for o in desc.operands() if o.shape == shape), layouts, strict=False)))


@pytest.mark.skipif(interpreting(), reason="kernels are interpreted here")
@pytest.mark.parametrize("op", SUMS)
def test_equal_numerics_are_one_binary(op: str) -> None:
    """Which elements a thread loads together decides the order of sums, and follows from alignments, strides and, where
    rows lie side by side, their number. A row claims batch invariance whatever that number is, or never."""
    binaries: dict[str, set[Any]] = {}
    claimed = set()
    for axis in (1,) if "_norm" in op else (0, 1):
        unit, other = (tp.Layout.strided(unit_axis=a, alignment=16) for a in (axis, 1 - axis))
        apart = unit.model_copy(update={"stride_multiple": 4})
        uniform = [(layout,) * 3 for layout in (tp.Layout(alignment=16), NARROW, STRIDED, unit, other, apart)]
        for entry in (r for r in tp.TABLE.rows(op) if r.backend is tp.BackendKind.TRITON):
            for layouts in (*uniform, (uniform[0][0], STRIDED, STRIDED), (unit, STRIDED), (NARROW,), (STRIDED,)):
                found = set()
                for desc in (along(op, axis, lanes, layouts) for lanes in (1, 62, 63, 64)):
                    claims = all(g.batch_invariant for g in entry.guarantee(desc).values())
                    numerics = entry.numerics(desc) if entry.supports(desc, H200) else None
                    assert claims or numerics is None
                    found.add(numerics)
                    if numerics is not None:
                        launches = entry.launches(desc, H200)
                        binaries.setdefault(numerics, set()).add(tuple(launch.source() for launch in launches))
                assert len(found) == 1, found
                claimed.add((entry.name, axis, *found))
    assert all(len(sources) == 1 for sources in binaries.values())
    # Along the last axis all claim it, and along another where nothing is promised that lanes could decide.
    assert {name for name, axis, numerics in claimed if numerics} == {"rows", "looped", "split"}
    assert "_norm" in op or any(numerics for _, axis, numerics in claimed if axis == 0)


# --- order_invariant ---


def is_order_invariant(g: tp.PrecisionGuarantee) -> bool:
    return g.order_invariant


def keeps_one_order(g: tp.PrecisionGuarantee) -> bool:
    return g.deterministic and not g.order_invariant


def reordering_changes_bits(problem: Any, plan: tp.Plan[Any, Any]) -> bool:
    other = problem.reordered()
    again = pinned(other.problem.desc, plan.sku().kernel, plan.target)
    assert again is not None
    own, whole = other.own(run(again, other.problem.values)), other.whole(first_run(plan, problem))
    return not torch.equal(bits(own), bits(whole))


@pytest.mark.parametrize(("where", "op", "entry"), claims(is_order_invariant))
def test_order_invariant(where: str, op: str, entry: str) -> None:
    for problem, plan in claimed(where, op, entry, is_order_invariant):
        assert not reordering_changes_bits(problem, plan), plan.key


@pytest.mark.parametrize(("where", "op", "entry"), claims(keeps_one_order))
def test_what_is_not_called_order_invariant_is_not(where: str, op: str, entry: str) -> None:
    """Deterministic, and yet another order gives other bits: what the test above compares can differ."""
    for problem, plan in claimed(where, op, entry, keeps_one_order):
        assert reordering_changes_bits(problem, plan), f"the same bits in another order: {plan.key}"


# --- tolerance ---


def is_decided(g: tp.PrecisionGuarantee) -> bool:
    """(Where any of several writes may stay, ``triplan.testing.check_plan`` judges which did.)"""
    return g.duplicates is not tp.Duplicates.ANY


@pytest.mark.parametrize(("where", "op", "entry"), claims(is_decided))
def test_tolerance_of_adversarial_values(where: str, op: str, entry: str) -> None:
    """Against the float64 oracle at the guarantee's own tolerance, or to the last bit where elements are only moved."""
    for kind in KINDS[where]:
        for problem, plan in claimed(where, op, entry, is_decided, kind):
            x, desc = as_args(problem), problem.desc
            found = first_run(plan, problem)
            assert any(t.numel() for t in found.values())
            promises = {name: plan.precision_guarantee(name) for name in found}
            moved = {name for name, g in promises.items() if moved_bits(g)}
            native = bit_oracle(desc, x) if moved else {}
            wide, terms = ({}, {}) if moved == found.keys() else (oracle(desc, x), magnitudes(desc, x))
            for name, got in found.items():
                g, ref = promises[name], native[name] if name in moved else wide[name]
                verdict = judge(got, ref, terms.get(name), g)
                assert not bool(verdict.wrong.any()), f"{kind}: {verdict.describe(name, got, ref)} from {plan.key}"


@pytest.mark.parametrize("op", [*ACCUMULATING, *SUMS, "nll_loss"])
def test_tolerances_of_the_cpu_count_the_terms_of_one_sum(op: str) -> None:
    """A hundred times as many sums have the same tolerance."""
    desc = SAMPLES[op]
    desc = desc.replace(**known(desc, accumulate=True, reduction="none", gradient=False))
    more: dict[str, Any] = {name: (*getattr(desc, name, ())[:-1], 3200) for name in ("out_shape", "src_shape")}
    many = desc.replace(**known(desc, embedding_dim=3200, input_shape=(500, 32), **more))
    few, found = (tp.TABLE.reference(op).guarantee(d) for d in (desc, many))
    for name in few.keys() - ({"dweight", "dbias"} if "_norm" in op else ()):  # these are sums over rows
        assert few[name].tolerance == found[name].tolerance, name


# --- triplan.testing ---


@pytest.mark.parametrize(("where", "op", "entry"), claims(lambda g: True))
def test_check_plan_needs_the_plan_alone(where: str, op: str, entry: str) -> None:
    """Neither statistics nor sum|terms|: the reference has rules for both. (Interpreted kernels are slow.)

    What takes no sample has a problem of the other proofs."""
    runs, most = (1, 1) if where == "interpret" else (2, None)
    plans = list(islice(plans_of_samples(op, entry, target(where)), most))
    plans = plans or [plan for _, plan in islice(claimed(where, op, entry, lambda g: True), 1)]
    assert sum(check_plan(plan, runs=runs).compared for plan in plans) > 0


@lru_cache(maxsize=128)  # entries of an op come one after the other
def drawn(desc: tp.Descriptor, seed: int) -> tuple[Any, ...]:
    """Arguments, what they give in float64 and in the operands' own elements, and sum|terms|."""
    x = args_for(desc, seed=seed, indices="valid").host()
    return x, oracle(desc, x), bit_oracle(desc, x), magnitudes(desc, x)


@lru_cache(maxsize=128)  # many entries of an op promise the same
def not_told_apart(
    desc: tp.Descriptor, guarantees: tuple[tuple[str, tp.PrecisionGuarantee], ...]
) -> tuple[list[tuple[str, str, str]], bool]:
    """The wrong results, as (rule, operand, output), that lie within; and whether any rule has been tried."""
    promised = dict(guarantees)
    rounded = (("bits", name, name) for name, g in guarantees if not moved_bits(g))
    caught: dict[tuple[str, str, str], bool] = dict.fromkeys(rounded, False)
    reads = any(o.is_tensor and not o.is_written for o in desc.operands())
    for seed in range(SEEDS):
        x, wide, native, terms = drawn(desc, seed)
        for wrong in wrong_results(desc, x, promised):
            g, name = promised[wrong.output], wrong.output
            verdict = judge(wrong.got, native[name] if moved_bits(g) else wide[name], terms.get(name), g)
            key = (wrong.rule, wrong.operand, name)
            caught[key] = caught.get(key, False) or bool(verdict.wrong.any())
        # A single number has no neighbour.
        rules = {"missing", "neighbour"} if any(t.numel() > 1 for t in native.values()) else {"missing"}
        tried = not reads or {rule for rule, _, _ in caught} >= rules
        if tried and all(caught.values()):
            break
    return [wrong for wrong, found in caught.items() if not found], tried


@pytest.mark.skipif(interpreting(), reason="nothing is run: once is enough")
@pytest.mark.parametrize(
    ("op", "entry"),
    [pytest.param(op, e.name, id=f"{op}-{e.name}") for op in sorted(FAMILIES) for e in tp.TABLE.rows(op)],
)
def test_tolerances_tell_wrong_results_apart(op: str, entry: str) -> None:
    """An element that is missing or another's, and arithmetic that is coarser than promised, lie outside, if not with
    the first values, then with others. (Where any write may stay, there is no tolerance.)"""
    for plan in plans_of_samples(op, entry, target("cpu") if entry == "reference" else H200):
        desc = plan.descriptor
        guarantees = tuple((o.name, plan.precision_guarantee(o.name)) for o in desc.operands() if o.is_written)
        if any(g.duplicates is tp.Duplicates.ANY for _, g in guarantees):
            continue
        missed, tried = not_told_apart(desc, guarantees)
        assert missed == [], plan.key
        assert tried, plan.key


# --- bit_stable_on_same_hardware ---


def is_bit_stable(g: tp.PrecisionGuarantee) -> bool:
    return g.bit_stable_on_same_hardware


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str, str], dict[str, str]]]:
    """The digests of another process, with an empty Triton cache, another number of threads and another hash seed. It
    is asked for one entry after the other, as importing takes longer than most of them."""
    errors = tmp_path_factory.mktemp("elsewhere") / "errors"
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(errors.parent),
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with ExitStack() as open_until_the_end:
        file = open_until_the_end.enter_context(errors.open("w"))

        @cache
        def other(where: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, digests.__file__, where],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment,
            )
            return open_until_the_end.enter_context(process)

        def ask(where: str, op: str, entry: str) -> dict[str, str]:
            process = other(where)
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # of one that has failed: its errors tell more
                print(op, entry, file=process.stdin, flush=True)
            answer = process.stdout.readline()
            assert answer, errors.read_text()
            found: dict[str, str] = json.loads(answer)
            return found

        yield ask


@pytest.mark.parametrize(("where", "op", "entry"), claims(is_bit_stable))
def test_bit_stable_between_processes(
    where: str, op: str, entry: str, elsewhere: Callable[[str, str, str], dict[str, str]]
) -> None:
    here = digests.digests(where, op, entry)
    assert here
    assert elsewhere(where, op, entry) == here


@pytest.mark.gpu
@pytest.mark.skipif("torch.cuda.device_count() < 2")
@pytest.mark.parametrize("op", sorted(FAMILIES))
def test_bit_stable_between_devices(op: str) -> None:
    with torch.cuda.device(1):
        other = digests.digests("gpu", op)
    assert other == digests.digests("gpu", op)


def test_the_digests_tell_results_apart() -> None:
    problem = FAMILIES["index_add"].make(COUNT["cpu"], tp.ElementKind.F32, "cancelling")
    other = problem.reordered()
    plan = tp.plan(problem.desc, target=target("cpu"))
    assert digest_bytes(run(plan, problem.values)) != digest_bytes(run(plan, other.problem.values))
