"""Type checkers accept what users write and refuse what would fail: tests/typing/downstream.py."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_origin

import pytest
from samples import SAMPLES

import triplan as tp
from triplan.descriptors import descriptor_types
from triplan.descriptors.base import PlannedBy
from triplan.facade.plan import Request
from triplan.sku import Requirements

ROOT = Path(__file__).parents[2]
DOWNSTREAM = ROOT / "tests" / "typing" / "downstream.py"
PLAIN = ["mypy", f"--cache-dir={ROOT / '.mypy_cache' / 'plain'}"]
#: The first shares the cache of ``make lint``.
CHECKERS = {"mypy with pydantic's plugin": ["mypy"], "mypy": PLAIN, "pyright": ["basedpyright", "--level=error"]}
#: mypy without pydantic's plugin. It takes for ``Any`` what triplan's types do not need, which halves its time.
UNREAD = ("torch._dynamo", "torch._inductor", "torch.distributed", "torch.fx", "sympy", "numpy")
SETTINGS = f"[mypy]\nstrict = True\n[mypy-{','.join(f'{name}.*' for name in UNREAD)}]\nfollow_imports = skip\n"


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_type_checker_refuses_the_marked_lines_alone(checker: str, tmp_path: Path) -> None:
    module, *options = CHECKERS[checker]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    config = tmp_path / "pyrightconfig.json"
    config.write_text(
        json.dumps({"include": [str(DOWNSTREAM)], "extraPaths": [str(ROOT)], "typeCheckingMode": "strict"})
    )
    plain = tmp_path / "mypy.ini"
    plain.write_text(SETTINGS)
    files = {
        "mypy": [f"--config-file={plain}", str(DOWNSTREAM)],
        "pyright": [f"--project={config}", f"--pythonpath={sys.executable}"],
    }.get(checker, [str(DOWNSTREAM)])
    command = [sys.executable, "-m", module, *options, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = {int(line) for line in re.findall(r"downstream\.py:(\d+)(?::\d+ -|:) error", done.stdout)}
    lines = enumerate(DOWNSTREAM.read_text().splitlines(), 1)
    assert found == {n for n, line in lines if line.endswith("# refused")}, done.stdout + done.stderr


@pytest.mark.parametrize("op", sorted(SAMPLES))
def test_a_descriptor_names_its_plan_to_type_checkers(op: str) -> None:
    (named,) = [b.__args__[0] for b in descriptor_types()[op].__orig_bases__ if get_origin(b) is PlannedBy]
    assert named.__forward_arg__ == tp.plan_type(op).__name__


def test_a_request_names_every_requirement() -> None:
    assert set(Requirements.__annotations__) == set(tp.PlanPreference.model_fields)
    assert set(Request.__annotations__) == {*tp.PlanPreference.model_fields, "preference", "target", "tuning"}
