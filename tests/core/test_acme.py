"""The worked examples of the documents, run as their reader would: the files that they show, under pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from triplan.sku import interpreting

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENTS = ("testing.md", "extending.md")
#: Tests that pass without a GPU, and in the interpreter.
PASSED, INTERPRETED = 7 + 5, 1 + 2
#: What is right in the example of docs/testing.md, and what would not be.
MISTAKES = {
    "oracle": ('x["x"].sum(-1)', 'x["x"].abs().sum(-1)'),
    "loop": ("range(0, cols, BLOCK)", "range(0, cols - 1, BLOCK)"),
    "mask": ("mask=col < cols, other=0", "mask=col <= cols, other=0"),
    "scale": ("tl.sum(acc) * scale", "tl.sum(acc)"),
}


def shown_files(document: str) -> dict[str, str]:
    """Each file that is shown: the Python blocks after ``<!-- file: NAME -->``, in order."""
    found: dict[str, str] = {}
    blocks = re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", (DOCS / document).read_text(), re.DOTALL)
    for name, text in blocks:
        found[name] = found.get(name, "") + text
    return found


def run_example(folder: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (folder / name).write_text(text)
    # A process of its own: what the example registers must not reach other tests.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs"]
    env = {**os.environ, "CI": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture
def done(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """The tests of all documents, in one process, as importing takes longest."""
    files: dict[str, str] = {}
    for document in DOCUMENTS:
        shown = shown_files(document)
        assert len(shown) == 2
        assert not shown.keys() & files.keys()
        files |= shown
    return run_example(tmp_path, files)


def test_on_the_reference_and_compiled(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{PASSED} passed" in done.stdout, done.stdout


@pytest.mark.interpret
def test_in_the_interpreter(done: subprocess.CompletedProcess[str]) -> None:
    assert interpreting()
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{INTERPRETED} passed, {PASSED - INTERPRETED} skipped" in done.stdout, done.stdout


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What pytest says of the example with each mistake. One process runs them all, as importing takes longest."""
    shown, files = shown_files("testing.md"), {}
    # Found is enough; shrinking takes longer.
    tests = shown["test_acme_ops.py"].replace("import given, settings", "import Phase, given, settings")
    tests = tests.replace("deadline=None", "deadline=None, phases=[Phase.generate]")
    for name, (right, wrong) in MISTAKES.items():
        assert shown["acme.py"].count(right) == 1
        files[f"{name}.py"] = shown["acme.py"].replace(right, wrong).replace("acme::", f"{name}::")
        files[f"test_{name}.py"] = tests.replace("from acme", f"from {name}").replace("it_keeps_its_word", name)
    done = run_example(tmp_path_factory.mktemp("mistakes"), files)
    assert done.returncode == 1, done.stdout + done.stderr
    _, *sections = re.split(r"^_+ test_(\w+) _+$", done.stdout, flags=re.MULTILINE)
    return dict(zip(sections[::2], sections[1::2], strict=True))


@pytest.mark.interpret
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_example_is_found(failures: dict[str, str], mistake: str) -> None:
    """In the interpreter kernel and oracle are two things, and differ whichever of them is wrong."""
    assert "AssertionError: out[" in failures[mistake]
