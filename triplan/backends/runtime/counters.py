"""Counters in a GPU's memory by which programs of one launch meet (``triton/common/meeting_kernels.py``).

64 KiB a device, taken when the first kernel that needs one is loaded, and kept. They hold no state that a result could
depend on: a launch leaves its counter as it found it, but for the epoch. Kernels share them in turns, and launches that
run side by side on one of them at worst wait in vain for a bounded time.
"""

from __future__ import annotations

from itertools import count
from threading import Lock

import torch

from triplan.backends.runtime.cuda import beside_capture

#: Counters of a device, and bytes from one to the next: of a cache line, so that each is polled by itself.
COUNTERS, APART = 512, 128
_lock = Lock()
_memory: dict[int, torch.Tensor] = {}
_given = count()


def counter_address(device: int) -> int:
    """The address of a 32-bit counter on a device, a multiple of 2**24 while no launch that uses it runs."""
    with _lock:
        if device not in _memory:
            where = torch.device("cuda", device)
            with beside_capture(where):
                _memory[device] = torch.zeros(COUNTERS * APART, dtype=torch.uint8, device=where)
        return _memory[device].data_ptr() + next(_given) % COUNTERS * APART
