"""Compiling launches, with or without a GPU, and reading what came out.

Relies on ``triton.compile(ASTSource(...), target=GPUTarget(...))`` (for Gluon ``GluonASTSource``), ``is_gluon`` of a
kernel and ``get_ptxas``, unchanged from Triton 3.6 to 3.9, and on the ``cuobjdump`` inside Triton's wheel.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from triplan.backends.runtime.gluon import GluonASTSource
from triplan.backends.runtime.launch import Source
from triplan.errors import KernelInternal, Unsupported
from triplan.sku import ArchSku, interpreting

_lock = threading.Lock()
_compiled: dict[tuple[Source, ArchSku, int | None], Any] = {}


@dataclass(frozen=True, slots=True)
class CompiledRecord:
    """One compiled kernel: sizes in bytes, registers a thread."""

    name: str
    arch: ArchSku
    ptx: str
    cubin: bytes
    registers: int
    spill_bytes: int
    shared_bytes: int


def compile_source(source: Source, arch: ArchSku, device: int | None = None) -> Any:
    """Triton's compiled kernel for ``source``; one a device, as its function handle belongs to one.

    Raises ``KernelInternal`` if Triton or ptxas refuses, ``Unsupported`` where kernels are interpreted.
    """
    key = (source, arch, device)
    found = _compiled.get(key)
    if found is None:
        with _lock:
            found = _compiled.get(key)
            if found is None:
                found = _compiled[key] = _compile(source, arch)
    return found


def is_compiled(source: Source, arch: ArchSku, device: int | None) -> bool:
    return (source, arch, device) in _compiled


def compiled_count() -> int:
    """How many binaries this process holds."""
    return len(_compiled)


def _compile(source: Source, arch: ArchSku) -> Any:
    if interpreting():
        raise Unsupported("TRITON_INTERPRET=1 is set: kernels are interpreted in this process and cannot be compiled")
    language: Any = GluonASTSource if source.kernel.is_gluon() else ASTSource
    ast = language(
        source.kernel,
        signature=dict(source.signature),
        constexprs=dict(source.constexprs),
        attrs={path: [["tt.divisibility", value]] for path, value in source.attrs},
    )
    # fp-fusion is stated because its default flips in Triton 3.10, and bits would change with it.
    options: dict[str, Any] = {
        "num_warps": source.num_warps,
        "num_stages": source.num_stages,
        "maxnreg": source.max_registers or None,
        "enable_fp_fusion": True,
        "launch_pdl": source.overlaps,
    }
    try:
        return triton.compile(ast, target=GPUTarget("cuda", arch.capability, 32), options=options)
    except Exception as e:
        raise KernelInternal(f"{source.name} did not compile for {arch}: {e}") from e


@lru_cache(maxsize=1024)
def record(source: Source, arch: ArchSku) -> CompiledRecord:
    """Compile ``source`` and read registers, spills and shared memory off the binary."""
    compiled = compile_source(source, arch)
    ptx = compiled.asm["ptx"]
    registers, spilled = _resource_usage(ptx, arch)
    return CompiledRecord(
        source.name, arch, ptx, compiled.asm["cubin"], registers, spilled, int(compiled.metadata.shared)
    )


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _resource_usage(ptx: str, arch: ArchSku) -> tuple[int, int]:
    """(registers a thread, bytes spilled): assembled once more, as only ptxas tells spills from other stack use."""
    name = {"sm80": "sm_80", "sm90a": "sm_90a"}[arch.value]
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(arch.capability).path, "-v", f"--gpu-name={name}", file.name, "-o", os.devnull]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", out)
    registers = re.search(r"Used (\d+) registers", out)
    if spills is None or registers is None:
        raise KernelInternal(f"ptxas printed no resource usage: {out!r}")
    return int(registers[1]), int(spills[1]) + int(spills[2])


def sass(cubin: bytes) -> str:
    """The disassembly of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_tool("cuobjdump"), "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
