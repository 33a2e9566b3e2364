"""The command line: its output parses, its errors are one line on stderr, its exit codes are as documented."""

from __future__ import annotations

import ctypes
import hashlib
import io
import itertools
import json
import os
import pydoc
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from samples import SAMPLES
from typer.testing import CliRunner

import triplan as tp
from triplan.cli import main
from triplan.cli.app import app
from triplan.cli.catalog import Line, catalog, examples
from triplan.cli.render import LETTERS, MANY, as_markdown
from triplan.descriptors.meanings import fields
from triplan.testing import args_for

ROOT = Path(__file__).parents[2]
DESC = tp.IndexAddDescriptor(src_shape=(256, 64), add_dim=0, out_dim_size=10, element="f32")


def run(*args: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, list(args), input=stdin)


@cache
def found_lines(named: str | None) -> list[Line]:
    return catalog(named=named)


def lines(*, named: str | None = None) -> list[Line]:
    """The lines of the catalogue. Those of all ops take seconds to find, and are the same for every test."""
    return list(found_lines(named))


@pytest.fixture(autouse=True)
def one_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triplan.cli.catalog.catalog", lines)


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
    """Each kernel and element of the table stands in one line of README, with the letters of its own guarantee.

    Ops of large descriptors are counted, not their elements.
    """
    said: Counter[Any] = Counter()
    ops: list[str] = []
    for line in run("ops", "--summary").stdout.splitlines()[2:]:
        named, kernels, elements, duplicates, letters = (cell.strip() for cell in line.strip("|").split("|"))
        ops = named.split(", ") if named else ops
        for op, kernel, element in itertools.product(ops, kernels.split(", "), elements.split(", ")):
            count, _, counted = op.rpartition(" ops of ")
            said[counted, kernel, element, duplicates, letters] += int(count or 1)
    wanted: Counter[Any] = Counter()
    large: set[Any] = set()
    for e in (e for e in lines() if e.backend == "triton"):
        cls, held = tp.descriptor_types()[e.op], " ".join(LETTERS[flag] for flag in e.guarantees) or "none"
        if len(cls.ops()) > MANY:
            large.add((e.op, (cls.__name__, e.kernel, "those the op takes", e.duplicates or "-", held)))
        else:
            wanted.update((e.op, e.kernel, element, e.duplicates or "-", held) for element in e.elements)
    wanted.update(key for _, key in large)
    assert said == wanted


def test_ops_json_shows_every_kernel_of_the_table() -> None:
    shown = {(e["op"], e["kernel"]) for e in json.loads(run("ops", "--json").stdout)}
    assert shown == {(op, entry.name) for op in tp.TABLE.ops() for entry in tp.TABLE.rows(op)}


def test_ops_shows_every_element_and_arch_that_select_takes() -> None:
    """For every entry: pinning that kernel selects it on the archs shown, and on no other."""
    targets = {"sm80": tp.Target.sm80(), "sm90a": tp.Target.sm90a(), "cpu": tp.Target.cpu()}
    made: dict[tuple[str, str], list[tp.Descriptor]] = {}  # the entries of an op are asked about the same problems
    for e in lines():
        cls = tp.descriptor_types()[e.op]
        for element in e.elements:
            if (e.op, element) not in made:
                made[e.op, element] = list(examples(cls, op=e.op, element=element))
            problems = made[e.op, element]
            for name, target in targets.items():
                taken = False
                for desc in problems:
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


@pytest.mark.parametrize("op", ["group_norm", "group_norm_backward"])
def test_ops_shows_halves_of_a_kernel_for_long_groups(op: str) -> None:
    """A group that several programs of f32 share is one block of f16."""
    assert {e for line in lines() if (line.op, line.kernel) == (op, "split") for e in line.elements} >= {"f16", "bf16"}


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


# --- fields ---


@pytest.mark.parametrize("name", ["gemm", "GEMM"])
def test_ops_of_one_op_shows_its_fields_and_kernels(name: str) -> None:
    out = run("ops", name).stdout
    assert all(f"`{field}`" in out for field in tp.GemmDescriptor.model_fields if field not in ("op", "schema_version"))
    assert "wgmma" in out
    assert "gather" not in out


@pytest.mark.parametrize("op", SAMPLES)
def test_every_field_is_explained(op: str) -> None:
    cls = tp.descriptor_types()[op]
    found = fields(cls)
    assert {f.name for f in found} | {"op", "schema_version"} == set(cls.model_fields)
    assert [f.name for f in found if not f.meaning and f.name != "op"] == []
    # help() was 591 lines long, of which pydantic's names were 450, and what all descriptors inherit 80.
    shown = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    assert {word for f in found for word in f.meaning.split()} <= set(shown.split())
    assert len(shown.splitlines()) <= 50  # a screen


@cache
def validator(*op: str) -> Any:
    """Of what ``triplan schema`` prints: of every op without an argument, which takes a second to check.

    jsonschema's ``oneOf`` collects every error of every alternative; this one leaves each at its first."""
    jsonschema = pytest.importorskip("jsonschema")

    def one_of(self: Any, alternatives: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if (found := sum(self.evolve(schema=one).is_valid(instance) for one in alternatives)) != 1:
            yield jsonschema.ValidationError(f"{found} alternatives hold")

    cls = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"oneOf": one_of})
    cls.check_schema(schema := json.loads(run("schema", *op).stdout))
    return cls(schema)


@pytest.mark.parametrize("op", SAMPLES)
def test_the_schema_takes_what_parse_descriptor_takes(op: str) -> None:
    strided = SAMPLES[op].replace(layouts={SAMPLES[op].operands()[0].name: "strided"})
    good = [json.loads(desc.to_json()) for desc in (SAMPLES[op], strided)]
    wrong = {"op": "no", "speed": 11, "element": "f31", "layouts": {"x": "dense"}, "schema_version": 2}
    bad = [{**good[0], name: value} for name, value in wrong.items()]
    bad.append({name: value for name, value in good[0].items() if name != "op"})
    for found in (validator(), validator(op)):
        assert [found.is_valid(one) for one in good + bad] == [True] * len(good) + [False] * len(bad)


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


def test_bytes_that_are_no_text_exit_2(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_bytes(b"\xff\xfe{}")
    result = run("explain", str(path))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def test_explain_pins_excludes_bounds_and_tunes(tmp_path: Path) -> None:
    desc = tp.GemmDescriptor(m=64, n=64, k=8192, element="f16")
    table = tmp_path / "tuning.json"
    tp.TuningTable.of({tp.TuningTable.problem(desc.key, tp.Target.preset("h200")): {"split_k": 9.0}}).save(table)

    def chosen(*options: str) -> str:
        result = run("explain", "-", "--target", "h200", "--json", *options, stdin=desc.to_json())
        return str(json.loads(result.stdout)["sku"]["kernel"])

    assert chosen("--kernel", "tiles_invariant") == "tiles_invariant"
    assert chosen("--tuning", str(table)) == "split_k" != chosen("--max-workspace", "0")
    assert "tma" in {f for e in tp.TABLE.rows("gemm") if e.name == "wgmma" for f in e.features}
    assert run("explain", "-", "--kernel", "wgmma", "--exclude", "tma", stdin=desc.to_json()).exit_code == 1


# --- exit codes ---

GOOD = json.loads(DESC.to_json())
VALUES: list[Any] = [None, -1, 2**62, 10**30, 1.5, "x", [], {}, True, [[]], float("nan"), "\ud800"]
BAD_TEXTS = [
    "",
    "{",
    "[1]",
    "null",
    "1",
    '"x"',
    "nan",
    "{}",
    '{"op": 1}',
    '{"op": null}',
    "[" * 10**5,
    "9" * 5000,
    "\0",
]
BAD_TEXTS += [json.dumps({**GOOD, name: v}) for name in ("src_shape", "out_dim_size", "element", "op") for v in VALUES]
BAD_TEXTS += [json.dumps({k: v for k, v in GOOD.items() if k != name}) for name in ("op", "src_shape", "element")]
BAD_TEXTS += [
    json.dumps({**GOOD, "layouts": v}) for v in ({"src": 1}, {"none": "strided"}, [1], {"src": {"kind": "x"}})
]
BAD_USAGE = [
    *(["explain"], ["explain", "-", "-"], ["explain", "."], ["explain", "no/such"], ["explain", "\udcff"], ["fly"], []),
    *(
        ["ops", "no"],
        ["schema", "no"],
        ["--fly"],
        ["ops", "--json", "--summary"],
        ["compile", "-"],
        ["schema", "a", "b"],
    ),
    *(
        ["explain", "-", *rest]
        for rest in (["--target", "z80"], ["--target", ""], ["--target", "cuda:9"], ["--kernel"])
    ),
    *(["explain", "-", "--max-workspace", v] for v in ("-1", "x", "1.5", "9" * 5000)),
    *(["explain", "-", "--tuning", v] for v in ("no/such", ".", str(ROOT / "README.md"), os.devnull)),
    *(["compile", "-", "--target", "h200", "--out", v] for v in (os.devnull, "/proc/no", str(ROOT / "README.md"))),
]
UNMET = [
    ["--kernel", "no"],
    ["--batch-invariant"],
    ["--order-invariant"],
    ["--target", "h200", "--kernel", "reference"],
]
INVOCATIONS = [
    *((["explain", "-"], text, 2) for text in BAD_TEXTS),
    *((usage, DESC.to_json(), 2) for usage in BAD_USAGE),
    *((["explain", "-", "--target", "cpu", *rest], DESC.to_json(), 1) for rest in UNMET),
]


def test_there_are_a_hundred_bad_invocations() -> None:
    assert len(INVOCATIONS) >= 100


@pytest.mark.parametrize(("arguments", "stdin", "code"), INVOCATIONS, ids=range(len(INVOCATIONS)))
def test_bad_invocations_have_the_exit_code_of_the_readme(
    arguments: list[str],
    stdin: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    assert main(arguments) == code
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    assert len(err) < 4000
    assert err or not arguments


def forked(arguments: list[str], **files: Any) -> tuple[int, str]:
    """The exit code and stderr of the command in a fork whose ``stdin`` or ``stdout`` is another, or closed (None)."""
    numbers = {"stdin": 0, "stdout": 1}
    with tempfile.TemporaryFile("w+") as err:
        if (process := os.fork()) == 0:
            try:
                os.dup2(err.fileno(), 2)
                sys.stderr = open(2, "w", encoding="ascii", closefd=False)  # noqa: SIM115
                for name, file in files.items():
                    if file is not None:
                        os.dup2(file, numbers[name])
                        file = open(numbers[name], "r" if name == "stdin" else "w", encoding="ascii")  # noqa: SIM115
                    setattr(sys, name, file)
                code = main(arguments)
                if sys.stdout is not None:
                    sys.stdout.flush()  # as Python does when it exits
                sys.stderr.flush()
                os._exit(code)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(99)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        err.seek(0)
        return code, err.read()


def test_streams_that_fail_have_an_exit_code_too(tmp_path: Path) -> None:
    full, (reader, writer) = os.open("/dev/full", os.O_WRONLY), os.pipe()
    os.close(reader)
    assert forked(["ops", "gemm"], stdout=full) == (2, "triplan: standard output: No space left on device\n")
    assert forked(["ops", "gemm"], stdout=writer) == (141, "")
    assert forked(["ops", "gemm"], stdout=None) == (2, "triplan: standard output: closed\n")
    assert forked(["explain", "-"], stdin=None) == (2, "triplan: standard input is closed\n")
    with (tmp_path / "out").open("w+") as file:
        assert forked(["ops", "gemm"], stdout=file.fileno()) == (0, "")  # an ASCII stream: the table has no box then
        assert "wgmma" in (tmp_path / "out").read_text()
    assert forked(["explain", "/no/\N{GREEK SMALL LETTER ALPHA}"]) == (
        *(2, "triplan: /no/\\u03b1: No such file or directory\n"),
    )
    os.close(full)
    os.close(writer)


@pytest.mark.parametrize(
    ("raised", "code", "said"), [(KeyboardInterrupt(), 130, ""), (ZeroDivisionError("x"), 3, "fault: ZeroDivision")]
)
def test_interrupts_and_faults_print_no_traceback(
    raised: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    file: str,
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise raised

    monkeypatch.setattr("triplan.cli.app.plan", fails)
    assert main(["explain", file]) == code
    err = capfd.readouterr().err
    assert said in err
    assert err.count("\n") == bool(said)


def test_the_version() -> None:
    assert run("--version").stdout == f"triplan {tp.__version__}\n"


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


#: Problems with a workspace and several launches, with scalars, with tensor maps of a transposed operand, and of every
#: second row and column.
COLUMNS = tp.Layout.strided(unit_axis=0, alignment=16, stride_multiple=8)
CHANNELS_LAST = tp.Layout.strided(unit_axis=1, alignment=16, stride_multiple=8)
FILTERED = tp.Conv2dDescriptor(
    batch=2, in_channels=24, height=9, width=12, out_channels=72, kernel=(3, 2), stride=(2, 2), element="f16"
)
#: And of the pixels of all images in one row.
PIXELS = tp.Conv2dDescriptor(batch=3, in_channels=64, height=5, width=7, out_channels=72, kernel=(1, 1), element="f16")
PIXELS_LAST = tp.Layout.strided(alignment=16, stride_multiple=8, order=(0, 2, 3, 1))
PIXELS = PIXELS.replace(layouts=dict.fromkeys(("x", "out"), PIXELS_LAST))
LAUNCHED = {
    "index_add": (DESC, "sorted_sum"),
    "split_k": (tp.GemmDescriptor(m=64, n=64, k=4096, element="f16"), "split_k"),
    "wgmma": (tp.GemmDescriptor(m=128, n=64, k=96, element="bf16", layouts={"a": COLUMNS}), "wgmma"),
    "conv2d": (FILTERED.replace(layouts=dict.fromkeys(("x", "weight", "out"), CHANNELS_LAST)), "wgmma"),
    "converted_wgmma": (FILTERED, "converted_wgmma"),
    "pixels": (PIXELS, "wgmma"),
}
PTX_TYPES = {"i32": "u32", "i64": "u64", "fp32": "f32", "fp64": "f64", "tensor_map": "align"}


def compiled(case: str, target: str, folder: Path) -> dict[str, Any]:
    """The manifest of a case."""
    desc, kernel = LAUNCHED[case]
    arguments = ("compile", "-", "--target", target, "--kernel", kernel, "--out", str(folder))
    result = run(*arguments, stdin=desc.to_json())
    assert result.exit_code == 0, result.stderr
    return dict(json.loads((folder / "manifest.json").read_text()))


@pytest.mark.parametrize("case", LAUNCHED)
def test_the_manifest_lists_the_parameters_of_the_ptx(case: str, tmp_path: Path) -> None:
    manifest = compiled(case, "h200", tmp_path)
    for launch in manifest["launches"]:
        ptx = (tmp_path / manifest["kernels"][launch["kernel"]]["ptx"]["file"]).read_text()
        head = ptx[ptx.index(".entry") :].split("{")[0]
        types = ["u64" if a["type"][0] == "*" else PTX_TYPES[a["type"]] for a in launch["arguments"]]
        assert re.findall(r"\.param \.(\w+)", head) == types
        assert f".reqntid {launch['block'][0]}\n" in head


@pytest.mark.gpu
@pytest.mark.parametrize("case", LAUNCHED)
def test_a_launch_from_the_manifest_alone(case: str, tmp_path: Path) -> None:
    """By the driver, which knows nothing of Triton or triplan; the plan itself gives the same bits."""
    manifest = compiled(case, "current", tmp_path)
    desc = tp.parse_descriptor(manifest["descriptor"])
    args, expected = (args_for(desc, "cuda", 0).args for _ in range(2))
    plan = tp.plan(desc, preference=tp.PlanPreference(kernel=LAUNCHED[case][1], deterministic=False))
    plan.run(expected, tp.Workspace.allocate(plan, "cuda"))
    launch_manifest(manifest, tmp_path, args, torch.empty(manifest["workspace"]["bytes"] + 2, dtype=torch.uint8).cuda())
    for o in desc.operands():
        if o.is_written:
            got, wanted = getattr(args, o.name), getattr(expected, o.name)
            torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def launch_manifest(manifest: dict[str, Any], folder: Path, args: Any, workspace: torch.Tensor) -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    c_types = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float, "fp64": ctypes.c_double}

    def check(code: int) -> None:
        assert code == 0, f"CUDA error {code}"

    def positions(a: dict[str, Any]) -> slice:
        return slice(a.get("first", 0), a.get("stop"), a.get("step", 1))

    def tensor_map(a: dict[str, Any], x: torch.Tensor | None) -> Any:
        if "offset" in a:
            start = workspace.view(torch.float16) if x is None else x
            x = start.as_strided(a["shape"], a["strides"], start.storage_offset() + a["offset"] // 2)
            a = {**a, "axes": list(range(len(a["shape"])))}
        axes, rank = a["axes"][::-1], len(a["axes"])  # the driver wants the innermost first
        found = (ctypes.c_char * 192)()
        offset = -ctypes.addressof(found) % 64
        aligned = (ctypes.c_char * 128).from_buffer(found, offset)
        sizes, ones = ctypes.c_uint64 * rank, (ctypes.c_uint32 * rank)(*[1] * rank)
        steps = a.get("steps", [{}] * rank)[::-1]
        x = x.permute(axes)[tuple(map(positions, steps))]
        strides = sizes(*(stride * x.element_size() for stride in x.stride()[1:]))
        box = (ctypes.c_uint32 * rank)(*a["box"][::-1])
        where = ctypes.c_void_p(x.data_ptr())
        shape = sizes(*x.shape)
        what = (a["data_type"], rank, where, shape, strides, box, ones, 0, a["swizzle"], 2, 0)
        check(cuda.cuTensorMapEncodeTiled(aligned, *what))
        return aligned

    def value(a: dict[str, Any]) -> Any:
        x = getattr(args, a.get("operand", ""), None)
        if a["from"] == "tensor_map":
            return tensor_map(a, x)
        if a["type"][0] == "*":
            assert not a.get("bytes_per_program")
            addresses = {"operand": lambda: (x if "item" not in a else x[a["item"]]).data_ptr(), "scratch": lambda: 0}
            addresses |= {"workspace": lambda: workspace.data_ptr() + a["offset"], "counter": counter.data_ptr}
            return ctypes.c_uint64(addresses[a["from"]]())
        got = {
            "value": lambda: a["value"],
            "scalar": lambda: a["default"] if x is None else x,
            "stride": lambda: x.stride(a["axis"]) * a.get("step", 1),
            "extent": lambda: len(range(x.shape[a["axis"]])[positions(a)]),
        }[a["from"]]()
        return c_types[a["type"]](got)

    for launch in manifest["launches"]:
        kernel = manifest["kernels"][launch["kernel"]]
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        check(cuda.cuModuleLoad(ctypes.byref(module), str(folder / kernel["cubin"]["file"]).encode()))
        check(cuda.cuModuleGetFunction(ctypes.byref(function), module, kernel["name"].encode()))
        if launch["shared_bytes"] > 48 << 10:
            check(cuda.cuFuncSetAttribute(function, 8, launch["shared_bytes"]))  # MAX_DYNAMIC_SHARED_SIZE_BYTES
        values = [value(a) for a in launch["arguments"]]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        shape = (*launch["grid"], *launch["block"], launch["shared_bytes"])
        check(cuda.cuLaunchKernel(function, *shape, None, pointers, None))
        torch.cuda.synchronize()
        check(cuda.cuModuleUnload(module))


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


@pytest.mark.parametrize("command", ["-m triplan", "-m triplan.cli", "bin/triplan", "-c import\ttriplan"])
def test_an_interrupt_while_torch_is_imported_prints_no_traceback(command: str, tmp_path: Path) -> None:
    """(Except in a program of the user's.)"""
    (tmp_path / "torch.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/triplan").write_text("from triplan.cli import main")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    line = [sys.executable, *command.split(" ")]
    # A shell's background job ignores interrupts, and so would its children.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    done = subprocess.run(line, capture_output=True, text=True, env=environment, cwd=tmp_path, preexec_fn=heed)
    assert done.returncode == -signal.SIGINT
    assert done.stderr[-18:] == ("KeyboardInterrupt\n" if "-c" in command else "")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_the_command_names_it(missing: str, tmp_path: Path) -> None:
    # An import of a module that is a plain error stands in for one that is not installed.
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('No module', name='{missing}')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "triplan.cli", "ops", "gather"]  # those of all ops take seconds
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert missing in done.stderr
    assert "triplan[cli]" in done.stderr
    assert done.stderr.count("\n") == 1
