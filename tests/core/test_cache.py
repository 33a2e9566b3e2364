"""PlanCache: LRU, threads, fork, files."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import stat
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import SAMPLES, in_child, in_threads

import triplan as tp
import triplan.functional
from triplan.backends import storing, table as table_module
from triplan.backends.select import select
from triplan.backends.storing import write_json
from triplan.facade import cache as cache_module

H200 = tp.Target.preset("h200")


def sized(n: int) -> tp.Descriptor:
    return SAMPLES["gather"].replace(src_dim_size=n)


def test_lru_order_and_stats() -> None:
    cache = tp.PlanCache(capacity=2)
    a, b = cache.get(sized(1), target=H200), cache.get(sized(2), target=H200)
    assert cache.get(sized(1), target=H200) is a  # b is now the oldest
    cache.get(sized(3), target=H200)
    assert cache.get(sized(1), target=H200) is a
    assert cache.get(sized(2), target=H200) is not b
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.evictions, stats.size, stats.capacity) == (2, 4, 2, 2, 2)
    cache.clear()
    assert len(cache) == 0
    with pytest.raises(tp.InvalidProblem):
        tp.PlanCache(capacity=0)


def test_the_key_decides() -> None:
    cache = tp.PlanCache()
    plan = cache.get(sized(1), target=H200)
    assert plan.key in cache._plans
    assert cache.get(tp.parse_descriptor(sized(1).to_json()), target=H200.replace(name="x")) is plan
    assert cache.get(sized(1), target=tp.Target.preset("a100")) is not plan
    assert cache.get(sized(1), target=H200, preference=tp.PlanPreference(deterministic=True)) is not plan
    assert cache.get(sized(1), target=H200, tuning=tp.TuningTable()) is not plan
    assert all(key == p.key for key, p in cache._plans.items())


def test_failures_are_raised_and_not_kept() -> None:
    cache = tp.PlanCache()
    for _ in range(2):
        with pytest.raises(tp.Unsupported):
            cache.get(sized(1), target=H200, preference=tp.PlanPreference(kernel="no_such"))
    assert cache.stats().size == 0
    assert cache.stats().misses == 2
    assert not cache._selecting


def test_one_select_a_key_however_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, int] = {}
    lock = threading.Lock()
    original = tp.GatherPlan.select.__func__  # type: ignore[attr-defined]
    gate = threading.Barrier(16)

    def counting(cls: type, desc: tp.Descriptor, **kwargs: object) -> object:
        with lock:
            counts[desc.key] = counts.get(desc.key, 0) + 1
        threading.Event().wait(0.02)  # give the others time to ask for the same
        return original(cls, desc, **kwargs)

    monkeypatch.setattr(tp.GatherPlan, "select", classmethod(counting))
    cache = tp.PlanCache()
    got: list[list[object]] = [[] for _ in range(16)]

    def ask(k: int) -> None:
        gate.wait()
        for n in range(5):
            got[k].append(cache.get(sized(n), target=H200))

    in_threads(16, ask)
    assert counts == {sized(n).key: 1 for n in range(5)}
    assert all(g == got[0] for g in got)
    assert cache.stats().misses + cache.stats().hits == 16 * 5


def test_no_interrupt_leaves_a_key_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real signals at random moments of a select and of hits; their handler uses the cache, too."""
    monkeypatch.setattr(cache_module, "_PATIENCE", 1000.0)  # nobody gets on by patience alone
    cache, delay = tp.PlanCache(capacity=2), random.Random(0)
    asked = [sized(n) for n in (1, 2, 3)]
    assert all(desc.key for desc in asked)  # made now: pydantic turns an interrupt within it into an error of its own

    def handler(*args: object) -> None:
        cache.stats()
        cache.get(asked[0], target=H200)
        raise KeyboardInterrupt

    def work() -> None:
        signal.signal(signal.SIGALRM, handler)
        for _ in range(400):
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, delay.uniform(1e-5, 2e-3))
                while True:
                    for desc in (*asked, asked[-1]):
                        cache.get(desc, target=H200)
            others = [threading.Thread(target=cache.get, args=(desc,), kwargs={"target": H200}) for desc in asked]
            for other in others:
                other.start()
            for other in others:
                other.join()

    in_child(work)


def test_a_waiter_selects_where_the_first_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    original, cache = tp.GatherPlan.select.__func__, tp.PlanCache()  # type: ignore[attr-defined]
    plans: list[object] = []
    waiter = threading.Thread(target=lambda: plans.append(cache.get(sized(1), target=H200)))

    def interrupted(cls: type, desc: tp.Descriptor, **kwargs: object) -> object:
        if threading.current_thread() is waiter:
            return original(cls, desc, **kwargs)
        waiter.start()
        while cache.stats().misses < 2:
            time.sleep(1e-3)
        raise KeyboardInterrupt

    monkeypatch.setattr(tp.GatherPlan, "select", classmethod(interrupted))
    with pytest.raises(KeyboardInterrupt):
        cache.get(sized(1), target=H200)
    waiter.join(30)
    assert plans == [cache.get(sized(1), target=H200)]


def test_fork_while_another_thread_selects(monkeypatch: pytest.MonkeyPatch) -> None:
    original, cache = tp.GatherPlan.select.__func__, tp.PlanCache()  # type: ignore[attr-defined]
    selects, forked = threading.Event(), threading.Event()
    monkeypatch.setattr(cache_module, "_PATIENCE", 1000.0)

    def slow(cls: type, desc: tp.Descriptor, **kwargs: object) -> object:
        if threading.current_thread() is thread:
            selects.set()
            forked.wait()
        return original(cls, desc, **kwargs)

    monkeypatch.setattr(tp.GatherPlan, "select", classmethod(slow))
    thread = threading.Thread(target=cache.get, args=(sized(1),), kwargs={"target": H200})
    thread.start()
    selects.wait()
    try:
        in_child(lambda: cache.get(sized(1), target=H200))
    finally:
        forked.set()
        thread.join()


@pytest.mark.parametrize("functional", [False, True], ids=["get", "functional"])
def test_sixteen_threads_that_switch_all_the_time(functional: bool) -> None:
    cache, x = tp.PlanCache(capacity=3), torch.arange(12.0).view(3, 4)
    plans = {n: tp.plan(sized(n), target=H200).key for n in range(5)}

    def work(k: int) -> None:
        for n in range(10 if functional else 30):
            if functional:
                index = torch.full((2, 4), (k + n) % 3)
                assert torch.equal(
                    tp.functional.gather(x[:, : 1 + n % 4], 0, index[:, : 1 + n % 4]), x[index[:, 0], : 1 + n % 4]
                )
            else:
                assert cache.get(sized((k * n) % 5), target=H200).key == plans[(k * n) % 5]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads(16, work)
    finally:
        sys.setswitchinterval(before)
    stats = cache.stats()
    assert stats.hits + stats.misses == (0 if functional else 16 * 30)
    assert stats.size <= 3


def test_a_new_row_empties_the_cache() -> None:
    cache = tp.PlanCache()
    plan = cache.get(sized(1), target=H200)
    extra = table_module.TABLE.rows("gather")[0]
    cheap = replace(extra, name="zz_cheap", rank=lambda desc, target: -1.0)
    table_module.TABLE.register(cheap)
    try:
        assert cache.get(sized(1), target=H200).sku().kernel == "zz_cheap"
    finally:
        table_module.TABLE.unregister("gather", "zz_cheap")
    again = cache.get(sized(1), target=H200)
    assert again is not plan
    assert again.sku() == plan.sku()


def test_a_kernel_registered_during_a_select_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of that select is not cached among those of the new table."""
    cache, table = tp.PlanCache(), table_module.TABLE
    cheap = replace(table.rows("gather")[0], name="zz_cheap", rank=lambda desc, target: -1.0)

    def registers(*request: Any) -> Any:
        monkeypatch.undo()
        table.register(cheap)
        cache.get(sized(2), target=H200)  # which sees the new table
        return found

    found = select(sized(1), tp.PlanPreference().resolved(), H200)
    monkeypatch.setattr(sys.modules["triplan.facade.plan"], "select", registers)
    try:
        assert cache.get(sized(1), target=H200).sku().kernel != "zz_cheap"
        assert cache.get(sized(1), target=H200).sku().kernel == "zz_cheap"
    finally:
        table.unregister("gather", "zz_cheap")


# --- files ---


def filled() -> tp.PlanCache:
    cache = tp.PlanCache()
    for op in SAMPLES:
        for det in (False, True):
            cache.get(SAMPLES[op], target=H200, preference=tp.PlanPreference(deterministic=det))
    cache.get(SAMPLES["gather"], target=tp.Target.cpu(), tuning=tp.TuningTable.of({"p": {"rows": 1.5}}))
    return cache


def test_save_and_load(tmp_path: Path) -> None:
    cache, path = filled(), tmp_path / "plans.json"
    cache.save(path)
    other = tp.PlanCache()
    report = other.load(path)
    assert report.count("same") == len(cache) == len(other)
    assert report.versions_changed == ()
    assert other.stats().refused == 0
    assert list(other._plans) == list(cache._plans)
    assert [p.sku() for p in other._plans.values()] == [p.sku() for p in cache._plans.values()]
    assert sorted(os.listdir(tmp_path)) == ["plans.json"]  # no temporary file stays


def test_stale_and_foreign_entries_count_as_misses_with_their_reason(tmp_path: Path) -> None:
    cache, path = filled(), tmp_path / "plans.json"
    cache.save(path)
    content = json.loads(path.read_text())
    content["versions"]["triton"] = "0.0"
    content["entries"][0]["sku"]["version"] = 99
    content["entries"][1]["sku"]["kernel"] = "gone"
    content["entries"][2]["descriptor"]["op"] = "unknown_op"
    content["entries"][3]["descriptor"]["surprise"] = 1
    content["entries"][4]["preference"]["kernel"] = "gone"
    del content["entries"][5]["sku"]
    content["entries"][6] = "text"
    path.write_text(json.dumps(content))
    other = tp.PlanCache()
    report = other.load(path)
    assert [e.verdict for e in report.entries[:7]] == ["changed"] * 2 + ["refused"] * 5
    assert all(e.reason for e in report.entries[:7])
    assert "99" in report.entries[0].reason or "version" in report.entries[0].reason
    assert report.versions_changed == (f"triton: 0.0 -> {content_version('triton')}",)
    assert len(other) == len(cache) - 7
    assert other.stats().refused == 7


def content_version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"format": 3, "versions": {}, "entries": []}',
        '{"format": 1, "versions": {}, "entries": 3}',
        '{"format": 2, "versions": {}, "entries": [], "tables": 3}',
    ],
)
def test_a_corrupt_file_raises_and_loses_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plans.json"
    path.write_text(text)
    cache = filled()
    before = list(cache._plans.items())
    with pytest.raises(tp.InvalidProblem, match=r"plans\.json"):
        cache.load(path)
    assert list(cache._plans.items()) == before


def test_a_table_that_plans_share_is_saved_once(tmp_path: Path) -> None:
    """And files of format 1, in which each entry has its own, still load."""
    path, shared = tmp_path / "plans.json", tp.TuningTable.of({f"problem {n}": {"rows": 1.5} for n in range(9)})
    cache, other = tp.PlanCache(), tp.PlanCache()
    for n in range(20):
        cache.get(sized(n + 1), target=H200, tuning=(None, tp.TuningTable(), shared)[n % 3])
    cache.save(path)
    assert path.read_text().count('"problem 7"') == 1
    content = json.loads(path.read_text())
    tables = content.pop("tables")
    for entry in content["entries"]:
        entry["tuning"] = None if entry["tuning"] is None else tables[entry["tuning"]]
    (tmp_path / "old.json").write_text(json.dumps({**content, "format": 1}))
    for name in ("plans.json", "old.json"):
        other.clear()
        assert other.load(tmp_path / name).count("same") == len(cache)
        assert list(other._plans) == list(cache._plans)
    content["entries"][1]["tuning"] = 7
    path.write_text(json.dumps({**content, "tables": tables}))
    assert [e.verdict for e in tp.PlanCache().load(path).entries[:3]] == ["same", "refused", "same"]


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o444])
def test_a_file_keeps_its_mode_and_a_link_its_target(tmp_path: Path, mode: int) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to("real.json")
    before = os.umask(0o027)
    try:
        write_json(link, [1])
    finally:
        os.umask(before)
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    real.chmod(mode)
    write_json(link, [2])
    assert (link.is_symlink(), json.loads(real.read_text())) == (True, [2])
    assert stat.S_IMODE(real.stat().st_mode) == mode


def test_a_killed_save_leaves_the_old_file_and_the_next_one_removes_the_rest(tmp_path: Path) -> None:
    path, large, delay = tmp_path / "plans.json", list(range(50_000)), random.Random(0)
    write_json(path, large)
    left = 0
    for n in range(6):
        writer = multiprocessing.get_context("fork").Process(target=write_json, args=(path, large))
        writer.start()
        while writer.is_alive() and len(os.listdir(tmp_path)) == 1:
            time.sleep(1e-3)
        time.sleep(delay.uniform(0, 0.02 * n))
        writer.kill()
        writer.join()
        left = max(left, len(os.listdir(tmp_path)) - 1)
        assert json.loads(path.read_text()) == large
    assert left  # of one that died
    with storing._temporary(tmp_path) as living:
        write_json(path, [])
        assert sorted(os.listdir(tmp_path)) == sorted(["plans.json", Path(living.name).name])


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_around_the_replacement_is_what_a_save_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    replaces = os.replace

    def interrupted(*args: Any) -> None:
        if when == "after":
            replaces(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_json(tmp_path / "plans.json", 1)
    assert os.listdir(tmp_path) == ["plans.json"] * (when == "after")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, path = filled(), tmp_path / "plans.json"
    cache.save(path)
    before = path.read_bytes()

    def broken(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        cache.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["plans.json"]
