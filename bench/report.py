"""Results of a bench: one record, shown as a table and written as JSON, CSV and PNG."""

from __future__ import annotations

import csv
import datetime
import json
import platform
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from triplan.facade.cache import versions as plan_versions

Row = dict[str, Any]
#: Ops that have colors of their own in a chart.
MOST_COLORS = 20


@contextmanager
def until_stopped() -> Iterator[list[str]]:
    """A block that Ctrl-C and SIGTERM end, not the bench: what was timed is reported. The list then has a label."""
    labels = list[str]()
    try:
        yield labels
    except KeyboardInterrupt:
        labels.append("STOPPED: cases are missing")


@dataclass(frozen=True)
class Column:
    """One column of the table: a field of its rows, the heading, and the format spec of its values."""

    field: str
    heading: str
    spec: str = ""

    def show(self, value: Any) -> str:
        if value is None or value == "":
            return ""
        return format(value, self.spec) if not isinstance(value, str) else value


@dataclass(frozen=True)
class Chart:
    """One panel of the PNG: bars of ``field`` by case and contestant, with a line at ``mark``.

    With ``over`` it has a dot for each row instead, of ``field`` by ``over``, in a color for each op. With ``roofs`` it
    is a roofline: ``field`` by ``intensity``. ``roofs`` are the slope of the memory roof (its value at an intensity of
    one) and the height of the arithmetic roof.
    """

    field: str
    title: str
    mark: float | None = None
    log: bool = False
    roofs: tuple[float, float] | None = None
    over: str = ""


@dataclass
class Report:
    """The results of a bench.

    Attributes:
        stem: the name of its files, without extension.
        label: what a reader must know before any number.
        settings: how the bench was run.
        rows: the rows of the table, by field. A column of which no row has a value is not shown.
        sections: further lists in the JSON, by name.
    """

    stem: str
    title: str
    label: str
    columns: Sequence[Column]
    charts: Sequence[Chart]
    settings: Row
    rows: list[Row] = field(default_factory=list)
    sections: dict[str, list[Row]] = field(default_factory=dict)

    def show(self, console: Console) -> None:
        table = Table(title=f"{self.title}\n{self.label}".strip())
        columns = [c for c in self.columns if any(c.show(row.get(c.field)) for row in self.rows)]
        for i, c in enumerate(columns):
            numeric = bool(c.spec)
            table.add_column(c.heading, justify="right" if numeric else "left", no_wrap=numeric or i == 0)
        previous: object = None
        for row in self.rows:
            if previous is not None and row["case"] != previous:
                table.add_section()
            cells = [c.show(row.get(c.field)) for c in columns]
            if row["case"] == previous:
                cells[0] = ""
            table.add_row(*cells, style="red" if row.get("error") else "")
            previous = row["case"]
        console.print(table)

    def write(self, folder: Path, command: Sequence[str]) -> list[Path]:
        """Write JSON, CSV and PNG into ``folder`` and return their paths. ``command``: the bench's arguments."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{self.stem}.{kind}" for kind in ("json", "csv", "png")]
        content = {
            "title": self.title,
            "label": self.label,
            "command": command_line(command),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
            "settings": self.settings,
            "rows": self.rows,
            **self.sections,
        }
        # NaN is not JSON: it must fail here, not in a reader.
        paths[0].write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        with paths[1].open("w", newline="") as file:
            names = list(dict.fromkeys(name for row in self.rows for name in row))
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
        self._plot(paths[2])
        return paths

    def _plot(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        cases = list(dict.fromkeys(str(r["case"]) for r in self.rows))
        height = 6.0 if all(c.over for c in self.charts) else 1.5 + 0.45 * max(len(cases), 1)
        figure = plt.figure(figsize=(7 * len(self.charts), height), layout="constrained")
        for n, chart in enumerate(self.charts, start=1):
            axis = figure.add_subplot(1, len(self.charts), n)
            shown = [r for r in self.rows if r.get(chart.field) is not None]
            if chart.over:
                _dots(axis, chart, shown)
            elif chart.roofs is None:
                _bars(axis, chart, shown, cases)
            else:
                _roofline(axis, chart, shown, chart.roofs)
            axis.set_title(chart.title)
            if shown:
                axis.legend(loc="best", fontsize="small")
        figure.suptitle(f"{self.title}\n{self.label}".strip(), fontsize="medium")
        figure.savefig(path, dpi=110)
        plt.close(figure)


def _bars(axis: Any, chart: Chart, rows: Sequence[Row], cases: Sequence[str]) -> None:
    names = list(dict.fromkeys(str(r["contestant"]) for r in rows))
    width = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        own = [r for r in rows if r["contestant"] == name]
        at = [cases.index(str(r["case"])) + (i - (len(names) - 1) / 2) * width for r in own]
        axis.barh(at, [r[chart.field] for r in own], height=width, label=name)
    if chart.mark is not None:
        axis.axvline(chart.mark, color="black", linewidth=0.8, linestyle=":")
    if chart.log:
        axis.set_xscale("log")
    axis.set_yticks(range(len(cases)), cases)
    axis.invert_yaxis()


def _dots(axis: Any, chart: Chart, rows: Sequence[Row]) -> None:
    ops = sorted({str(r["op"]) for r in rows})
    for op in ops if len(ops) <= MOST_COLORS else [f"{len(ops)} ops"]:
        own = [r for r in rows if r["op"] == op or len(ops) > MOST_COLORS]
        axis.scatter([r[chart.over] for r in own], [r[chart.field] for r in own], s=14, label=op)
    if chart.mark is not None:
        axis.axhline(chart.mark, color="black", linewidth=0.8, linestyle=":")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel(chart.over)


def _roofline(axis: Any, chart: Chart, rows: Sequence[Row], roofs: tuple[float, float]) -> None:
    slope, top = roofs
    for name in dict.fromkeys(str(r["contestant"]) for r in rows):
        own = [r for r in rows if r["contestant"] == name]
        axis.scatter([r["intensity"] for r in own], [r[chart.field] for r in own], s=14, label=name)
    reach = sorted({top / slope, *(r["intensity"] for r in rows)})
    axis.plot(reach, [min(slope * x, top) for x in reach], color="black", linewidth=0.8, label="roof")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("operations per byte")


def command_line(arguments: Sequence[str]) -> str:
    """The command that runs the bench again, without ``--out``, a path on one machine."""
    kept, skip = [], False
    for argument in arguments:
        if skip or argument.startswith("--out="):
            skip = False
            continue
        skip = argument == "--out"
        if not skip:
            kept.append(argument)
    return "python -m bench " + shlex.join(kept)


def machine() -> Row:
    """The hardware by model, without names of hosts or users."""
    found: Row = {"cpu": _cpu_model(), "system": f"{platform.system()} {platform.machine()}"}
    if torch.cuda.is_available():
        props = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": props.name,
            "gpus": torch.cuda.device_count(),  # with several, a bound run must ask which one is current
            "sm_count": props.multi_processor_count,
            "memory_gib": round(props.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return found


def versions() -> Row:
    """Versions of all software that the results depend on."""
    return {"python": platform.python_version(), **plan_versions()}


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def slug(text: str) -> str:
    """``text`` as part of a file name."""
    return "-".join("".join(ch if ch.isalnum() else " " for ch in text.lower()).split())


def hardware_slug(device: torch.device) -> str:
    """The GPU's model as part of a file name, or ``cpu``."""
    return slug(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"
