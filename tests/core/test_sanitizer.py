"""NVIDIA's compute-sanitizer, over every Triton entry of the kernel table on small problems (``sanitized.py``)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TOOL = shutil.which("compute-sanitizer") or next(map(str, Path("/usr/local").glob("cuda*/bin/compute-sanitizer")), "")
#: Processes of one tool.
SHARDS = 8
#: Allocations of torch's own would hide what lies beyond an operand, and make it look initialised.
OWN_ALLOCATIONS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
TOOLS: dict[str, dict[str, str]] = {
    "memcheck": OWN_ALLOCATIONS,
    "initcheck": OWN_ALLOCATIONS,
    "synccheck": {},
    "racecheck": {},
}
has_tool = pytest.mark.skipif(not TOOL, reason="compute-sanitizer is not installed")
RACE = re.compile(r"Race reported between (\w+) access at (\w+)\+(\w+) in .*\n(?:=+     and .*\n)+")


#: Kernels with a warp for each kind of work: those that call ``warp_specialize``.
SPECIALISED = {
    "wgmma_kernel",
    "wgmma_pair_kernel",
    "attention_wgmma_kernel",
    "attention_wgmma_dkdv_kernel",
    "attention_wgmma_dq_kernel",
    "attention_wgmma_stored_dq_kernel",
    "attention_wgmma_wide_dkdv_kernel",
    "attention_wgmma_wide_dq_kernel",
    "conv2d_wgmma_kernel",
    "conv2d_weight_wgmma_kernel",
}


def unknown_races(log: str) -> list[str]:
    """The races in a log of racecheck, without the one that Triton writes and that is none.

    The head of a warp-specialised kernel reads which partition a warp runs, which the first warp wrote before a barrier
    of all warps (``barrier.sync 1`` in the PTX). racecheck reports it whatever the form of that barrier.
    """
    found = []
    for race in RACE.finditer(log):
        access, kernel, offset = race.groups()
        if not (kernel in SPECIALISED and access == "Read" and int(offset, 16) < 0x400):
            found.append(race[0])
    return found


def sanitize(tool: str, folder: Path, script: Path, shards: int = 1) -> str:
    """What ``tool`` says of ``script``, which each process runs a part of. Under racecheck it compares its results."""
    check = ["check"] if tool == "racecheck" else []
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS), *sys.path])
    logs = [folder / f"{shard}.log" for shard in range(shards)]
    running = [
        subprocess.Popen(
            [TOOL, "--tool", tool, "--log-file", log, sys.executable, script, str(shard), str(shards), *check],
            env={**os.environ, "PYTHONPATH": paths, **TOOLS[tool]},
        )
        for shard, log in enumerate(logs)
    ]
    assert [process.wait(300) for process in running] == [0] * shards
    said = [log.read_text() for log in logs]
    assert all("SUMMARY" in text for text in said)
    return "".join(said)


@pytest.mark.gpu
@has_tool
@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_finds_nothing(tool: str, tmp_path: Path) -> None:
    said = sanitize(tool, tmp_path, TESTS / "sanitized.py", SHARDS)
    if tool == "racecheck":
        races = unknown_races(said)
        assert not races, "\n".join(races)
        assert said.count("Race reported") == len(RACE.findall(said))
    else:
        assert said.count("ERROR SUMMARY: 0 errors") == SHARDS, said


@pytest.mark.gpu
@has_tool
@pytest.mark.parametrize("tool", ["memcheck", "initcheck"])
def test_the_sanitizer_finds_a_planted_fault(tool: str, tmp_path: Path) -> None:
    script = tmp_path / "planted.py"
    script.write_text(
        "import torch, triton, triton.language as tl\n@triton.jit\ndef beyond(x):\n    tl.store(x + 128, tl.load(x))\n"
        "beyond[(1,)](torch.empty(128, device='cuda'))\n"
    )
    assert "ERROR SUMMARY: 0 errors" not in sanitize(tool, tmp_path, script)


def test_a_race_that_is_not_known_is_found() -> None:
    known = "Error: Race reported between Read access at wgmma_kernel+0x100 in w.py:203\n"
    known += "=========     and Write access at wgmma_kernel+0x2b50 in w.py:203 [2 hazards]\n"
    other = known.replace("wgmma_kernel", "sorted_sum_kernel")
    late = known.replace("+0x100", "+0x1000")
    assert unknown_races(known + other + late) == [other[7:], late[7:]]
