"""What a user asks of the daemon through the spool, and where files lie in it.

Paths and forms only; nothing here opens a file. The login node, the job and the daemon all take
them from here. Layout below the spool (world-writable and sticky, owned by the daemon)::

    plans/<job>.json            one plan document per job, owned by the daemon
    plans/cluster.json          what the daemon does as a whole
    plans/throughput.sqlite     a copy of the throughput table, for explain --script
    plans/daemon.lock           held by the daemon whose spool this is
    <uid>/progress-<id>.json    progress of a running job, owned by the user
    <uid>/attempts-<id>.json    its attempts so far, owned by the user
    <uid>/request-<job>.json    the user's last request about a job

``<job>`` is the number of the job, or of the array as a whole; ``<id>`` is the job's own id, with
an array's task as ``123_4``. A request states what shall hold, not what shall happen, so that
reading it twice changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from slurm_ext.domain.codec import dumps, loads
from slurm_ext.domain.errors import ProtocolError

REQUEST_VERSION = 1
MAX_REQUEST_BYTES = 4096
MAX_PINNED_GPUS = 65536

PLANS = "plans"
CLUSTER_FILE = "cluster.json"
TABLE_FILE = "throughput.sqlite"
PROGRESS_PREFIX = "progress-"
ATTEMPTS_PREFIX = "attempts-"
REQUEST_PREFIX = "request-"
SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class PinRequest:
    """``slurm-ext pin``: whether the daemon may choose the GPU count of a job.

    ``pinned`` false takes an earlier pin back. ``gpus`` is the count to keep, ``None`` the count
    as submitted.
    """

    job_id: int
    pinned: bool
    at_s: float
    gpus: int | None = None
    version: int = REQUEST_VERSION

    def to_json(self) -> str:
        """One line of JSON."""
        return dumps(self)


def parse_pin_request(text: str, place: str) -> PinRequest:
    """Read a request that an untrusted writer made, or raise ProtocolError naming ``place``."""
    if len(text.encode(errors="replace")) > MAX_REQUEST_BYTES:
        raise ProtocolError(f"{place}: longer than {MAX_REQUEST_BYTES} bytes; not read")
    request = loads(PinRequest, text, place)
    if request.version != REQUEST_VERSION:
        raise ProtocolError(
            f"{place}: version {request.version}, this side knows {REQUEST_VERSION}"
        )
    if not 0 < request.job_id < 2**32:
        raise ProtocolError(f"{place}: job_id={request.job_id} is not a job id")
    if request.gpus is not None and not 0 < request.gpus <= MAX_PINNED_GPUS:
        raise ProtocolError(f"{place}: gpus={request.gpus} is outside 1..{MAX_PINNED_GPUS}")
    return request


def plan_path(spool: PurePath, base_id: int) -> PurePath:
    """Plan document of a job or of an array as a whole."""
    return spool / PLANS / f"{base_id}{SUFFIX}"


def cluster_path(spool: PurePath) -> PurePath:
    """What the daemon does as a whole: mode, policy, time of the last plan."""
    return spool / PLANS / CLUSTER_FILE


def table_path(spool: PurePath) -> PurePath:
    """Copy of the throughput table: the table itself lies on a disk that users do not see."""
    return spool / PLANS / TABLE_FILE


def user_dir(spool: PurePath, uid: int) -> PurePath:
    """Directory that belongs to one user."""
    return spool / str(uid)


def progress_path(spool: PurePath, uid: int, job_id: str) -> PurePath:
    """Progress file of a running job or of one task of an array."""
    return user_dir(spool, uid) / f"{PROGRESS_PREFIX}{job_id}{SUFFIX}"


def attempts_path(spool: PurePath, uid: int, job_id: str) -> PurePath:
    """Attempts of a job or of one task of an array."""
    return user_dir(spool, uid) / f"{ATTEMPTS_PREFIX}{job_id}{SUFFIX}"


def request_path(spool: PurePath, uid: int, base_id: int) -> PurePath:
    """The user's last request about a job."""
    return user_dir(spool, uid) / f"{REQUEST_PREFIX}{base_id}{SUFFIX}"
