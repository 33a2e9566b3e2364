"""The commands. Each parses its input, makes a plan, and prints what the plan says."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from triplan import (
    Candidate,
    InvalidProblem,
    Plan,
    PlanPreference,
    Target,
    TriplanError,
    TuningTable,
    Unsupported,
    Workspace,
    __version__,
    descriptor_types,
    parse_descriptor,
    plan,
)
from triplan.errors import KernelInternal, shown
from triplan.facade.cache import versions

UNSUPPORTED, BAD_INPUT, FAULT, INTERRUPTED = 1, 2, 3, 130

app = typer.Typer(
    help="Plans for GPU tensor ops. Exit codes: 0 done, 1 cannot be met, 2 bad input or usage, 3 internal fault.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

File = Annotated[str, typer.Argument(metavar="FILE|-", help="A descriptor as JSON; - reads standard input.")]
TargetName = Annotated[
    str, typer.Option("--target", help="a100, h100, h200, cpu, or current: this machine's GPU, else its CPU.")
]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="Require the same bits on every run.")]
BatchInvariant = Annotated[
    bool, typer.Option("--batch-invariant", help="Require bits that do not depend on the rest of the batch.")
]
OrderInvariant = Annotated[
    bool, typer.Option("--order-invariant", help="Require bits that do not depend on the order of contributions.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Kernel = Annotated[str | None, typer.Option("--kernel", help="Require this kernel.")]
Exclude = Annotated[list[str] | None, typer.Option("--exclude", help="Exclude a feature, such as tma. Repeatable.")]
MaxWorkspace = Annotated[int | None, typer.Option("--max-workspace", help="Allow at most this many bytes.")]
Tuning = Annotated[Path | None, typer.Option("--tuning", help="A tuning table, as tp.tune saves it.")]
Op = Annotated[str | None, typer.Argument(help="Only this op.")]


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turns what a command raises into a message on stderr and an exit code: there are no tracebacks."""
    try:
        yield
    except typer.Exit:
        raise
    except Unsupported as e:
        _fail(str(e), UNSUPPORTED)
    except TriplanError as e:
        _fail(str(e), FAULT if isinstance(e, KernelInternal) else BAD_INPUT)
    except BrokenPipeError:
        raise  # main reports it
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except OSError as e:
        name = shown(e.filename).strip("'") if e.filename else "standard output"
        _fail(f"{name}: {e.strerror or e}", BAD_INPUT)
    except UnicodeDecodeError as e:
        _fail(f"not UTF-8 text: {e}", BAD_INPUT)
    except RecursionError:
        _fail("the input is nested too deeply", BAD_INPUT)
    except Exception as e:
        last = traceback.extract_tb(e.__traceback__)[-1]
        _fail(f"fault: {type(e).__name__}: {e} ({Path(last.filename).name}:{last.lineno})", FAULT)


def _fail(message: str, code: int) -> None:
    if sys.stderr is not None:  # it may be closed; print would then take standard output
        print(f"triplan: {message}", file=sys.stderr)
    raise typer.Exit(code)


def _console() -> Console:
    # For a pipe, which has no width, rich would assume 80 columns.
    return Console(width=None if sys.stdout.isatty() else 120)


def _target(name: str) -> Target:
    return Target.current() if name == "current" else Target.preset(name)


def _plan(
    file: str,
    target: str,
    tuning: Path | None,
    deterministic: bool,
    batch_invariant: bool,
    order_invariant: bool,
    kernel: str | None,
    exclude: list[str] | None,
    max_workspace: int | None,
) -> Plan[Any, Any]:
    required = PlanPreference(
        # False, not None: None would follow torch's global setting, and the output must depend on the arguments alone.
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        order_invariant=order_invariant,
        kernel=kernel,
        exclude=tuple(exclude or ()),
        max_workspace_bytes=max_workspace,
    )
    if file == "-" and sys.stdin is None:
        raise InvalidProblem("standard input is closed")
    text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    table = None if tuning is None else TuningTable.load(tuning)
    return plan(parse_descriptor(text), preference=required, target=_target(target), tuning=table)


def _known_op(op: str) -> str:
    known = descriptor_types()
    for name in (op, op.lower()):
        if name in known:
            return name
    raise InvalidProblem(f"op {shown(op)}: known are {', '.join(known)}")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"triplan {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _candidates(candidates: tuple[Candidate, ...]) -> list[dict[str, Any]]:
    return [{"kernel": c.kernel, "chosen": c.chosen, "cost_us": c.cost_us, "reason": c.reason} for c in candidates]


@app.command()
def ops(
    op: Op = None,
    as_json: AsJson = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print OPS.md.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Print the Markdown table of README.md.")] = False,
) -> None:
    """List every op, or one with its fields: kernels, elements, architectures and guarantees."""
    from triplan.cli import render
    from triplan.cli.catalog import catalog

    with _errors():
        if as_json + as_markdown + summary > 1:
            raise InvalidProblem("ops: --json, --markdown and --summary exclude each other")
        named = None if op is None else _known_op(op)
        lines = catalog(named=named)
        if as_json:
            print(render.as_json(lines))
        elif as_markdown:
            print(render.as_markdown(lines), end="")
        elif summary:
            print(render.as_summary(lines))
        else:
            if named is not None:
                print(*render.about(named), "", sep="\n")
            _console().print(render.as_table(lines))


@app.command()
def schema(op: Op = None) -> None:
    """Print the JSON Schema of a descriptor, or of all."""
    from triplan.cli.schema import schema as schema_of

    with _errors():
        print(json.dumps(schema_of(None if op is None else _known_op(op)), indent=1))


@app.command()
def explain(
    file: File,
    target: TargetName = "current",
    deterministic: Deterministic = False,
    batch_invariant: BatchInvariant = False,
    order_invariant: OrderInvariant = False,
    kernel: Kernel = None,
    exclude: Exclude = None,
    max_workspace: MaxWorkspace = None,
    tuning: Tuning = None,
    as_json: AsJson = False,
) -> None:
    """Show which kernel a descriptor selects, what it guarantees, and why every other kernel was not chosen."""
    with _errors():
        try:
            found = _plan(
                file,
                target,
                tuning,
                deterministic,
                batch_invariant,
                order_invariant,
                kernel,
                exclude,
                max_workspace,
            )
        except Unsupported as e:
            if as_json:
                refused = {"supported": False, "reason": e.message, "candidates": _candidates(e.candidates)}
                print(json.dumps(refused, indent=1))
            raise
        if not as_json:
            print(found.explain())
            return
        answer = {
            "supported": True,
            "key": found.key,
            "sku": found.sku().model_dump(mode="json"),
            "id": found.sku().id,
            "workspace_bytes": found.workspace_size(),
            "candidates": _candidates(found.candidates),
        }
        print(json.dumps(answer, indent=1))


@app.command("compile")
def compile_(
    file: File,
    out: Annotated[Path, typer.Option("--out", help="Folder for the PTX, the cubins and manifest.json.")],
    target: TargetName = "current",
    deterministic: Deterministic = False,
    batch_invariant: BatchInvariant = False,
    order_invariant: OrderInvariant = False,
    kernel: Kernel = None,
    exclude: Exclude = None,
    max_workspace: MaxWorkspace = None,
    tuning: Tuning = None,
) -> None:
    """Compile a plan's kernels, with or without a GPU; write PTX, cubins and a manifest."""
    from triplan.cli.manifest import launches

    with _errors():
        found = _plan(
            file, target, tuning, deterministic, batch_invariant, order_invariant, kernel, exclude, max_workspace
        )
        records = found.compile()
        out.mkdir(parents=True, exist_ok=True)
        kernels = []
        for position, r in enumerate(records):
            # Numbered: a plan may launch one kernel twice, with other constants.
            stem = f"{position}-{r.name}"
            ptx = r.ptx.encode()
            (out / f"{stem}.ptx").write_bytes(ptx)
            (out / f"{stem}.cubin").write_bytes(r.cubin)
            kernels.append(
                {
                    "name": r.name,
                    "arch": str(r.arch),
                    "ptx": {"file": f"{stem}.ptx", "bytes": len(ptx), "sha256": _sha256(ptx)},
                    "cubin": {"file": f"{stem}.cubin", "bytes": len(r.cubin), "sha256": _sha256(r.cubin)},
                    "registers": r.registers,
                    "spill_bytes": r.spill_bytes,
                    "shared_bytes": r.shared_bytes,
                }
            )
        manifest = {
            "versions": versions(),
            "key": found.key,
            "descriptor": found.descriptor.model_dump(mode="json"),
            "target": found.target.model_dump(mode="json"),
            "sku": found.sku().model_dump(mode="json"),
            "workspace": {"bytes": found.workspace_size(), "alignment": Workspace.ALIGNMENT},
            "kernels": kernels,
            "launches": launches(found),
        }
        (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        print(f"{found.sku().id}: {len(kernels)} kernel(s) written to {out}")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@app.command()
def demo(
    train: Annotated[bool, typer.Option("--train", help="Train a network on Fashion-MNIST instead.")] = False,
    data: Annotated[Path | None, typer.Option(help="The folder of Fashion-MNIST's four IDX files.")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 5,
    batch: Annotated[int | None, typer.Option(min=1, help="Images of a step: 512, on a CPU 64.")] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Train on so many: all, on a CPU 1,000.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    alone: Annotated[bool, typer.Option("--alone", help="Do not train on torch beside.")] = False,
    compiled: Annotated[bool, typer.Option("--compiled", help="Train under torch.compile too.")] = False,
    eager: Annotated[bool, typer.Option("--eager", help="On a GPU: do not capture the step as a CUDA graph.")] = False,
    twice: Annotated[bool, typer.Option("--twice", help="Train again, deterministically, and compare bits.")] = False,
    out: Annotated[Path | None, typer.Option(help="Draw the losses and the confusion matrix there, as PNG.")] = None,
) -> None:
    """Plan, explain and run on real data: sums of scikit-learn's digits by class, with and without determinism.

    With --train, a convolutional network is trained on Fashion-MNIST, beside the same network on torch; the other
    options are for that.
    """
    with _errors():
        if train:
            from triplan.cli import fashion_mnist

            ok = fashion_mnist.run(
                *(_console(), data or fashion_mnist.FOLDER),
                device=device,
                epochs=epochs,
                batch=batch,
                images=images,
                seed=seed,
                alone=alone,
                compiled=compiled,
                eager=eager,
                twice=twice,
                out=out,
            )
        else:
            try:
                import sklearn  # noqa: F401
            except ModuleNotFoundError:
                raise Unsupported("the demo's data comes with scikit-learn: pip install scikit-learn") from None
            from triplan.cli.demo import run

            ok = run(_console())
        if not ok:
            raise typer.Exit(FAULT)
