"""What the card gives: bandwidths, latencies and caches that cost models share, one value for each fact.

Costs are microseconds on an H200 for every target: select only compares them, and a target enters by its number of
multiprocessors. What was fitted to one kernel alone (its latency around a loop, its share of a limit) stays with that
kernel.
"""

from __future__ import annotations

#: Microseconds that one launch adds to a sequence of launches on a stream. Measured on an H200 with empty kernels.
LAUNCH_US = 1.5
#: Microseconds that a launch adds which begins while the one ahead of it ends. Untuned.
OVERLAPPED_LAUNCH_US = 1.0
#: Bytes that a streaming kernel moves in a microsecond. In ``bench/results/rowwise-nvidia-h200.csv`` norms' backward
#: reaches 3.7e6 to 3.9e6 at 8192 x 8192, softmax and the forward norms 4.0e6 to 4.3e6; torch's copy of 2 GiB 4.25e6.
BYTES_PER_US = 3.8e6
#: Bytes a microsecond that one multiprocessor moves when it is alone. Untuned.
SM_BYTES_PER_US = 5e4
#: Bytes a microsecond out of the L2 cache. Untuned.
L2_BYTES_PER_US = 7e6
#: Bytes a microsecond that a copy in tiles reads and writes: 464 MB of 16-bit elements with odd rows in 196 us on an
#: H200.
COPIED_BYTES_PER_US = 2.3e6
#: Rows of a block, of 64 or 128 bytes, that TMA reads in a microsecond into each multiprocessor while all read. Fitted
#: by hand to convolutions on an H200 and an H100.
TMA_ROWS_PER_US = 780.0
#: How many times as long rows take that end within a block, as TMA fills it with zeros: behind a sector, or within one.
#: Fitted by hand to convolutions on an H100.
TMA_ENDING = (1.5, 2.5)
#: Bytes of a line of the L2 cache, and of the L1 cache.
LINE_BYTES = 128
#: Threads of a warp.
WARP_THREADS = 32
#: Operations or bytes per microsecond in 1 TFLOP/s or 1 TB/s.
TERA_PER_US = 10**6
#: Bytes that the L2 cache keeps for one kernel: 40 MB on an A100; of an H200's 60 MB, what other traffic leaves.
L2_BYTES = 40 << 20
#: Bytes of the L2 cache that a table may take while the other operands stream through it. Untuned.
L2_SHARE = 16 << 20
#: Multiprocessors of an H200: for what bits or tolerances depend on, so that it is the same for every target.
SMS = 132
#: Bytes of a sector: the smallest transfer between memory and the L2 cache.
SECTOR = 32
#: Warps that a multiprocessor holds (compute capability 8.0 and 9.0).
SM_WARPS = 64
#: Programs that a multiprocessor holds (of capability 8.0 and 9.0).
SM_PROGRAMS = 32
#: 32-bit registers per multiprocessor.
SM_REGISTERS = 1 << 16
#: Registers that one thread can use.
MAX_THREAD_REGISTERS = 255
#: Bytes of shared memory that a block can have on Hopper, of a multiprocessor's 228 KiB; Ampere has less.
SM_SHARED_BYTES = 227 << 10
