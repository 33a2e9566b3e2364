"""Each binary of the compile matrix is built once, and held to all that is asked of binaries.

Additions of floating-point numbers in memory come in whatever order the hardware chooses. An entry that claims to be
deterministic has none in its PTX, nor, unless its results are the same in any order, a compare-and-swap, by whose
loops they are emulated; and each entry that does not claim it has one, so that the search is known to find them.
Integer atomics are left out: their sums know no order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from machine_code import layouts, unwritten
from matrix import FLOAT_ADDITION, FLOAT_ATOMIC, TARGETS, Binary, binaries, chosen, entries, picked
from samples import family_of

from triplan.backends.runtime import launcher
from triplan.backends.runtime.compile import compile_source, record, sass
from triplan.errors import KernelInternal
from triplan.sku import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="kernels are interpreted here")
#: PTX types of the parameters that a letter of torch's static launcher fills.
LETTERS = {"u64": "Ol", "s64": "Ol", "b64": "Ol", "u32": "i", "b32": "i", "f32": "f", "f64": "d"}
#: Machine code that waits for the launch ahead, or touches global memory.
TOUCHES = re.compile(r"\b(ACQBULK|LDG|LDGSTS|STG|RED|ATOM|ATOMG|UTMALDG|UTMASTG)\b")
#: Kernels of later launches that read operands before they wait, beside those that are compiled with EARLY: no launch
#: before writes them, and the first waits before it allows the next. (In Gluon's kernels the parts of a block wait on
#: their own, in no order of the text.)
READ_EARLY = {"estimates_kernel", "masses_kernel", "finish_kernel", "scan_finish_kernel"}
#: Kernels of which this process has disassembled a binary, which stands for all.
disassembled: set[str] = set()


@pytest.mark.parametrize(
    "instruction",
    [
        "atom.global.gpu.acq_rel.add.f32",
        "atom.add.f64",
        "red.relaxed.gpu.global.add.noftz.f16x2",
        "red.global.add.noftz.bf16",
        "red.relaxed.gpu.global.v4.f32.add",
        "red.global.gpu.relaxed.add.noftz.v8.f16",
        "atom.global.gpu.acq_rel.cas.b32",
        "atom.cas.b64",
    ],
)
def test_floating_point_atomics_are_found(instruction: str) -> None:
    line = f"\t@%p1 {instruction} [ %rd1 + 0 ], %r2;\n"
    assert FLOAT_ATOMIC.search(line)
    assert (FLOAT_ADDITION.search(line) is None) is ("cas" in instruction)


@pytest.mark.parametrize(
    "instruction",
    [
        "atom.global.gpu.relaxed.add.u64",
        "atom.global.min.s64",
        "red.global.max.u32",
        "add.f32",
        "fma.rn.f32",
        "bar.red.popc.u32",
    ],
)
def test_what_knows_no_order_is_not(instruction: str) -> None:
    assert not FLOAT_ATOMIC.search(f"\t@%p1 {instruction} %r1, [ %rd1 + 0 ], %r2;\n")


@pytest.mark.shows(
    "compiles",
    "no register spills",
    "fits shared memory",
    "no float atomics",
    "instructions",
    "parameters",
    "kernels wait for the launch ahead before they touch memory",
    "wgmma of two layouts reads what was written",
)
@pytest.mark.parametrize(("op", "entry", "arch"), entries())
def test_binaries(op: str, entry: str, arch: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """No register spills, no more registers than a block has, no float atomics where determinism is claimed, vectors,
    tensor cores, parameters; what may begin before the launch ahead has ended waits before it touches memory; wgmma of
    two layouts reads what was written."""
    assert any((op, entry) in b.entries for b in binaries(family_of(op), arch)), "no problem of tests/matrix is its"
    monkeypatch.setattr(launcher, "_STATIC", lambda *args: None)
    for binary in chosen(op, entry, arch, pytestconfig.getoption("matrix")):
        found, what = record(binary.source, TARGETS[arch].arch), f"{binary.source.name} of {binary.desc.key}"
        assert binary.may_spill or found.spill_bytes == 0, f"{what} spills {found.spill_bytes} bytes"
        assert 0 < found.registers <= 255, what
        threads = int(re.findall(r"\.reqntid (\d+)", found.ptx)[0])
        assert -(-found.registers // 8) * 8 * threads <= 1 << 16, f"{what}: {threads} threads lack registers"
        assert found.shared_bytes <= TARGETS[arch].shared_memory, what
        assert f".target sm_{arch[2:]}" in found.ptx, what
        assert found.cubin[:4] == b"\x7fELF", what
        if binary.deterministic:
            forbidden = FLOAT_ADDITION if binary.any_order else FLOAT_ATOMIC
            assert not forbidden.search(found.ptx), f"{what} adds floating-point numbers in memory"
        for pattern in binary.has:
            assert re.search(pattern, found.ptx), f"{what} lacks {pattern}"
        for pattern in binary.lacks:
            assert not re.search(pattern, found.ptx), f"{what} has {pattern}"
        assert "griddepcontrol.wait" in found.ptx or not binary.source.overlaps, f"{what} does not wait"
        name = binary.source.name
        early = name in READ_EARLY or dict(binary.source.constexprs).get("EARLY", False)
        if binary.source.overlaps and not (binary.source.kernel.is_gluon() or early or name in disassembled):
            disassembled.add(name)
            touch = next(of for line in sass(found.cubin) for of in TOUCHES.findall(line))
            assert touch == "ACQBULK", f"{what} touches memory before it waits for the launch ahead: {touch}"
        told = layouts(found.ptx)
        assert told or "wgmma.mma_async" not in found.ptx, f"{what} computes descriptors in another way"
        if told > 1:
            code = list(sass(found.cubin))
            assert any("GMMA" in line for line in code), f"{what} is not disassembled"
            assert not (lost := unwritten(code)), f"{what} reads registers that nothing wrote: {lost}"
        types = launcher.static_types(compile_source(binary.source, TARGETS[arch].arch))
        if types is not None:
            header = found.ptx[found.ptx.index(".entry") :]
            declared = re.findall(r"\.param \.(\w+)", header[: header.index(")")])
            assert len(declared) == len(types), what
            assert all(t in LETTERS[d] for t, d in zip(types, declared, strict=True)), (what, types, declared)


@pytest.mark.shows("float atomics where not deterministic")
@pytest.mark.parametrize(("op", "entry", "arch"), entries())
def test_what_sums_in_no_fixed_order_has_float_atomics(
    op: str, entry: str, arch: str, pytestconfig: pytest.Config
) -> None:
    size = pytestconfig.getoption("matrix")
    if size == "few":
        pytest.skip("not every kernel of a plan is built")
    summing = [binary for binary in picked(family_of(op), arch, size) if binary.unordered]

    def adds(binaries: Iterable[Binary]) -> bool:
        return any(FLOAT_ATOMIC.search(compile_source(b.source, TARGETS[arch].arch).asm["ptx"]) for b in binaries)

    own = [binary for binary in summing if any(user[:2] == (op, entry) for user in binary.unordered)]
    assert adds(own) or not own, "nothing that depends on order"
    for element in {of for binary in own for *user, of in binary.unordered if user == [op, entry]}:
        assert adds(b for b in summing if any(of == element for *_, of in b.unordered)), element


def test_what_cannot_be_disassembled_is_an_error() -> None:
    with pytest.raises(KernelInternal, match="cuobjdump"):
        list(sass(b"no binary"))
