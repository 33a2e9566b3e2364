"""Shows that a refactoring changes no plan: record the plans before it, compare them after it.

``record FILE`` builds problems of every op. For each problem, target, preference and kernel it writes what planning
decides: the canonical key, the SKU with its numerics id, the guarantee of each output, the workspace, and every launch
(kernel, grid, arguments, constants, warps, stages). With ``--ptx N`` it also compiles up to N binaries of each kernel
and architecture, and writes a digest of their PTX.

``compare FILE`` plans the problems of FILE again, lists what differs, and exits with 1 if anything does. A GPU is not
needed. Functions and kernels are recorded by name, without their module: moving one is no difference, renaming one is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings

import triplan as tp
from triplan.backends.runtime.compile import compile_source
from triplan.descriptors import descriptor_types
from triplan.testing import descriptors

TARGETS = {"sm80": tp.Target.sm80(), "sm90a": tp.Target.sm90a()}
#: (rows, columns) of problems whose tiles, 64-bit offsets and costs no small problem reaches.
LARGE = ((4096, 4096), (8192, 8192), (65536, 256), (16, 262144), (4000, 3001), (8192, 50257), (1 << 21, 1025))
ELEMENTS = ("f16", "bf16", "f32", "f64")
#: Differences that are printed.
SHOWN = 40


def drawn(op: str, count: int) -> list[tp.Descriptor]:
    """``count`` small descriptors of ``op``; the same for the same version of hypothesis."""
    found: list[tp.Descriptor] = []

    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(descriptors(descriptor_types()[op], 1 << 22))
    def collect(desc: tp.Descriptor) -> None:
        found.append(desc)

    collect()
    return found


def large(op: str) -> Iterator[tp.Descriptor]:
    """Problems of ``op`` of the sizes ``LARGE``, in each element; none where shapes are not rows and columns."""
    cls = descriptor_types()[op]
    fields = cls.model_fields
    for element in () if op == "expression" else ELEMENTS:  # the named ops stand for its sizes
        for rows, n in LARGE:
            if {"m", "k"} <= fields.keys():
                for k in (64, n):
                    extra = {"batch": 4} if "batch" in fields else {}
                    yield cls(op=op, m=rows, n=min(n, 16384), k=min(k, 16384), element=element, **extra)
            elif "input_shape" in fields:
                extra = {name: 1 for name in ("softmax_axis", "scan_axis") if name in fields}
                if op == "where":  # its first operand selects
                    extra = {"y_element": element, "z_element": element}
                taken = "bool" if op == "where" else element
                with suppress(tp.InvalidProblem):  # a function that does not take this element
                    yield cls(op=op, input_shape=(rows, n), element=taken, **extra)
            elif "embedding_dim" in fields:
                yield cls(op=op, index_shape=(rows,), num_embeddings=50304, embedding_dim=n, element=element)
            elif op == "index_put":
                more = {"num_indices": 1, "accumulate": True}
                yield cls(op=op, out_shape=(512, n), index_shape=(rows,), element=element, **more)
            else:
                dims = {f: 0 for f in fields if f.endswith("_dim")}
                sizes = {f: 1024 for f in fields if f.endswith("_dim_size")}
                shapes = {f: (rows, n) for f in fields if f in ("out_shape", "src_shape")}
                given = {"op": op, **shapes, **dims, **sizes, "element": element}
                if all(name in given for name, field in fields.items() if field.is_required()):
                    yield cls(**given)


def plain(value: Any) -> Any:
    """``value`` as JSON; functions and kernels by name, without their module."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    if name := getattr(value, "__name__", None):
        return name
    return value if isinstance(value, (int, str, bool, type(None))) else repr(value)


def facts(plan: Any) -> dict[str, Any]:
    """What planning decided; launches as a digest and, as they are what differs most often, their kernels and grids."""
    launches = [
        plain([x.kernel, x.grid, dict(x.args), dict(x.constexprs), x.num_warps, x.num_stages, x.overlaps,
               x.max_registers or 0])
        for x in plan.launches
    ]  # fmt: skip
    sku = json.loads(plan.sku().model_dump_json())
    guarantees = {
        o.name: json.loads(plan.precision_guarantee(output=o.name).model_dump_json())
        for o in plan.descriptor.operands()
        if o.is_written
    }
    return {
        "key": plan.key,
        "sku": sku,
        "guarantees": guarantees,
        "workspace": plan.workspace_size(),
        "launches": hashlib.sha256(json.dumps(launches, sort_keys=True).encode()).hexdigest()[:16],
        "grids": [x[:2] for x in launches],
    }


def planned(desc: tp.Descriptor) -> Iterator[tuple[str, Any]]:
    """(target and preference, plan or refusal) of ``desc``: under each preference, then with each kernel pinned."""
    preferences = {
        "default": tp.PlanPreference(deterministic=False),
        "deterministic": tp.PlanPreference(deterministic=True),
        "batch": tp.PlanPreference(deterministic=True, batch_invariant=True),
    }
    for entry in tp.TABLE.rows(desc.op):
        if entry.backend is tp.BackendKind.TRITON:
            preferences[entry.name] = tp.PlanPreference(deterministic=False, kernel=entry.name)
    for arch, target in {**TARGETS, "cpu": tp.Target.cpu()}.items():
        for name, preference in preferences.items():
            if arch == "cpu" and name != "default":
                continue
            try:
                yield f"{arch} {name}", tp.plan(desc, preference=preference, target=target)
            except tp.Unsupported as refusal:
                yield f"{arch} {name}", refusal


def ptx_digest(ptx: str) -> str:
    """A digest of the instructions, without comments, labels and debug information, which name source lines."""
    kept = []
    for line in ptx.split("\n"):
        if re.match(r"\s*\.section\s+\.debug", line):
            break
        line = re.sub(r"//.*$", "", line).strip()
        if line and not line.startswith((".loc", ".file")) and not line.startswith("$L__") and "$L__tmp" not in line:
            kept.append(line)
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def observed(problems: list[tp.Descriptor], ptx: int) -> tuple[dict[str, Any], dict[str, str]]:
    """The facts of every plan by problem, target and preference, and PTX digests by architecture and launch."""
    plans: dict[str, Any] = {}
    sources: dict[str, dict[str, Any]] = {}
    for desc in problems:
        for name, plan in planned(desc):
            where = f"{desc.model_dump_json()} | {name}"
            plans[where] = {"refused": True} if isinstance(plan, tp.Unsupported) else facts(plan)
            if not isinstance(plan, tp.Unsupported) and ptx and not name.startswith("cpu"):
                arch = name.split()[0]
                for launch in plan.launches:
                    source = launch.source()
                    parts = [source.name, source.signature, source.constexprs, source.attrs, source.num_warps]
                    text = json.dumps(plain([*parts, source.overlaps, source.max_registers or 0]))
                    sources.setdefault(f"{arch} {source.name}", {})[text] = (source, TARGETS[arch].arch)
    digests = {}
    for name, found in sorted(sources.items()):
        # By digest: the choice is arbitrary, but the same before and after.
        chosen = sorted(found, key=lambda text: hashlib.sha256(text.encode()).hexdigest())[:ptx]
        for text in chosen:
            digests[f"{name} {text}"] = ptx_digest(compile_source(*found[text]).asm["ptx"])
        print(f"{name}: {len(chosen)} of {len(found)} compiled", file=sys.stderr, flush=True)
    return plans, digests


def record(file: Path, ops: str, count: int, ptx: int) -> None:
    problems = [d for op in tp.TABLE.ops() if ops in op for d in (*drawn(op, count), *large(op))]
    problems = list(dict.fromkeys(problems))
    plans, digests = observed(problems, ptx)
    found = {"problems": [d.model_dump_json() for d in problems], "plans": plans, "ptx": digests}
    file.write_text(json.dumps(found))
    print(f"{len(problems)} problems, {len(plans)} plans, {len(digests)} binaries")


def compare(file: Path, ops: str, ptx: int) -> int:
    """The number of differences, of which the first are printed."""
    recorded = json.loads(file.read_text())
    problems = [d for d in map(tp.parse_descriptor, recorded["problems"]) if ops in d.op]
    plans, digests = observed(problems, ptx)
    asked = {d.model_dump_json() for d in problems}
    before = {where: facts for where, facts in recorded["plans"].items() if where.partition(" | ")[0] in asked}
    differing = [f"{where}: no longer planned" for where in before.keys() - plans.keys()]
    differing += [f"{where}: planned only now" for where in plans.keys() - before.keys()]
    for where in before.keys() & plans.keys():
        was, now = before[where], plans[where]
        parts = sorted({*was, *now})
        differing += [f"{where}: {p}: {was.get(p)} is now {now.get(p)}" for p in parts if was.get(p) != now.get(p)]
    both = digests.keys() & recorded["ptx"].keys()
    differing += [f"PTX of {name}" for name in both if digests[name] != recorded["ptx"][name]]
    for line in sorted(differing)[:SHOWN]:
        print(line[:600])
    print(f"{len(plans)} plans and {len(both)} binaries compared: {len(differing)} differences")
    return len(differing)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=60, help="problems drawn of each op")
    parser.add_argument("--ptx", type=int, default=0, help="binaries compiled of each kernel and architecture")
    parser.add_argument("--ops", default="", help="only ops whose name contains this")
    options = parser.parse_args()
    if options.action == "record":
        record(options.file, options.ops, options.count, options.ptx)
        return 0
    return bool(compare(options.file, options.ops, options.ptx))


if __name__ == "__main__":
    sys.exit(main())
