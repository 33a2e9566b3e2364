"""What the documents show is true: their code runs, and the commands and files that they name exist."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import triplan as tp

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")),
]


def run_alone(block: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """The names that a block of code leaves, run without those of other blocks, and what it printed."""
    names: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), names)
    return names, capsys.readouterr().out


def test_each_code_block_of_readme_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    planned, compiled, functional = (run_alone(block, capsys) for block in blocks)

    names, printed = planned
    assert "deterministic=True" in printed
    assert "candidates" in printed
    index, src, out = names["index"], names["src"].double(), names["out"].double()
    wanted, terms = (torch.zeros_like(out).index_add_(0, index, values) for values in (src, src.abs()))
    t = names["plan"].precision_guarantee("out").tolerance
    assert ((out - wanted).abs() <= t.rtol * wanted.abs() + t.ctol * terms + t.underflow).all()

    assert "rows_kernel" in compiled[1] or "looped_kernel" in compiled[1]

    x = functional[0]["x"]
    sums = x.grad.sum(1)  # softmax less one-hot: the gradient of each row sums to 0
    assert x.grad.any()
    torch.testing.assert_close(sums, torch.zeros_like(sums), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("document", "least"),
    [
        ("docs/guarantees.md", 5),
        ("docs/accumulation.md", 3),
        ("docs/models.md", 6),
        ("docs/optim.md", 4),
        ("docs/reductions.md", 2),
        ("docs/sampling.md", 2),
        ("docs/sorting.md", 3),
        ("docs/tuning.md", 3),
    ],
)
def test_the_code_of_a_document_runs(document: str, least: int) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    assert len(blocks) >= least
    assert all("assert " in block or "verify(" in block for block in blocks)
    names: dict[str, object] = {}
    try:
        for block in blocks:
            exec(compile(block, document, "exec"), names)
    finally:
        torch.use_deterministic_algorithms(False)


def test_every_word_of_a_guarantee_is_explained() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "docs/guarantees.md").read_text(), re.MULTILINE)
    explained = {word for heading in headings for word in heading.split(", ")}
    assert set(tp.PrecisionGuarantee.model_fields) <= explained


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_named_paths_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    paths = re.findall(r"`((?:triplan|tests|tools|bench|docs|\.ci)/[\w./]*)`", text)
    for path in paths:
        assert (ROOT / path.replace("FAMILY", "norms")).exists(), path
    for path in links:
        assert ((ROOT / document).parent / path).exists(), path


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_make_targets_exist(document: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:`|^    )make ([a-z-]+)", (ROOT / document).read_text(), re.MULTILINE)
    assert set(named) <= targets


def test_contributing_names_every_room() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = {p.name for p in (ROOT / "triplan").iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert rooms
    assert all(f"    {room}/" in text for room in rooms)


#: Rows of the table in docs/accumulation.md: what the bench calls the case.
ACCUMULATION = {
    "index_add, 262,144 x 1,024 f16 into 131,072 rows": "index_add (131072, 1024)/262144 fp16",
    "the same, f32": "index_add (131072, 1024)/262144 fp32",
    "embedding_backward, 65,536 Zipf tokens, 50,304 x 1,024 bf16": "embedding_backward (50304, 1024)/65536 bf16 zipf",
    "index_add, 65,536 x 1,024 f16, all into one row": "index_add (16384, 1024)/65536 fp16 one",
    "scatter_add, one per element, 262,144 x 1,024 f16 into 131,072 rows": "scatter_add (131072, 1024)/262144 fp16",
    "the same, f16, equal indices along each row": "scatter_add (131072, 1024)/262144 fp16 rowwise",
    "the same, f32, equal indices along each row": "scatter_add (131072, 1024)/262144 fp32 rowwise",
}


def test_figures_are_those_of_the_committed_run() -> None:
    with (ROOT / "bench/results/determinism-nvidia-h200.csv").open() as file:
        measured = {(r["case"], r["contestant"]): r["device_us"] for r in csv.DictReader(file)}
    lines = [line.strip("| ").split(" | ") for line in (ROOT / "docs/accumulation.md").read_text().splitlines()]
    shown = {cells[0]: cells[1:] for cells in lines if cells[0] in ACCUMULATION}
    assert set(shown) == set(ACCUMULATION)
    contestants = ("torch", "torch deterministic", "triplan deterministic", "triplan prepared")
    for name, cells in shown.items():
        found = [measured[ACCUMULATION[name], contestant] for contestant in contestants]
        assert cells == [f"{round(float(us)):,}" if us else "-" for us in found], name
