"""Running a bench as its command does, and reading what it wrote."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from bench.__main__ import main

PNG = b"\x89PNG\r\n\x1a\n"


def smoke(folder: Path, arguments: list[str]) -> tuple[int, Path, dict[str, object]]:
    code = main([*arguments, "--out", str(folder)])
    (written,) = folder.glob("*.json")
    return code, written, json.loads(written.read_text())


def well_formed(path: Path, content: dict[str, object]) -> list[dict[str, object]]:
    rows = content["rows"]
    assert isinstance(rows, list)
    assert set(content) >= {"command", "date", "machine", "versions", "settings", "label"}
    assert "--out" not in str(content["command"])
    with path.with_suffix(".csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(r["case"], r["contestant"]) for r in table] == [(r["case"], r["contestant"]) for r in rows]
    assert path.with_suffix(".png").read_bytes().startswith(PNG)
    return rows
