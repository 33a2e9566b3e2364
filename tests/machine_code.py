"""Machine code as ``cuobjdump`` prints it: uniform registers that it reads, though nothing wrote them.

ptxas 12.8 (of Triton 3.6) can lose a copy where descriptors of wgmma that tell of two layouts are computed from one
address: it adds to a register that is never written, and the products are wrong, though the PTX is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
UNIFORM = re.compile(r"(g?desc\[)?\bUR(\d+)\b")


def _registers(op: str, operands: list[str]) -> tuple[set[int], set[int]]:
    """The uniform registers that an instruction reads, and those that it writes."""
    parts = set(op.split(".")[1:])
    width = 4 if "128" in parts else 2 if parts & {"64", "WIDE"} else 1
    at = next((i for i, x in enumerate(operands) if re.fullmatch(r"UR\d+", x)), None)
    written = set()
    if at is not None and op[0] != "B" and (at == 0 or op.startswith("R2UR")):
        written = {int(operands[at][2:]) + i for i in range(width)}
        operands = operands[:at] + operands[at + 1 :]
    read = set()
    for x in operands:
        for of, number in UNIFORM.findall(x):
            # wgmma reads A's descriptor, unless registers hold A, and B's.
            in_registers = len(operands) > 1 and operands[1].startswith("R")
            which = {"": range(width if op.startswith("U") else 1), "desc[": range(2)}
            read |= {int(number) + i for i in which.get(of, range(2 if in_registers else 0, 4))}
    return read, written


def unwritten(lines: Iterable[str]) -> list[str]:
    """The instructions that read a uniform register which no instruction wrote on some path to them."""
    code = [(int(m[1], 16), m[2], m[3], re.split(r",\s*", m[4].strip())) for x in lines if (m := INSTRUCTION.search(x))]
    places = {address: i for i, (address, *_) in enumerate(code)}
    effects = [_registers(op, operands) for *_, op, operands in code]
    written: list[set[int] | None] = [None] * len(code)
    ways = [(0, set[int]())]
    while ways:
        i, before = ways.pop()
        known = written[i] if i < len(code) else before
        if known is not None and known <= before:
            continue  # nothing new, or the end
        written[i] = before = before if known is None else known & before
        _, guard, op, operands = code[i]
        after = before | effects[i][1]
        name = op.split(".")[0]
        if name in ("BRA", "CALL") and (target := places.get(int(operands[-1].split()[-1], 16))) is not None:
            ways.append((target, after))
        if guard or name not in ("BRA", "EXIT", "RET") or len(operands) > 1:
            ways.append((i + 1, after))
    return [
        f"{address:x}: {op} {', '.join(operands)}"
        for (address, _, op, operands), (read, _), known in zip(code, effects, written, strict=True)
        if known is not None and not read <= known
    ]
