"""Compile launches, with or without a GPU, and read registers and spills off the binaries.

Relies on ``triton.compile(ASTSource(...), target=GPUTarget(...))`` (``GluonASTSource`` for Gluon), ``is_gluon`` of a
kernel and ``get_ptxas``, unchanged from Triton 3.6 to 3.9, and on the ``cuobjdump`` in Triton's wheel.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
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
from triplan.sku.facts import fact

#: Bytes of static shared memory that the system adds to each block with any on compute capability 9.0.
SYSTEM_SHARED = 1024
#: 32-bit registers that the threads of a block can have together (compute capability 8.0 and 9.0).
BLOCK_REGISTERS = 1 << 16

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_lock = threading.RLock()  # a signal's handler may plan and run while its thread compiles
_compiled: dict[tuple[Source, ArchSku], Any] = {}


@dataclass(frozen=True, slots=True)
class CompiledRecord:
    """One compiled kernel. Sizes are bytes; ``registers`` is per thread."""

    name: str
    arch: ArchSku
    ptx: str
    cubin: bytes
    registers: int
    spill_bytes: int
    shared_bytes: int


def compile_source(source: Source, arch: ArchSku) -> Any:
    """Triton's compiled kernel for ``source``, cached.

    Raises ``KernelInternal`` if Triton or ptxas refuses, ``Unsupported`` where kernels are interpreted.
    """
    key = (source, arch)
    found = _compiled.get(key)
    if found is None:
        with _lock:
            found = _compiled.get(key)
            if found is None:
                found = _compiled[key] = _compile(source, arch)
    return found


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
    # A block whose threads together ask for more registers than there are compiles, but cannot be launched.
    most = source.max_registers and min(source.max_registers, BLOCK_REGISTERS // (32 * source.num_warps))
    # Triton 3.10 flips the default of enable_fp_fusion, which would change bits.
    options: dict[str, Any] = {
        "num_warps": source.num_warps,
        "num_stages": source.num_stages,
        "maxnreg": most or None,
        "enable_fp_fusion": source.fuses,
        "launch_pdl": source.overlaps,
    }
    try:
        return triton.compile(ast, target=GPUTarget("cuda", arch.capability, 32), options=options)
    except Exception as e:
        raise KernelInternal(f"{source.name} did not compile for {arch}: {e}") from e


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # the thread that may hold it is not in the child


os.register_at_fork(after_in_child=_after_fork)


@fact
def record(source: Source, arch: ArchSku) -> CompiledRecord:
    """Compile ``source`` and read registers, spills and shared memory off the binary."""
    compiled = compile_source(source, arch)
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    registers, stack, static = _resource_usage(cubin)
    spilled = _spill_bytes(ptx, arch) if stack else 0
    # Triton allocates dynamic shared memory. A kernel's inline PTX may declare static shared memory.
    declared = max(static - SYSTEM_SHARED, 0) if arch is ArchSku.SM90A else static
    return CompiledRecord(source.name, arch, ptx, cubin, registers, spilled, int(compiled.metadata.shared) + declared)


def _resource_usage(cubin: bytes) -> tuple[int, int, int]:
    """(registers per thread, bytes of stack per thread, bytes of static shared memory)."""
    out = _cuobjdump("--dump-resource-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", out)
    if found is None:
        raise KernelInternal(f"cuobjdump printed no resource usage: {out!r}")
    return int(found[1]), int(found[2]), int(found[3])


def _spill_bytes(ptx: str, arch: ArchSku) -> int:
    """Bytes of register spills, stores and loads together.

    Spills use the stack, but so does an array that is indexed at run time. Only ``ptxas -v`` distinguishes them, so it
    assembles the PTX once more. That takes 25 times as long as reading the cubin: call it only where there is a stack.
    """
    name = {"sm80": "sm_80", "sm90a": "sm_90a"}[arch.value]
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(arch.capability).path, "-v", f"--gpu-name={name}", file.name, "-o", os.devnull]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", out)
    if spills is None:
        raise KernelInternal(f"ptxas printed no spills: {out!r}")
    return int(spills[1]) + int(spills[2])


def sass(cubin: bytes) -> Iterator[str]:
    """The lines of a cubin's disassembly, as they come: whoever stops reading early saves the time of the rest.

    Raises ``KernelInternal`` at the end if ``cuobjdump`` fails.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        with subprocess.Popen([_CUOBJDUMP, "-sass", file.name], stdout=subprocess.PIPE, text=True) as process:
            try:
                yield from process.stdout or ()
                if process.wait() != 0:
                    raise KernelInternal(f"cuobjdump -sass failed with exit code {process.returncode}")
            finally:
                process.kill()


def _cuobjdump(option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_CUOBJDUMP, option, file.name], capture_output=True, text=True, check=True).stdout
