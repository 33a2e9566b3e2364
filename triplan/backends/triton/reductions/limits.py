"""What programs of reductions hold, and how many programs there are."""

from __future__ import annotations

#: Warps of a program. (Launches have fuses=False: two threads may merge the same accumulators and write the result to
#: the same address of shared memory, so both must round alike.)
WARPS = 4
#: Where those of one line are more than WARPS merge at a time: bytes of accumulators that a thread of the second launch
#: holds, and its warps at most. All loads wait together. Untuned.
MERGED_BYTES, MERGED_WARPS = 64, 32
#: Bytes of x per thread that a program holds at a time, half as many with two accumulators; twice as many of columns
#: where not every row begins at a multiple of 16 bytes. On an H200, of 32, 64 and 128 with 2 to 16 warps, these are the
#: best or within 3 % of it for rows and columns of 8192 to 16384 elements.
THREAD_BYTES = 32
#: Elements of a line up to which a program holds all of it where variances or exponentials are accumulated: all loads
#: of a line wait together. Longer ones than WHOLE_ANY fill most of the block, or few of its threads would load.
WHOLE_LINE, WHOLE_ANY = 16384, 8192
#: Elements of a thread then, where exponentials are accumulated up to WHOLE_ANY elements MORE_HELD: fewer warps wait
#: for each other, but two at least. Both and WHOLE_LINE were chosen on an H200, by runs that are not published.
WHOLE_HELD, MORE_HELD = 32, 64
#: Tiles of a line that one program reduces, at most; unless more than MOST_CHUNKS programs would share a line.
CHUNK_TILES, MOST_CHUNKS = 8, 16384
#: Elements that a program holds of a long line, of 2 or 4 bytes, of which a thread has THREAD_BYTES; from how many
#: such blocks on; and blocks of a chunk. On an H200 sums of 16384 rows of as many elements, and of all of them, take up
#: to 1.5 % less than with WARPS, by runs that are not published.
LONG_BLOCK, LONG_FROM, LONG_TILES = 4096, 2, 4
#: How many times as long lines are that one program still reduces: the second chunk would be short. Untuned.
LONGER = 1.25
#: Accumulators of a thread where lines begin between two vectors and are short, and warps that reduce them at most:
#: more would exchange accumulators for each line. With 32, registers leave room for 18 warps on a multiprocessor.
#: Untuned.
ODD_HELD, ODD_WARPS = 16, 2
#: Elements of a thread, by WARPS and by one warp, where lines of any order are read at once in whole vectors (see
#: Plan.once); elements and bytes of a line, at most and at least; and bytes of the loads that this replaces. Untuned.
ONCE_HELD, ONCE_LONGEST, ONCE_BYTES, ONCE_BELOW = (32, 64), 2048, 32, 8
#: Width in bytes of a tile across lines, where x is contiguous across them: if they begin at multiples of 16 bytes, and
#: if they do not. The best on an H200 of 256 to 4096, for 8192 x 8192 and about 16384 x 16384.
ACROSS_BYTES, ODD_ACROSS_BYTES = 256, 1024
#: Where x is contiguous across lines, a thread reduces whole lines of up to FEW elements. Threads that share such lines
#: would exchange accumulators as often as they read elements, through shared memory, where those of a vector of
#: neighbours lie in one bank. A thread holds FEW_HELD elements, half as many if it loads them one by one. Untuned.
FEW, FEW_HELD = 32, 32
#: Elements of lines that begin at multiples of 16 bytes, side by side, up to which a thread loads all of them before it
#: accumulates any. Untuned.
AT_ONCE = 8
#: Bytes of x that a thread loads before it accumulates them (see Loads._group), and where it has one accumulator of 32
#: bits for each place. Chosen on an H200, of 16 to 128, by runs that are not published.
GROUP_BYTES, LIGHT_BYTES = 64, 128
#: Chunks of columns of so many groups of blocks, or more, have whole groups: a part of one waits as long.
FEWEST_GROUPS = 4
#: Bytes and warps of a tile of long columns that are read in whole waves (see Plan.waves): a thread loads 16 bytes of
#: WAVE_GROUP blocks at a time, so that one program has as many bytes in flight as a multiprocessor of an H200 needs.
#: Chosen there, of 4 to 32 warps, for 8192 and 16384 columns of 16 bits, by runs that are not published.
WAVE_BYTES, WAVE_WARPS, WAVE_GROUP = 8192, 16, 8
#: Bytes of each row of such a tile: of elements of at most 2 bytes, and of larger ones, whose 16384 columns then are
#: one wave, not two (the same runs, of 64 to 512 bytes).
WAVE_ROW, WIDE_WAVE_ROW = 128, 256
#: What the beginning and the end of a wave take, in microseconds; and which share of the places of all waves has
#: elements at least. Untuned. Chunks at most: many take longer to merge than waves save (by runs that are not
#: published).
WAVE_US, WAVE_SHARE, WAVE_CHUNKS = 1.0, 0.8, 4
#: FEW where at least MANY programs reduce lines that begin at multiples of 16 bytes. Untuned.
FEW_OF_MANY, MANY = 128, 256
#: Elements that a thread of such programs loads at a time at least: of several lines, if there are enough; and so where
#: elements of a line are not contiguous, each of which is a load of its own. Untuned.
FEWEST_HELD = 8
#: The fixed cost of a block of a line, in elements of the line. Untuned.
STEP = 2
#: Elements per thread at most, of all operands of an expression together. Untuned.
HELD = 64
#: Neighbouring lines of a thread at most, where lines have more than FEW elements, and these are bytes or positions are
#: accumulated. With more lines, threads exchange accumulators through shared memory for fewer elements each. Untuned.
BESIDE = 4
#: Smallest number of neighbouring lines that are reduced side by side. Untuned.
FEWEST_ACROSS = 8
#: Where no vectors of 16 bytes can be loaded, lines of several points are reduced side by side if otherwise fewer than
#: this share of the lanes would have one. Untuned.
FLAT_SHARE = 0.8
#: The width, in lanes, of the tiles for which that is counted. Untuned.
FLAT_FROM = 64
#: Where vectors of 16 bytes can be loaded, lines of several points are reduced side by side if those of one are too few
#: for a warp, and more points than this have programs otherwise: about as many as are resident on an H200. Untuned.
FLAT_POINTS = 4096
#: Lines of a program at most, if each has its own address, in all operands: with 1024 registers spill.
MOST_LINES = 512
#: Elements of a line up to which one thread reads all of them, one by one, if lines are contiguous and begin anywhere:
#: threads that share a line would exchange as many accumulators as they read elements. Untuned.
OWN_LINES = 8
#: Warps of programs that reduce lines of at most LONE_LINE elements side by side, if there are at most LONE. Each
#: thread has half as many elements as elsewhere: with more of them, or with 16 warps, they take longer (on an H200).
LONE, LONE_LINE, LONE_WARPS = 8, 4096, 8
#: Chunks of columns are odd in number where otherwise so many bytes, or a multiple, would be between them: programs
#: would read the same channels of memory at a time. Chosen on an H200, by runs that are not published.
FAR_APART = 2**27
#: Programs that divide a few lines whose elements are not contiguous. Untuned.
SCATTERED = 264
#: Registers of a thread of more such programs, with accumulators of 32 bits, where a line has so many blocks. Each
#: element has an address of 64 bits: of the fewer registers that ptxas would take, few loads wait together. With these,
#: all loads of a block are issued before it is accumulated. The fastest of none, 96 and 255 for lines of 20,480
#: elements on an H200, by a run that is not published; with lines of 1,500 (two blocks) none was.
SCATTERED_REGISTERS, LONG_BLOCKS = 96, 4
#: Programs that keep an H200 busy; with fewer, lines that are reduced side by side are divided into chunks. Untuned.
BUSY = 1024
#: As many where lines of bytes lie side by side, whose loads are narrow; and elements of their chunks at least if twice
#: RESIDENT programs have some: shorter chunks read little beside the accumulators that they write. Chosen on an H200,
#: by runs that are not published.
NARROW_BUSY, NARROW_CHUNK = 2048, 192
#: Accumulators that a program merges are beside those of the same chunk where it merges at least so many lines: these
#: fill sectors of 32 bytes.
SECTOR_LANES = 8
#: Registers of a thread that loads 4 or 8 bytes of columns at a time: with more, an H200 does not hold BUSY programs of
#: WARPS at a time, and the last few run by themselves.
NARROW_REGISTERS = 64
#: The same where powers are accumulated, which spill with fewer. Untuned: by the machine code alone.
POWER_REGISTERS = 80
#: Programs that are all resident on an H200 even if their threads take all registers: two a multiprocessor.
RESIDENT = 264
#: Blocks of a chunk at least, if lines are reduced side by side, by WARPS and by LONE_WARPS. Untuned.
FEWEST_BLOCKS, LONE_BLOCKS = 4, 2
#: Bytes of an element, elements of a line, and lines side by side, at least, where programs read rows of lines that
#: begin equally far behind a vector (see Plan.turns). Untuned.
TURNED_BYTES, TURNED_LINE, TURNED_SIDE = (2,), 1024, 512
#: Bytes of few such lines (see LONE) at least, where each place has one accumulator of 32 bits: with fewer bytes, the
#: accumulators of all turns take longer to write and merge than narrow loads take.
TURNED_FROM = 2**23
#: Programs where so few lines are not read in turns: half of an H200's multiprocessors, because the launches before and
#: after have programs there too, and many chunks take long to merge. There are more only if each has ODD_BLOCKS blocks.
#: TURNED_FROM and ODD_BLOCKS are untuned; ODD_BUSY was chosen on an H200, by a run that is not published.
ODD_BUSY, ODD_BLOCKS = 66, 16
