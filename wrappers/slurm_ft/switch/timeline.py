"""What each stage did when: the record behind ``slurm-ext report switch``. No torch here.

Times are the machine's monotonic clock while recording (stages of one node agree on it) and are
written relative to an origin that the caller names, so that stages of several nodes can be laid
over each other by an event that they share.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum

from slurm_ext.domain.codec import dumps, loads
from slurm_ext.domain.errors import ProtocolError

TIMELINE_VERSION = 1
MAX_SPANS = 100_000
MAX_STAGES = 4096


class Kind(StrEnum):
    """What a span of time was spent on. Only COMPUTE trains."""

    COMPUTE = "compute"
    OUT = "device to host"
    IN = "host to device"
    SAVE = "durable save"
    GROUP = "group rebuild"
    START = "cold start"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Span:
    """One activity of one stage, in seconds from the record's origin."""

    stage: int
    kind: Kind
    start_s: float
    end_s: float
    nbytes: int = 0
    label: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of all stages of one switch.

    ``how`` is naive, overlapped or cold. ``last_step_s`` is the end of the old task's last step,
    ``durable_s`` when its manifest was durable, ``first_step_s`` the end of the new task's first
    step (over all stages). The cost of a switch is what `cost_s` says, never less.
    ``model`` is the name in the throughput table, ``gpus`` how many ranks switched, ``old`` and
    ``new`` are the tasks' names.
    """

    how: str
    stages: int
    spans: tuple[Span, ...]
    last_step_s: float
    durable_s: float
    first_step_s: float
    model: str = ""
    gpus: int = 0
    old: str = ""
    new: str = ""
    version: int = TIMELINE_VERSION

    @property
    def end_s(self) -> float:
        """When the switch was over: old task durable and new task's first step done."""
        return max(self.durable_s, self.first_step_s)

    def cost_s(self, ideal_step_s: float) -> float:
        """From the old task's last step to the end, without the new one's ideal first step."""
        return self.end_s - self.last_step_s - ideal_step_s

    def moved(self, kind: Kind) -> int:
        """Bytes moved by all stages in one direction."""
        return sum(span.nbytes for span in self.spans if span.kind is kind)

    def to_json(self) -> str:
        """One line of JSON."""
        return dumps(self)


def parse_timeline(text: str, place: str) -> Timeline:
    """Read a record, or raise ProtocolError naming ``place``."""
    record = loads(Timeline, text, place)
    if record.version != TIMELINE_VERSION:
        raise ProtocolError(
            f"{place}: version {record.version}, this side knows {TIMELINE_VERSION}"
        )
    if len(record.spans) > MAX_SPANS:
        raise ProtocolError(f"{place}: more than {MAX_SPANS} spans; not read")
    if not 0 < record.stages <= MAX_STAGES:
        raise ProtocolError(f"{place}: {record.stages} stages; not read")
    for span in record.spans:
        if not 0 <= span.stage < record.stages or span.end_s < span.start_s:
            raise ProtocolError(f"{place}: {span} is not a span of one of {record.stages} stages")
    return record


class Recorder:
    """Collects the spans of one stage, from any thread."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def add(
        self, kind: Kind, start_s: float, end_s: float, nbytes: int = 0, label: str = ""
    ) -> None:
        """Note one activity by its monotonic times."""
        with self._lock:
            self._spans.append(Span(self._stage, kind, start_s, end_s, nbytes, label))

    @contextmanager
    def span(self, kind: Kind, nbytes: int = 0, label: str = "") -> Iterator[None]:
        """Note what happens inside, also where it ends in an error."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(kind, start, time.monotonic(), nbytes, label)

    def spans(self, origin_s: float = 0.0) -> tuple[Span, ...]:
        """All spans so far, relative to ``origin_s``."""
        with self._lock:
            return tuple(shifted(self._spans, origin_s))


def shifted(spans: Iterable[Span], origin_s: float) -> Iterator[Span]:
    """The same spans on a clock that begins at ``origin_s``."""
    for span in spans:
        yield replace(span, start_s=span.start_s - origin_s, end_s=span.end_s - origin_s)


def joined(spans: Sequence[Span], most: int) -> list[Span]:
    """The spans; where they are too many, neighbours of one kind become one, with their bytes."""
    found = sorted(spans, key=lambda span: (span.stage, span.kind.value, span.start_s))
    size = -(-len(found) // max(1, most))
    if size <= 1:
        return list(spans)
    result: list[Span] = []
    count = 0
    for span in found:
        last = result[-1] if result else None
        if last is None or (last.stage, last.kind) != (span.stage, span.kind) or count == size:
            result.append(span)
            count = 1
            continue
        end_s = max(last.end_s, span.end_s)
        result[-1] = replace(last, end_s=end_s, nbytes=last.nbytes + span.nbytes)
        count += 1
    return result


def busy_s(spans: Iterable[Span], start_s: float, end_s: float) -> float:
    """Seconds of an interval in which at least one of the spans was under way."""
    cut = sorted(
        (max(span.start_s, start_s), min(span.end_s, end_s))
        for span in spans
        if span.end_s > start_s and span.start_s < end_s
    )
    total, reached = 0.0, start_s
    for begin, end in cut:
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total
