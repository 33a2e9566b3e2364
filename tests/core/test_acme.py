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
#: Tests that pass without a GPU, and in the interpreter.
PASSED = {"testing.md": (7, 1), "extending.md": (5, 2)}


def shown_files(document: str) -> dict[str, str]:
    """Each file that is shown: the Python blocks after ``<!-- file: NAME -->``, in order."""
    found: dict[str, str] = {}
    for name, text in re.findall(
        r"<!-- file: (\S+) -->\n```python\n(.*?)```", (DOCS / document).read_text(), re.DOTALL
    ):
        found[name] = found.get(name, "") + text
    return found


def run_example(tmp_path: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (test,) = (name for name in files if name.startswith("test_"))
    # A process of its own: what the example registers must not reach other tests.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", test]
    env = {**os.environ, "CI": "1"}
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("document", PASSED)
def test_on_the_reference_and_compiled(tmp_path: Path, document: str) -> None:
    done = run_example(tmp_path, shown_files(document))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{PASSED[document][0]} passed" in done.stdout, done.stdout


@pytest.mark.interpret
@pytest.mark.parametrize("document", PASSED)
def test_in_the_interpreter(tmp_path: Path, document: str) -> None:
    assert interpreting()
    done = run_example(tmp_path, shown_files(document))
    assert done.returncode == 0, done.stdout + done.stderr
    alone, interpreted = PASSED[document]
    assert f"{interpreted} passed, {alone - interpreted} skipped" in done.stdout, done.stdout


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('x["x"].sum(-1)', 'x["x"].abs().sum(-1)'),
        ("range(0, cols, BLOCK)", "range(0, cols - 1, BLOCK)"),
        ("mask=col < cols, other=0", "mask=col <= cols, other=0"),
        ("tl.sum(acc) * scale", "tl.sum(acc)"),
    ],
)
def test_a_mistake_in_the_example_is_found(tmp_path: Path, right: str, wrong: str) -> None:
    """In the interpreter kernel and oracle are two things, and differ whichever of them is wrong."""
    files = shown_files("testing.md")
    assert files["acme.py"].count(right) == 1
    files["acme.py"] = files["acme.py"].replace(right, wrong)
    # Found is enough; shrinking takes longer.
    tests = files["test_acme_ops.py"].replace("import given, settings", "import Phase, given, settings")
    files["test_acme_ops.py"] = tests.replace("deadline=None", "deadline=None, phases=[Phase.generate]")
    done = run_example(tmp_path, files)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "AssertionError: out[" in done.stdout, done.stdout
