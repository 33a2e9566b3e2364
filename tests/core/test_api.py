"""The public API is the one on record: names, kinds, signatures, fields and methods."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api", ROOT / "tools" / "api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_public_api_is_the_recorded_one(tool: ModuleType) -> None:
    recorded = (ROOT / "tests" / "core" / "api.txt").read_text().splitlines()
    assert tool.api().splitlines() == recorded, "the public API changed; if that is meant, run make api"


def test_all_lists_every_public_name(tool: ModuleType) -> None:
    for package in map(importlib.import_module, tool.PACKAGES):
        assert sorted(package.__all__) == tool.public_names(package), package.__name__
