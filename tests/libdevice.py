"""Of libdevice, kernels are linked with the functions that they call: parsing all of it takes a tenth of a compile.

Triton parses the whole of libdevice for each kernel that calls a function of it. Here the functions that a set of names
needs are taken out once, as text, and the kernels that call just these are linked with that text. Relies on the LLVM
bindings of Triton 3.6 to 3.9.
"""

from __future__ import annotations

import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from triton._C.libtriton import ir, llvm

#: A function of libdevice that a module declares, and does not define.
DECLARED = re.compile(r"^declare .*@(__nv_\w+)\(", re.MULTILINE)

_link = llvm.link_extern_libs
_folder = tempfile.TemporaryDirectory(prefix="libdevice")


@cache
def part(library: str, names: frozenset[str]) -> str:
    """The path of a module with the functions ``names`` of ``library``, and those that they call."""
    path = Path(_folder.name) / f"{len(list(Path(_folder.name).iterdir()))}.ll"
    declarations = path.with_suffix(".mlir")
    declarations.write_text("\n".join(f"llvm.func @{name}()" for name in sorted(names)))
    context = ir.context()
    ir.load_dialects(context)
    module = llvm.to_module(ir.parse_mlir_module(str(declarations), context), llvm.context())
    _link(module, [library])  # makes them internal
    path.write_text(re.sub(rf"^define internal (?=.*@(?:{'|'.join(names)})\()", "define ", str(module), flags=re.M))
    return str(path)


def link(module: Any, paths: list[str]) -> None:
    """Triton's ``link_extern_libs``, of which it is told no library but libdevice."""
    names = frozenset(DECLARED.findall(str(module)))
    _link(module, [part(path, names) for path in paths] if names else paths)


def link_parts() -> None:
    """Let Triton link kernels so, in this process."""
    llvm.link_extern_libs = link
