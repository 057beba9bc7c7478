"""What the ft-run of a rank other than 0 does when its program has ended.

It leaves no sooner than rank 0 has decided: under ``srun --kill-on-bad-exit`` the first exit code
that is not 0 ends the step, and rank 0 with it.
"""

from __future__ import annotations

import signal
import time

from slurm_ft.exits import ASKS_FOR_REQUEUE
from slurm_ft.launch.waiting import wait_signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from slurm_ft.launch.marks import Marks
    from slurm_ft.launch.supervise import Ending

# Rank 0 may be waiting for a controller that is away; Slurm ends us anyway when it has decided.
DECISION_S = 60.0
POLL_S = 0.5


def conclude(ending: Ending, rank: int, marks: Marks, limit_s: float = DECISION_S) -> int:
    """Wait for rank 0's decision where one is due. Returns the exit code of ft-run."""
    left = ending.code in ASKS_FOR_REQUEUE or ending.asked is not None
    if ending.code and not left:
        marks.end(rank, ending.code)
    if not left or not marks.hook:
        return ending.code
    while wait_signal({signal.SIGTERM}, 0) is not None:
        pass  # of before the program's end
    end = time.monotonic() + limit_s
    while not marks.decided() and time.monotonic() < end:
        # TERM after the program has ended is Slurm taking the job apart.
        if wait_signal({signal.SIGTERM}, POLL_S) is not None:
            break
    return ending.code
