"""The training of examples/gpt.py: it learns as torch does, and gives its bits again, also when it was stopped."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.functional import DEVICES
from samples import in_ranks
from torch import distributed as dist

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.py"
#: Too small to learn much, large enough for two looks at the loss.
SMALL = {"layers": 2, "width": 32, "heads": 2, "length": 16, "vocabulary": 400, "batch": 4, "rate": 1e-2}


@pytest.fixture(scope="module")
def gpt() -> Any:
    return load()


def load() -> Any:
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        return importlib.import_module(EXAMPLE.stem)
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_bytes(EXAMPLE.read_bytes() + "\xa0é\r\n\t".encode() + bytes([255, 0]))
    return path


def arguments(text: Path, out: Path, device: str, *more: str, **changed: Any) -> list[str]:
    sizes = [f"--{name}={value}" for name, value in {**SMALL, **changed}.items()]
    return [*sizes, f"--text={text}", f"--out={out}", f"--device={device}", *more]


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "checkpoint.pt", weights_only=True)["model"]
    return state


def test_triplan_is_deterministic_by_default(gpt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(gpt, "train", lambda *_: found.append(torch.are_deterministic_algorithms_enabled()))
    for given in ([], ["--no-deterministic"], ["--backend=torch"], ["--backend=torch", "--deterministic"]):
        gpt.main([*given, "--device=cpu"])
    assert found == [True, False, False, True]


def test_tokens_are_the_text(gpt: Any, text: Path, tmp_path: Path) -> None:
    raw = text.read_bytes()
    tokens = gpt.Tokens.cached(raw, 300, tmp_path)
    assert tokens.decode(tokens.ids.tolist()) == raw
    assert len(tokens.pieces) == 300 - 256
    assert b" self" in tokens.pieces
    assert len(tokens.ids) < len(raw) * 0.8
    again = gpt.Tokens.cached(raw, 300, tmp_path)
    assert again.pieces == tokens.pieces
    assert torch.equal(again.ids, tokens.ids)
    one, other = (tokens.batch(step, 0, 3, 8) for step in (5, 6))
    assert torch.equal(one, tokens.batch(5, 0, 3, 8))
    assert not torch.equal(one, other)
    assert one.shape == (3, 9)


@pytest.mark.parametrize("device", DEVICES)
def test_a_stopped_training_ends_with_the_same_bits(
    gpt: Any, text: Path, tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # On a GPU, steps 4 to 12 are a graph's; of the resumed one, 10 to 12.
    steps = ("--steps=12", "--every=6")
    assert gpt.main(arguments(text, tmp_path / "whole", device, *steps)) == 0
    assert gpt.main(arguments(text, tmp_path / "parts", device, *steps, "--stop=6")) == 0
    halfway = parameters(tmp_path / "parts")
    assert gpt.main(arguments(text, tmp_path / "parts", device, *steps, "--resume")) == 0
    whole, parts = (parameters(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.equal(p, parts[name]) for name, p in whole.items())
    assert not any(torch.equal(p, halfway[name]) for name, p in whole.items())
    losses = torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)["losses"]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
    out = capsys.readouterr().out
    first, _, last = (line for line in out.splitlines() if line.startswith("parameters after step"))
    assert first == last
    assert "tokens/s" in out
    assert (tmp_path / "whole" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_losses_are_torchs(gpt: Any, text: Path, tmp_path: Path) -> None:
    found = {}
    for backend in ("triplan", "torch"):
        folder = tmp_path / backend
        assert gpt.main(arguments(text, folder, "cpu", "--steps=4", f"--backend={backend}")) == 0
        found[backend] = torch.load(folder / "checkpoint.pt", weights_only=True)
    # Each loss depends on the rounding errors of the steps before it: AdamW divides small gradients by their size.
    torch.testing.assert_close(found["triplan"]["losses"], found["torch"]["losses"], rtol=1e-4, atol=0)
    torch.testing.assert_close(found["triplan"]["norms"], found["torch"]["norms"], rtol=1e-3, atol=0)


def test_muon_learns(gpt: Any, text: Path, tmp_path: Path) -> None:
    assert gpt.main(arguments(text, tmp_path, "cpu", "--steps=6", "--optimizer=muon")) == 0
    losses = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["losses"]
    assert losses[-1] < losses[0] - 0.3


def test_what_cannot_be_resumed_is_refused(
    gpt: Any, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*more: str, **changed: Any) -> str:
        assert gpt.main(arguments(text, tmp_path, "cpu", "--steps=2", *more, **changed)) == 1
        return capsys.readouterr().err

    assert "there is no" in refused("--resume")
    assert gpt.main(arguments(text, tmp_path, "cpu", "--steps=2", "--stop=1")) == 0
    assert "batch 4, now 5" in refused("--resume", batch=5)
    assert "backend triplan, now torch" in refused("--resume", "--backend=torch")
    assert "needs --backend triplan" in refused("--backend=torch", "--optimizer=muon")
    assert "1 steps of 1 are done" in refused("--resume", "--stop=1")
    whole = (tmp_path / "checkpoint.pt").read_bytes()
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    numbered = {"state": dict(enumerate(state["optimizer"].values())), "param_groups": []}
    torch.save({**state, "optimizer": numbered}, tmp_path / "checkpoint.pt")
    assert "an older version" in refused("--resume")
    (tmp_path / "checkpoint.pt").write_bytes(whole)
    assert gpt.main(arguments(text, tmp_path, "cpu", "--steps=2", "--resume")) == 0
    (tmp_path / "checkpoint.pt").write_bytes(b"PK, but not whole")
    assert "is no checkpoint" in refused("--resume")


def test_an_interrupted_save_leaves_the_checkpoint(gpt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, save = tmp_path / "checkpoint.pt", sys.modules["gpt_tokens"].save
    save({"step": 1}, path)

    def full(_: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        save({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_the_model_is_gpt_2(gpt: Any) -> None:
    with torch.device("meta"):
        model = gpt.GPT(gpt.Kit.of("torch"), gpt.Sizes(vocabulary=50257))
    n = 124_439_808  # of the published model
    assert sum(p.numel() for p in model.parameters()) == n
    assert gpt.flops_per_token(model, gpt.Sizes()) == 6 * (n - 1024 * 768) + 12 * 12 * 12 * 64 * 1024


def work(rank: int, store: str, runs: list[list[str]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        gpt, failing = load(), runs.pop()
        assert [gpt.main(run) for run in runs] == [0] * len(runs)
        advance, stderr = gpt.Training.advance, io.StringIO()

        def dying(training: Any) -> Any:
            if rank == 1 and training.step == 3:
                dist.destroy_process_group()
                raise OSError("gone")
            return advance(training)

        gpt.Training.advance = dying
        with contextlib.redirect_stderr(stderr), pytest.raises(OSError if rank else RuntimeError):
            gpt.main(failing)
        assert rank == 1 or "rank 0 of 2 has failed, or another one; --resume" in stderr.getvalue()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def divided(rank: int, store: str, runs: list[list[str]]) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        assert [load().main(run) for run in runs] == [0] * len(runs)
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif("torch.cuda.device_count() < 2")
def test_a_graph_of_divided_layers_gives_the_bits_of_its_calls(text: Path, tmp_path: Path) -> None:
    runs = [
        arguments(text, tmp_path / name, "cuda", "--tp", "--steps=6", "--precision=bf16", *more, layers=1)
        for name, more in (("graph", ()), ("calls", ("--eager",)))
    ]
    in_ranks(divided, (str(tmp_path / "store"), runs), 2)
    graph, calls = (parameters(tmp_path / name) for name in ("graph", "calls"))
    assert all(torch.equal(p, calls[name]) for name, p in graph.items())


def test_two_ranks_learn_as_one_and_resume(
    gpt: Any, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {
        name: arguments(text, tmp_path / name.split()[0], "cpu", "--steps=4", *more, layers=1)
        for name, more in (
            ("whole", ("--fsdp",)),
            ("parts", ("--stop=2",)),
            ("parts again", ("--resume",)),
            ("layers", ("--tp",)),
            ("torch", ("--tp", "--backend=torch")),
            ("rounded", ("--tp", "--precision=bf16")),
            ("muon_parts", ("--optimizer=muon",)),
            ("muon_layers", ("--optimizer=muon", "--tp")),
            ("stopped", ("--tp", "--stop=2")),
            ("stopped again", ("--tp", "--resume")),
            ("few", ("--stop=2",)),
            ("few_layers", ("--tp", "--stop=2")),
            ("more again", ("--resume", "--other-ranks")),
            ("more_layers again", ("--resume", "--other-ranks", "--tp")),
            ("alone", ()),
            ("muon_alone", ("--optimizer=muon",)),
        )
    }
    assert gpt.main(runs.pop("alone")) == gpt.main(runs.pop("muon_alone")) == 0
    for name in ("more", "more_layers"):  # begun by one rank
        assert gpt.main(arguments(text, tmp_path / name, "cpu", "--steps=4", "--stop=2", layers=1)) == 0
    runs["failing"] = arguments(text, tmp_path / "failing", "cpu", "--steps=4", "--every=2", layers=1)
    in_ranks(work, (str(tmp_path / "store"), list(runs.values())), 2)
    kept = torch.load(tmp_path / "failing" / "checkpoint.pt", weights_only=True)
    assert (kept["step"], kept["losses"]) == (2, torch.load(tmp_path / "whole" / "checkpoint.pt")["losses"][:2])
    for whole, parts in (("whole", "parts"), ("layers", "stopped")):
        again = parameters(tmp_path / parts)
        assert all(torch.equal(p, again[name]) for name, p in parameters(tmp_path / whole).items())
    for name in ("few", "few_layers"):  # begun by two
        begun = arguments(text, tmp_path / name, "cpu", "--steps=4", "--resume", layers=1)
        assert gpt.main(begun) == 1
        assert "ranks 2, now 1" in capsys.readouterr().err
        assert gpt.main([*begun, "--other-ranks"]) == 0
    names = ("alone", "whole", "layers", "torch", "few", "few_layers", "more", "more_layers")
    alone, *others = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in names)
    # Sums over the batch have another order: losses as far apart as torch's are from ours.
    for other in others:
        torch.testing.assert_close(other["losses"], alone["losses"], rtol=1e-4, atol=0)
        torch.testing.assert_close(other["norms"], alone["norms"], rtol=1e-3, atol=0)
    alone, *others = (
        torch.load(tmp_path / f"muon_{name}" / "checkpoint.pt", weights_only=True)
        for name in ("alone", "parts", "layers")
    )
    for other in others:  # Newton-Schulz steps are in bf16
        torch.testing.assert_close(other["losses"], alone["losses"], rtol=1e-3, atol=0)
    rounded = torch.load(tmp_path / "rounded" / "checkpoint.pt", weights_only=True)
    whole = torch.load(tmp_path / "whole" / "checkpoint.pt", weights_only=True)
    torch.testing.assert_close(rounded["losses"], whole["losses"], rtol=1e-2, atol=0)
    assert gpt.main(runs["parts again"]) == 1
    assert "ranks 2, now 1" in capsys.readouterr().err
    assert gpt.main([*runs["parts again"], "--tp"]) == 1
    assert "tp False, now True" in capsys.readouterr().err
    assert gpt.main([*runs["layers"], "--backend=torch.compile"]) == 1
    assert "--tp: not with torch.compile" in capsys.readouterr().err
