"""What the ft-run of a rank other than 0 does when its program has ended.

It leaves no sooner than rank 0 has decided: under ``srun --kill-on-bad-exit`` the first exit code
that is not 0 ends the step, and rank 0 with it. Where rank 0's ft-run is gone, it takes its place.
"""

from __future__ import annotations

import signal
import time

from slurm_ft.exits import ASKS_FOR_REQUEUE
from slurm_ft.launch.pulse import Watch
from slurm_ft.launch.waiting import wait_signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_ft.launch.marks import Marks
    from slurm_ft.launch.supervise import Ending

# Rank 0 asks a controller that is away for five minutes; Slurm ends us anyway when it has decided.
DECISION_S = 400.0
POLL_S = 0.5


def conclude(
    ending: Ending,
    rank: int,
    marks: Marks,
    lead: Callable[[int], int],
    limit_s: float = DECISION_S,
) -> int:
    """Wait for rank 0's decision where one is due. Returns the exit code of ft-run.

    ``lead(term)`` decides in its place, and returns the exit code.
    """
    left = ending.code in ASKS_FOR_REQUEUE or ending.asked is not None
    if ending.code and not left and not ending.told:
        marks.end(rank, ending.code)
    if not left or ending.told or not marks.hook:
        return ending.code
    while wait_signal({signal.SIGTERM}, 0) is not None:
        pass  # of before the program's end
    watch = Watch(marks, rank)
    end = time.monotonic() + limit_s
    while not marks.decided() and marks.stopped() is None and time.monotonic() < end:
        # TERM after the program has ended is Slurm taking the job apart.
        if wait_signal({signal.SIGTERM}, POLL_S) is not None:
            break
        term = watch.turn()
        if term is not None and marks.claim(term):
            return lead(term)
    return ending.code
