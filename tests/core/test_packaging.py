"""What users install: the wheel holds every module, and the core needs no extra."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = ("typer", "rich", "matplotlib", "hypothesis", "numpy", "sklearn", "pytest")

RUN_A_PLAN = """
import json, torch, triplan as tp
from triplan.facade.cache import versions
desc = tp.GatherDescriptor(out_shape=(4,), gather_dim=0, src_dim_size=9, element="f32")
plan, out = tp.plan(desc, target=tp.Target.cpu()), torch.empty(4)
plan.run(tp.GatherArgs(src=torch.arange(9.0), index=torch.tensor([8, 0, 3, 3]), out=out))
compiled = tp.plan(desc, target=tp.Target.sm90a()).compile()
print(json.dumps({"out": out.tolist(), "file": tp.__file__, "cubin": len(compiled[0].cubin), "versions": versions()}))
"""

IMPORT_EVERYTHING = """
import importlib, json, pkgutil, triplan
names = [m.name for m in pkgutil.walk_packages(triplan.__path__, "triplan.")]
for name in names:
    importlib.import_module(name)
print(json.dumps(sorted(names)))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "Missing dependencies" in done.stdout + done.stderr and (Path(sys.prefix) / "offline").exists():
        pytest.skip("set-up found no network, and what hatchling needs is not installed")
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new venv that holds the wheel; torch and the rest are lent by the one that runs the tests."""
    venv = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*command, "--disable-pip-version-check", str(wheel)], check=True)
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", query], capture_output=True, text=True, check=True).stdout.strip())
    # Folders named in a .pth file are searched, but .pth files within them (an editable install's) are not read.
    lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lent |= {p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")}
    (site / "lent.pth").write_text("".join(f"{p}\n" for p in sorted(lent)))
    return python


def run(python: Path, code: str, cwd: Path) -> Any:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def modules() -> list[str]:
    paths = [p.relative_to(ROOT).with_suffix("") for p in (ROOT / "triplan").rglob("*.py")]
    names = (".".join(p.parts).removesuffix(".__init__") for p in paths)
    return sorted(n for n in names if n != "triplan")


def test_wheel_holds_every_module_and_the_typing_marker(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = {name.replace(".", "/") for name in modules()} - {
        n.removesuffix(".py").removesuffix("/__init__") for n in names
    }
    assert not missing
    assert "triplan/py.typed" in names
    assert any(n.endswith("LICENSE") for n in names)
    assert not any(n.startswith(("tests/", "bench/")) for n in names)


def test_installed_wheel_imports_every_module(installed: Path, tmp_path: Path) -> None:
    assert run(installed, IMPORT_EVERYTHING, tmp_path) == modules()


def test_installed_wheel_runs_and_compiles_a_plan_without_extras(installed: Path, tmp_path: Path) -> None:
    """Every extra, and numpy, which torch can do without, is hidden."""
    hide = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
"""
    result = run(installed, hide + RUN_A_PLAN, tmp_path)
    assert Path(result["file"]).is_relative_to(installed.parents[1])
    assert result["out"] == [8.0, 0.0, 3.0, 3.0]
    assert result["cubin"] > 0


def test_installed_command_exists(installed: Path, tmp_path: Path) -> None:
    command = [installed.parent / "triplan", "ops", "gather", "--json"]  # those of all ops take seconds
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {e["op"] for e in json.loads(done.stdout)} == {"gather"}
