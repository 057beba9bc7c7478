"""Exit codes by which a rank tells ``ft-run`` what shall happen to the job.

They stay clear of the shell's (126 to 128 and above) and of sysexits. A user's program that ends
with one of them by accident is no worse off: ``ft-run`` believes a code only together with the
status file that a session wrote in the same attempt.
"""

from __future__ import annotations

# Everything that could be saved is saved: the job may be requeued.
REQUEUE = 85
# An exchange between ranks was abandoned, or a rank is stuck: requeue from the last checkpoint.
ABANDONED = 86
# A rank agreed to a pause and cannot learn what was decided: requeue from the last checkpoint.
UNDECIDED = 87

# The session cannot be opened (a wrong state, a directory without rights): an error of the user's.
REFUSED = 1

ASKS_FOR_REQUEUE = frozenset({REQUEUE, ABANDONED, UNDECIDED})
