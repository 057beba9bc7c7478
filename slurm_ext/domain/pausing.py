"""Requests for a pause and their answers, as they lie in files: data and bounds, no I/O.

The job's own helper obeys them (`slurm_ft.pause`); the command line, and the daemon for operators
and for itself, write them. A request is about one job and is obeyed once. Its ``credential`` is
munge's over all of its `PauseAsk.words`, so that neither the file's place nor its owner alone
decides whose request it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from slurm_ext.domain.attempt import Attempt
from slurm_ext.domain.codec import loads
from slurm_ext.domain.errors import ProtocolError

PAUSE = "pause"
RESUME = "resume"
STATUS = "status"
VERBS = (PAUSE, RESUME, STATUS)
ASK_VERSION = 1
MAX_ASK_BYTES = 16384
LONGEST_HOLD_S = 30 * 86400.0
# Files are named PREFIX, what they are about, SUFFIX; see `ask_name` and `answer_name`.
ASK_PREFIX = "pause-ask-"
ANSWER_PREFIX = "pause-answer-"
_SUFFIX = ".json"
# How a job that was saved and goes back to the queue is told (`PauseAnswer.end`).
ENDED_SAVED = "saved"
ENDED_REFUSED = "refused"
# How a refusal ends (`PauseAnswer.reason`) because the job is paused, or about to be.
UNDER_WAY = "is under way"
_MOST_WHO = 100
_PAUSED = re.compile(rf"paused by (?P<who>.{{1,{_MOST_WHO}}}?) for (?P<hold_s>\d{{1,8}}) s\b")
# What a session that leaves a pause puts before its reason (`slurm_ft.status.Status.note`).
PAUSE_NOTE = "pause: "
_ID = re.compile(r"[0-9a-f]{16}\Z")
_JOB = re.compile(r"[0-9]{1,10}(_[0-9]{1,10})?\Z")


class Rung(StrEnum):
    """How much a pause gives back.

    HOLD    nothing: the ranks stand still
    MEMORY  device memory; it comes back on resume
    JOB     the GPUs: a coordinated save, then the job is requeued
    """

    HOLD = "nothing"
    MEMORY = "memory"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class Paused:
    """That a job left for the queue because somebody paused it, as a reason in its attempts.

    For people, and read again by the daemon, which then neither lets the job go nor takes the later
    start for a stranger's. A job that the daemon itself moves is not paused: it holds for no time.
    """

    who: str
    hold_s: float

    @property
    def words(self) -> str:
        """In one reason, first of all."""
        return f"paused by {self.who[:_MOST_WHO] or 'its owner'} for {self.hold_s:.0f} s"


@dataclass(frozen=True, slots=True)
class PutOff:
    """A start that a pause has put off: the attempt that left for it, and what it said."""

    attempt: Attempt
    ended_s: float
    paused: Paused

    def until_s(self, begin_s: float | None) -> float:
        """The earliest start. Slurm's begin time is written a little after the attempt's end."""
        return max(self.ended_s + self.paused.hold_s, begin_s or 0.0)


def last_pause(attempts: Sequence[Attempt]) -> PutOff | None:
    """The last attempt of a job that waits, where it left for the queue because of a pause.

    That the job waits is what the caller knows of Slurm: then it was sent back, whether or not the
    attempt still learnt so.
    """
    if not attempts or attempts[-1].ended_s is None:
        return None
    last = attempts[-1]
    paused = read_paused(last.reason)
    return None if paused is None or last.ended_s is None else PutOff(last, last.ended_s, paused)


def read_paused(reason: str) -> Paused | None:
    """What `Paused.words` begins a reason with; ``None`` for any other reason."""
    found = _PAUSED.match(reason)
    return Paused(found["who"], float(found["hold_s"])) if found else None


@dataclass(frozen=True, slots=True)
class PauseAsk:
    """One request. ``credential`` is munge's, over `words`."""

    id: str
    verb: str
    job_id: str
    at_s: float
    rung: Rung = Rung.MEMORY
    wait_s: float = 60.0
    hold_s: float = 600.0
    by: str = ""
    credential: str = ""
    version: int = ASK_VERSION

    def words(self) -> str:
        """What the credential vouches for: all of it."""
        return json.dumps(
            [
                *(self.id, self.verb, self.job_id, self.at_s),
                *(self.rung, self.wait_s, self.hold_s, self.by),
            ],
            separators=(",", ":"),
        )

    @property
    def name(self) -> str:
        """Name of the file of the request."""
        return f"{ASK_PREFIX}{self.job_id}-{self.id}{_SUFFIX}"


@dataclass(frozen=True, slots=True)
class PauseAnswer:
    """What has become of a request so far; replaced as it goes on.

    ``end`` is empty while the pause lasts, else one of `slurm_ft.pause.protocol.End`. ``epoch`` is
    the number of the pause in this attempt, 0 where there is none. ``since_s`` is when all ranks
    were paused and ``until_s`` when they go on by themselves, in seconds since the epoch; ``rung``
    and ``by`` are the request's; ``step`` is the last step before it, where the job tells.
    """

    id: str
    stage: str
    epoch: int = 0
    end: str = ""
    reason: str = ""
    ranks: str = ""
    paused_s: float | None = None
    ended_s: float | None = None
    rung: str = ""
    by: str = ""
    since_s: float | None = None
    until_s: float | None = None
    step: int | None = None
    version: int = ASK_VERSION


def answer_name(ask_id: str) -> str:
    """Name of the file of the answer to a request."""
    return f"{ANSWER_PREFIX}{ask_id}{_SUFFIX}"


def is_ask_name(name: str) -> bool:
    """Whether a file of this name may be a request."""
    return name.startswith(ASK_PREFIX) and name.endswith(_SUFFIX)


def parse_ask(text: str, place: str) -> PauseAsk:
    """Read what anybody may have written, or raise ProtocolError naming ``place``."""
    ask = loads(PauseAsk, text, place)
    if ask.version != ASK_VERSION:
        raise ProtocolError(f"{place}: version {ask.version}, this side knows {ASK_VERSION}")
    if not _ID.match(ask.id):
        raise ProtocolError(f"{place}: id={ask.id[:40]!r} is not 16 hexadecimal digits")
    if not _JOB.match(ask.job_id):
        raise ProtocolError(f"{place}: job_id={ask.job_id[:40]!r} is not a job id")
    if ask.verb not in VERBS:
        raise ProtocolError(f"{place}: verb={ask.verb[:40]!r}; known are {', '.join(VERBS)}")
    for name in ("wait_s", "hold_s"):
        value = getattr(ask, name)
        if not 0 <= value <= LONGEST_HOLD_S:
            raise ProtocolError(f"{place}: {name}={value:g} is outside 0..{LONGEST_HOLD_S:g}")
    return ask


def parse_answer(text: str, place: str) -> PauseAnswer:
    """Read an answer, or raise ProtocolError naming ``place``."""
    answer = loads(PauseAnswer, text, place)
    if answer.version != ASK_VERSION:
        raise ProtocolError(f"{place}: version {answer.version}, this side knows {ASK_VERSION}")
    return answer
