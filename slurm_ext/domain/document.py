"""The documents that the daemon writes into the spool: one per job, and one for the whole.

A document holds everything that ``slurm-ext explain`` and ``slurm-ext queue`` tell, so that they
work without asking the daemon, and what is ours on the job (``ours``), so that a lost journal can
be rebuilt. It is advice: inside the job the allocation that Slurm granted is the truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from slurm_ext.domain.attempt import Attempt
from slurm_ext.domain.codec import dumps, loads
from slurm_ext.domain.configuration import Candidate
from slurm_ext.domain.errors import ProtocolError
from slurm_ext.domain.estimate import Estimate
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.plan import Decision, SolveInfo
from slurm_ext.domain.policy import Permit
from slurm_ext.domain.progress import Hold

DOCUMENT_VERSION = 1
# State of a job that has left the queue; its document stays to be read for a while.
ENDED = "ENDED"


class Mode(StrEnum):
    """What the daemon may do.

    OBSERVE   plans and logs, changes nothing
    ACTING    acts where the configuration has switched it on
    RELEASED  an administrator took everything back; observes until it is told to go on
    """

    OBSERVE = "observe"
    ACTING = "acting"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class Truth:
    """What a job itself last reported, and what follows from it. Times are epoch seconds.

    ``attempt`` is the attempt that reported. ``ends_s`` is the predicted end, ``None`` while the
    job waits. ``checkpoint_s`` is when the last complete checkpoint was written, ``save_s`` how
    long that took. ``save_error`` is why the last save failed, empty where it succeeded.
    ``hold`` is the pause under way, ``restored_step`` the step that the attempt began from.
    """

    at_s: float
    attempt: int
    step: int
    samples: int
    samples_per_s: float
    total_steps: int | None = None
    total_samples: int | None = None
    checkpoint_step: int | None = None
    checkpoint_s: float | None = None
    save_s: float | None = None
    ends_s: Estimate | None = None
    save_error: str = ""
    hold: Hold | None = None
    restored_step: int | None = None


@dataclass(frozen=True, slots=True)
class Correction:
    """How far the throughput table is off for one model (and GPU type), told by its jobs.

    ``factor`` is what the table's throughput is multiplied by, ``jobs`` how many jobs told so.
    """

    model: str
    gpu_type: str
    factor: float
    jobs: int


@dataclass(frozen=True, slots=True)
class StaleRow:
    """A configuration that stays off after its model was corrected: to be measured again.

    ``factor`` is measured over corrected, told by ``jobs`` jobs. ``placement`` are the GPUs on each
    node.
    """

    model: str
    gpu_type: str
    placement: tuple[int, ...]
    local_batch: int
    accumulation: int
    factor: float
    jobs: int


@dataclass(frozen=True, slots=True)
class PlanDocument:
    """What is planned for one job, and everything that led to it.

    ``place`` counts from 1 among our jobs of the partition and QOS, ``places`` how many there
    are; ``foreign_ahead`` are jobs that are not ours with a higher priority in the same partition.
    ``candidates`` are the configurations that were considered, ``refused`` the GPU counts that
    were not, each with its reason. ``requested_gpus`` is what was submitted, ``present_gpus`` what
    Slurm would grant now. ``ours`` is what the daemon has written to the job. ``truth`` is what the
    job itself reported last, ``attempts`` are its starts so far as its ``ft-run`` tells them.
    ``attempt`` is Slurm's restart count, ``starts`` how often the job was started so far.
    ``state`` is Slurm's, or ``ENDED`` once the job has left the queue. A document is written again
    when what it tells changes, so ``made_s`` says since when it holds, not how old the plan is.
    """

    job_id: str
    base_id: int
    user: str
    partition: str
    made_s: float
    mode: Mode
    policy: str
    decision: Decision
    permit: Permit
    uid: int | None = None
    qos: str = ""
    account: str = ""
    state: str = ""
    slurm_reason: str = ""
    priority: int = 0
    requested_gpus: int = 0
    present_gpus: int = 0
    waiting_since_s: float = 0.0
    place: int | None = None
    places: int = 0
    foreign_ahead: int = 0
    candidates: tuple[Candidate, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    solve: SolveInfo | None = None
    ours: LedgerEntry | None = None
    attempt: int = 0
    starts: int = 0
    truth: Truth | None = None
    attempts: tuple[Attempt, ...] = ()
    version: int = DOCUMENT_VERSION

    def tells_of(self, job: str) -> bool:
        """Whether this is about the named job, or about the named task of an array.

        An array has one document: of its pending rest (``8_[0-2,5]``), of the whole (``8``), or of
        the one task that is planned by itself (``8_3``). ``8`` names whichever it is.
        """
        base, _, task = job.partition("_")
        if not task.isdecimal() or self.job_id in (base, job):
            return True
        parts = self.job_id.partition("_")[2].strip("[]").split(",")
        bounds = (part.partition("-") for part in parts)
        return any(
            low.isdecimal() and int(low) <= int(task) <= int(high or low) for low, _, high in bounds
        )

    @property
    def lease_until_s(self) -> float | None:
        """Until when the job's earliest start is ours, ``None`` when no lease is out."""
        return self.ours.lease_until_s if self.ours is not None else None

    def to_json(self) -> str:
        """One line of JSON."""
        return dumps(self)


@dataclass(frozen=True, slots=True)
class ClusterDocument:
    """What the daemon does as a whole, as of its last complete cycle.

    ``corrections`` are the models for which the throughput table is corrected, ``stale`` the
    configurations that have to be measured again (``slurm-ext table stale``).
    """

    made_s: float
    mode: Mode
    policy: str
    cycle: int
    cycle_s: float
    lease_s: float
    acting: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refusals: tuple[str, ...] = ()
    solves: tuple[SolveInfo, ...] = ()
    jobs: int = 0
    verdicts: Mapping[str, int] = field(default_factory=dict)
    corrections: tuple[Correction, ...] = ()
    stale: tuple[StaleRow, ...] = ()
    version: int = DOCUMENT_VERSION

    def to_json(self) -> str:
        """One line of JSON."""
        return dumps(self)


def parse_plan_document(text: str, place: str) -> PlanDocument:
    """Read a plan document, or raise ProtocolError naming ``place``."""
    document = loads(PlanDocument, text, place)
    _check_version(document.version, place)
    return document


def parse_cluster_document(text: str, place: str) -> ClusterDocument:
    """Read the document of the whole, or raise ProtocolError naming ``place``."""
    document = loads(ClusterDocument, text, place)
    _check_version(document.version, place)
    return document


def _check_version(version: int, place: str) -> None:
    if version != DOCUMENT_VERSION:
        raise ProtocolError(
            f"{place}: document version {version}, this side knows {DOCUMENT_VERSION}: install the"
            " same release of slurm-ext on both sides"
        )
