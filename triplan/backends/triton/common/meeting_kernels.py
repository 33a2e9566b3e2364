"""Programs that wait for one another between tiles, so that they find in L2 what others have just read (Gluon).

The programs of a persistent kernel begin together and drift apart. Those that read the same rows and columns then read
them at different times, when L2 may hold them no more. So each program arrives at a counter when it begins a tile, and
waits until all have arrived. This decides when something is read, never what. The wait is bounded, because other work
may hold the multiprocessors of the programs that are waited for; a program that waited in vain waits no more.
"""

# mypy: ignore-errors
# (Gluon's language is not typed; these bodies are compiled, not executed as Python.)

from triplan.backends.runtime.gluon import gl, gluon

#: What a launch adds to its counter in all, so that the next one knows where it began; more than its arrivals.
EPOCH = gl.constexpr(1 << 24)
#: How often a program looks at the counter in one meeting, at most. Set by hand: ten times as many changed nothing in
#: products on an H100.
PATIENCE = gl.constexpr(100)


@gluon.jit
def open_meetings(counter, rounds):
    """What ``meet`` needs: (counter, its value before this launch, rounds).

    ``rounds``: turns that each program has at least; 0 if none is to wait. Below EPOCH / programs.
    """
    before = gl.to_tensor(0)
    if rounds > 0:
        # Others may have arrived already, but not EPOCH times.
        before = gl.load(counter, volatile=True) & -EPOCH
    return counter, before, rounds


@gluon.jit
def meet(meetings, turn, patience):
    """Arrive, and wait until all programs have arrived; without a wait at the first ``turn``, which all begin together.

    ``patience``: how often to look at the counter, at most. Returns that of the next turn: the same, or 0 if the wait
    was in vain.
    """
    counter, before, rounds = meetings
    if turn < rounds:
        gl.atomic_add(counter, 1, sem="relaxed")
        if turn > 0:
            arrivals = (turn + 1) * gl.num_programs(0)
            left = patience
            while (left > 0) & (gl.load(counter, volatile=True) - before < arrivals):
                left -= 1
            patience = gl.where(left > 0, patience, 0)
    return patience


@gluon.jit
def close_meetings(meetings):
    """Fill the counter up to the next multiple of ``EPOCH``."""
    counter, _, rounds = meetings
    if (rounds > 0) & (gl.program_id(0) == 0):
        gl.atomic_add(counter, EPOCH - rounds * gl.num_programs(0), sem="relaxed")
