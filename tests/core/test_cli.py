"""The command line: its output parses, its errors are one line on stderr, its exit codes are as documented."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from typer.testing import CliRunner

import triplan as tp
from triplan.cli.app import app
from triplan.cli.catalog import catalog, examples
from triplan.cli.render import LETTERS, as_markdown

ROOT = Path(__file__).parents[2]
DESC = tp.IndexAddDescriptor(src_shape=(256, 64), add_dim=0, out_dim_size=10, element="f32")


def run(*args: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, list(args), input=stdin)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "desc.json"
    path.write_text(DESC.to_json())
    return str(path)


# --- ops ---


def test_ops_md_is_fresh() -> None:
    assert (ROOT / "OPS.md").read_text() == run("ops", "--markdown").stdout, "stale: run `make ops`"


def test_readme_table_is_fresh() -> None:
    (_, block), *more = (part.split("-->\n", 1) for part in (ROOT / "README.md").read_text().split("<!-- ops: ")[1:])
    assert more == []
    assert block.split("<!-- end of ops -->")[0] == run("ops", "--summary").stdout, "stale: run `make ops`"


def test_readme_table_says_what_the_kernels_guarantee() -> None:
    """Each kernel and element of the table stands in one line of README, with the letters of its own guarantee."""
    said = {}
    ops: list[str] = []
    for line in run("ops", "--summary").stdout.splitlines()[2:]:
        named, kernel, elements, duplicates, letters = (cell.strip() for cell in line.strip("|").split("|"))
        ops = named.split(", ") if named else ops
        for op in ops:
            for element in elements.split(", "):
                assert (op, kernel, element) not in said
                said[op, kernel, element] = (duplicates, letters)
    assert said == {
        (e.op, e.kernel, element): (e.duplicates or "-", " ".join(LETTERS[flag] for flag in e.guarantees) or "none")
        for e in catalog()
        if e.backend == "triton"
        for element in e.elements
    }


def test_ops_json_shows_every_kernel_of_the_table() -> None:
    shown = {(e["op"], e["kernel"]) for e in json.loads(run("ops", "--json").stdout)}
    assert shown == {(op, entry.name) for op in tp.TABLE.ops() for entry in tp.TABLE.rows(op)}


def test_ops_shows_every_element_and_arch_that_select_takes() -> None:
    """For every entry: pinning that kernel selects it on the archs shown, and on no other."""
    targets = {"sm80": tp.Target.sm80(), "sm90a": tp.Target.sm90a(), "cpu": tp.Target.cpu()}
    for e in catalog():
        cls = tp.descriptor_types()[e.op]
        for element in e.elements:
            for name, target in targets.items():
                taken = False
                for desc in examples(cls, op=e.op, element=element):
                    try:
                        plan = tp.plan(desc, preference=tp.PlanPreference(kernel=e.kernel), target=target)
                    except tp.Unsupported:
                        continue
                    taken = True
                    break
                assert taken == (name in e.archs), (e.op, e.kernel, element, name)
                if taken:
                    guarantee = plan.precision_guarantee()
                    held = tuple(flag for flag in LETTERS if getattr(guarantee, flag))
                    assert held == e.guarantees, (e.op, e.kernel, element, name)


def test_ops_table_names_every_op() -> None:
    out = run("ops").stdout
    assert all(op in out for op in tp.TABLE.ops())


@pytest.mark.parametrize("formats", [("--json", "--markdown"), ("--json", "--summary")])
def test_ops_formats_exclude_each_other(formats: tuple[str, str]) -> None:
    result = run("ops", *formats)
    assert result.exit_code == 2
    assert "exclude" in result.stderr


def test_an_op_of_the_users_own_appears_in_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only for this test: others walk every registered descriptor.
    monkeypatch.setattr("triplan.descriptors.base._REGISTRY", dict(tp.descriptor_types()))

    class TopKDescriptor(tp.Descriptor):
        """The k largest of every row."""

        op: Literal["acme::topk"] = "acme::topk"
        element: tp.ElementKind
        shape: tuple[int, ...]
        k: int
        largest: bool = True

        def declare_operands(self) -> tuple[tp.Operand, ...]:
            values = (*self.shape[:-1], self.k)
            return (
                tp.Operand("x", tp.Role.INPUT, self.element, self.shape),
                tp.Operand("values", tp.Role.OUTPUT, self.element, values),
            )

    def smallest_only(desc: Any, target: tp.Target) -> tp.Support:
        return tp.Support.no("the largest are another kernel's") if desc.largest else tp.Support()

    table = tp.KernelTable()
    tp.kernel(
        op="acme::topk",
        name="bitonic",
        elements=("f32",),
        archs=(tp.ArchSku.SM90A,),
        supports=smallest_only,
        guarantee=lambda desc: {"values": tp.PrecisionGuarantee.exact(desc.element)},
        rank=lambda desc, target: 1.0,
        table=table,
    )(lambda desc, target: [])
    (entry,) = catalog(table)
    assert (entry.kernel, entry.elements, entry.archs) == ("bitonic", ("f32",), ("sm90a",))
    text = as_markdown([entry])
    assert "## acme::topk" in text
    assert "`x` (input), `values` (output)" in text


# --- explain ---


def test_explain_prints_what_the_plan_explains(file: str) -> None:
    result = run("explain", file, "--target", "h200")
    plan = tp.plan(DESC, target=tp.Target.preset("h200"), preference=tp.PlanPreference(deterministic=False))
    assert (result.exit_code, result.stdout.strip()) == (0, plan.explain())


def test_explain_reads_standard_input_and_prints_json() -> None:
    result = run("explain", "-", "--target", "a100", "--deterministic", "--json", stdin=DESC.to_json())
    answer = json.loads(result.stdout)
    plan = tp.plan(DESC, target=tp.Target.preset("a100"), preference=tp.PlanPreference(deterministic=True))
    assert tp.KernelSku.model_validate_json(json.dumps(answer["sku"])) == plan.sku()
    assert answer["key"] == plan.key
    assert answer["sku"]["precision_guarantee"]["deterministic"] is True
    assert [c["kernel"] for c in answer["candidates"]] == [c.kernel for c in plan.candidates]


def test_batch_invariant_is_required_when_asked(file: str) -> None:
    result = run("explain", file, "--target", "h200", "--batch-invariant", "--json")
    assert json.loads(result.stdout)["sku"]["precision_guarantee"]["batch_invariant"] is True


def test_order_invariant_is_required_when_asked() -> None:
    desc = DESC.replace(element="i32").to_json()
    result = run("explain", "-", "--target", "h200", "--order-invariant", "--json", stdin=desc)
    assert json.loads(result.stdout)["sku"]["precision_guarantee"]["order_invariant"] is True
    result = run("explain", "-", "--target", "cpu", "--order-invariant", stdin=DESC.to_json())
    assert result.exit_code == 1
    assert "order_invariant" in result.stderr


def test_what_nothing_can_meet_exits_1_with_every_candidate(file: str) -> None:
    # Sums on the CPU make no claim about the batch around a segment.
    result = run("explain", file, "--target", "cpu", "--batch-invariant", "--json")
    refused = json.loads(result.stdout)
    assert (result.exit_code, refused["supported"]) == (1, False)
    assert {c["kernel"] for c in refused["candidates"]} == {entry.name for entry in tp.TABLE.rows("index_add")}
    assert all(c["reason"] and not c["chosen"] for c in refused["candidates"])
    assert "batch_invariant" in result.stderr


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not JSON"),
        ("[1]", "op"),
        ('{"op": "no_such_op"}', "no_such_op"),
        (DESC.to_json().replace('"add_dim":0', '"add_dim":7'), "add_dim = 7"),
        (DESC.to_json().replace('"f32"', '"f31"'), "f31"),
        (DESC.to_json()[:-1] + ', "speed": 11}', "speed"),
    ],
)
def test_bad_descriptors_exit_2_with_one_line(text: str, named: str) -> None:
    result = run("explain", "-", stdin=text)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert named in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [("explain", "no/such/file"), ("explain", "-", "--target", "z80"), ("explain",), ("fly",), ("explain", "."), ()],
    ids=lambda a: " ".join(a) or "none",
)
def test_bad_usage_exits_2_and_prints_nothing_on_stdout(args: tuple[str, ...]) -> None:
    result = run(*args, stdin=DESC.to_json())
    assert result.exit_code == 2
    assert result.stderr or not args


def test_bytes_that_are_no_text_exit_2(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_bytes(b"\xff\xfe{}")
    result = run("explain", str(path))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


# --- compile ---


def test_compile_writes_what_the_manifest_says(file: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    result = run("compile", file, "--target", "h200", "--deterministic", "--out", str(out))
    assert result.exit_code == 0, result.stderr
    manifest = json.loads((out / "manifest.json").read_text())
    plan = tp.plan(DESC, target=tp.Target.preset("h200"), preference=tp.PlanPreference(deterministic=True))
    records = plan.compile()
    assert manifest["key"] == plan.key
    assert manifest["workspace"]["bytes"] == plan.workspace_size()
    assert tp.parse_descriptor(manifest["descriptor"]) == DESC
    assert tp.KernelSku.model_validate_json(json.dumps(manifest["sku"])) == plan.sku()
    assert len(manifest["kernels"]) == len(records) > 0
    for shown, r in zip(manifest["kernels"], records, strict=True):
        assert (shown["name"], shown["arch"]) == (r.name, "sm90a")
        sizes = (shown["registers"], shown["spill_bytes"], shown["shared_bytes"])
        assert sizes == (r.registers, r.spill_bytes, r.shared_bytes)
        for kind in ("ptx", "cubin"):
            data = (out / shown[kind]["file"]).read_bytes()
            assert hashlib.sha256(data).hexdigest() == shown[kind]["sha256"]
            assert len(data) == shown[kind]["bytes"]
        assert re.search(rb"\.target sm_90a", (out / shown["ptx"]["file"]).read_bytes())
        assert (out / shown["cubin"]["file"]).read_bytes()[:4] == b"\x7fELF"
    on_disk = {p.name for p in out.iterdir()}
    assert on_disk == {"manifest.json"} | {k[kind]["file"] for k in manifest["kernels"] for kind in ("ptx", "cubin")}


def test_compiling_for_the_cpu_exits_1_and_writes_nothing(file: str, tmp_path: Path) -> None:
    result = run("compile", file, "--target", "cpu", "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert not (tmp_path / "out").exists()


def test_an_unwritable_folder_exits_2(file: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    result = run("compile", file, "--target", "h200", "--out", str(tmp_path / "taken"))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


# --- the command itself ---


def test_the_installed_command_runs() -> None:
    command = [sys.executable, "-m", "triplan.cli", "explain", "-", "--target", "h100"]
    done = subprocess.run(command, input=DESC.to_json(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "index_add on h100" in done.stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_the_command_names_it(missing: str, tmp_path: Path) -> None:
    # An import of a module that is a plain error stands in for one that is not installed.
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('No module', name='{missing}')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "triplan.cli", "ops"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert missing in done.stderr
    assert "triplan[cli]" in done.stderr
    assert done.stderr.count("\n") == 1
