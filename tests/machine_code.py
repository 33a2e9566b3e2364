"""Machine code as ``cuobjdump`` prints it: uniform registers that it reads, though nothing wrote them.

ptxas 12.8 (of Triton 3.6) can lose a copy where descriptors of wgmma that tell of two layouts are computed from one
address: it adds to a register that is never written, and the products are wrong, though the PTX is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
UNIFORM = re.compile(r"(g?desc\[)?\bUR(\d+)\b")
#: A constant that PTX adds to an address.
CONSTANT = re.compile(r"\b(?:or|add)\.[bsu]64\s+%rd\d+, %rd\d+, (-?\d+);")


def layouts(ptx: str) -> int:
    """How many layouts descriptors of wgmma tell of, at most: any constant above 32 bits counts.

    The upper half of a descriptor has the swizzle and the stride between rows. The lower half has the address and the
    stride along a row: those that differ only there are computed rightly. Registers do not tell which share an address,
    as ptxas finds equal ones.
    """
    return len({int(c) >> 32 for c in CONSTANT.findall(ptx)} - {0, -1}) if "wgmma.mma_async" in ptx else 0


def _registers(op: str, operands: list[str]) -> tuple[int, int]:
    """The uniform registers that an instruction reads, and those that it writes, as bits."""
    parts = set(op.split(".")[1:])
    width = 4 if "128" in parts else 2 if parts & {"64", "WIDE"} else 1
    at = next((i for i, x in enumerate(operands) if re.fullmatch(r"UR\d+", x)), None)
    read = written = 0
    if at is not None and op[0] != "B" and (at == 0 or op.startswith("R2UR")):
        written = ((1 << width) - 1) << int(operands[at][2:])
        operands = operands[:at] + operands[at + 1 :]
    for i, x in enumerate(x for x in operands if "UP" not in x):  # without predicates
        for of, number in UNIFORM.findall(x):
            which = 1
            if of == "gdesc[":  # wgmma reads A's descriptor, unless registers hold A, and B's
                which = 0b1100 if operands[1].startswith("R") else 0b1111
            elif of == "desc[":
                which = 0b11
            elif op[0] == "U" and ("WIDE" not in parts or i == 2):  # factors of 32 bits, and what their product adds to
                which = (1 << width) - 1
            read |= which << int(number)
    return read, written


def unwritten(lines: Iterable[str]) -> list[str]:
    """The instructions that read a uniform register which no instruction wrote on some path to them.

    A copy reads nothing: of a pair whose other half is written later, ptxas copies both. What it writes is not written.
    """
    code = [(int(m[1], 16), m[2], m[3], re.split(r",\s*", m[4].strip())) for x in lines if (m := INSTRUCTION.search(x))]
    places = {address: i for i, (address, *_) in enumerate(code)}
    effects = [_registers(op, operands) for *_, op, operands in code]
    ways: list[list[int]] = []
    for i, (_, guard, op, operands) in enumerate(code):
        name = op.split(".")[0]
        goes_on = guard or name not in ("BRA", "BRX", "EXIT", "RET") or len(operands) > 1
        ways.append([i + 1] if goes_on and i + 1 < len(code) else [])
        if name in ("BRA", "CALL") and (target := places.get(int(operands[-1].split()[-1], 16))) is not None:
            ways[i].append(target)
    # The table of an indirect branch is elsewhere. It leads to what no other instruction leads to.
    others = sorted(set(range(1, len(code))).difference(*ways))
    for i, (*_, op, _) in enumerate(code):
        ways[i] += others if op == "BRX" else []
    written: list[int | None] = [None] * len(code)
    left = [(0, 0)]
    while left:
        i, before = left.pop()
        known = written[i]
        if known is not None and known & before == known:
            continue  # nothing new
        written[i] = before = before if known is None else known & before
        read, after = effects[i]
        after = before & ~after if code[i][2] == "UMOV" and read & ~before else before | after
        left += [(to, after) for to in ways[i]]
    return [
        f"{address:x}: {op} {', '.join(operands)}"
        for (address, _, op, operands), (read, _), known in zip(code, effects, written, strict=True)
        if known is not None and read & ~known and op != "UMOV"
    ]
