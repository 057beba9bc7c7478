"""States of jobs and nodes as the many Slurm releases write them.

A job's state is a word (``PENDING``) or, in newer JSON, a list whose first entry is the base state
and whose others are flags (``["RUNNING", "COMPLETING"]``). A node's is a base state with flags
joined by ``+`` and, in ``sinfo``, one-character suffixes. A state that we do not know is UNKNOWN
for a job, and *not available* for a node: better an idle GPU than a job sent to a broken node.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_ext.domain.job import JobState

_JOB_STATES = {state.value: state for state in JobState}
_ENDED = frozenset(
    {
        JobState.COMPLETED,
        JobState.CANCELLED,
        JobState.FAILED,
        JobState.TIMEOUT,
        JobState.DEADLINE,
        JobState.NODE_FAIL,
        JobState.BOOT_FAIL,
        JobState.OUT_OF_MEMORY,
        JobState.PREEMPTED,
        JobState.REVOKED,
    }
)
# A finished job whose nodes are still cleaning up, or one that waits to be queued again.
_TELLING_FLAGS = ("COMPLETING", "CONFIGURING", "REQUEUE_HOLD", "SPECIAL_EXIT", "STAGE_OUT")

_USABLE_BASE = frozenset({"IDLE", "MIXED", "ALLOCATED", "PLANNED", "COMPLETING"})
# A node that is switched off to save power, or is on its way up, is one that Slurm starts jobs on.
_USABLE_FLAGS = frozenset(
    {
        "PLANNED",
        "COMPLETING",
        "CLOUD",
        "DYNAMIC_NORM",
        "REBOOT_CANCEL",
        "POWERED_DOWN",
        "POWERING_UP",
    }
)
_SUFFIXES = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
    "&": "BLOCKED",
}


def job_state(value: str | Sequence[str]) -> JobState:
    """The state of a job, from a word or from a list of base state and flags.

    A flag tells more than the base where it changes what the job holds: a COMPLETED job that is
    still COMPLETING holds its nodes.
    """
    words = [value] if isinstance(value, str) else list(value)
    names = [word.strip().upper() for word in words if word.strip()]
    if not names:
        return JobState.UNKNOWN
    for flag in _TELLING_FLAGS:
        if flag in names:
            return _JOB_STATES[flag]
    return _JOB_STATES.get(names[0], JobState.UNKNOWN)


def ended(state: JobState) -> bool:
    """Whether the job neither waits nor holds anything any more."""
    return state in _ENDED


def node_flags(text: str) -> tuple[str, frozenset[str]]:
    """Base state and flags of ``MIXED+PLANNED``, ``IDLE*`` or ``DOWN*+DRAIN``, upper case."""
    flags: set[str] = set()
    parts: list[str] = []
    for part in text.upper().split("+"):
        word = part.strip()
        while word and word[-1] in _SUFFIXES:
            flags.add(_SUFFIXES[word[-1]])
            word = word[:-1]
        if word:
            parts.append(word)
    base = parts[0] if parts else "UNKNOWN"
    flags.update(parts[1:])
    return base, frozenset(flags)


def node_available(text: str) -> bool:
    """Whether Slurm may start a job on a node in this state now."""
    base, flags = node_flags(text)
    if "POWERED_DOWN" in flags and base != "IDLE":
        return (
            False  # switched off below a job: its start has failed, and Slurm does not say so yet
        )
    return base in _USABLE_BASE and flags <= _USABLE_FLAGS
