"""Running a bench as its command does, and reading what it wrote."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from bench.__main__ import main
from bench.report import Row

PNG = b"\x89PNG\r\n\x1a\n"


def smoke(folder: Path, arguments: list[str], name: str, code: int = 0) -> tuple[list[Row], dict[str, Any]]:
    """The rows and all else of ``name``.json, which a run that exits with ``code`` writes beside a table and a plot."""
    assert main([*arguments, "--out", str(folder)]) == code
    (path,) = folder.glob("*.json")
    content = json.loads(path.read_text())
    rows = content["rows"]
    assert code or not [r["error"] for r in rows if "error" in r]
    assert path.name == f"{name}.json"
    assert set(content) >= {"command", "date", "machine", "versions", "settings", "label"}
    assert "--out" not in content["command"]
    with path.with_suffix(".csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(r["case"], r["contestant"]) for r in table] == [(r["case"], r["contestant"]) for r in rows]
    assert path.with_suffix(".png").read_bytes().startswith(PNG)
    return rows, content
