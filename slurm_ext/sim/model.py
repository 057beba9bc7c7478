"""The jobs that go into a replay, and the runs that come out of it. Data only.

A *run* is one start of a job: a job that is stopped and started again has several, and its time in
the queue, its GPUs and its work are spread over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.errors import SlurmExtError


class SimulationError(SlurmExtError):
    """A replay cannot go on, or a policy broke its contract."""


@dataclass(frozen=True, slots=True)
class SimJob:
    """A job as the replay knows it.

    ``candidates`` is what the policy may see; ``true_run_s`` (GPU count -> seconds) is what
    happens, and ``true_by_placement`` overrules it where the nodes matter beyond their number.
    Both tell a whole run from the beginning, of which ``start_up_s`` is no work and is paid at
    every start; ``cold_s`` of that is spent on loading the model, which a pipeline switch avoids.
    ``limit_s`` is the user's time limit. ``error_free_s`` is the run at the requested GPUs without
    the hidden error, the yardstick of slowdown. ``gpu_type`` names the job's pool.
    """

    job_id: str
    submit_s: float
    gpus: int
    limit_s: float
    candidates: tuple[Candidate, ...]
    true_run_s: Mapping[int, float]
    error_free_s: float
    user: str = "user"
    model: str = ""
    gpu_type: str = ""
    start_up_s: float = 0.0
    cold_s: float = 0.0
    true_by_placement: Mapping[tuple[int, ...], float] = field(default_factory=dict)

    def true_s(self, configuration: Configuration) -> float | None:
        """Seconds of a whole run, None where the configuration is not one of the job's."""
        found = self.true_by_placement.get(configuration.placement)
        return self.true_run_s.get(configuration.gpus) if found is None else found

    def candidate(self, configuration: Configuration) -> Candidate | None:
        """What was offered as this configuration, else as this GPU count."""
        same = [item for item in self.candidates if item.gpus == configuration.gpus]
        return next(
            (item for item in same if item.configuration.placement == configuration.placement),
            same[0] if same else None,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One start of one job, with the GPUs it held on each node.

    ``submit_s`` is the job's first submission, ``queued_s`` since when it waited for this start
    (None: since then). ``share`` is the part of the job's work that this run did and kept,
    ``lost_s`` the seconds of it that were none: start-up, and steps that an outage undid.
    ``cause`` tells why it ended: done, stop, resize or outage.
    """

    job_id: str
    submit_s: float
    start_s: float
    end_s: float
    gpus: int
    seats: Mapping[str, int]
    error_free_s: float
    queued_s: float | None = None
    share: float = 1.0
    lost_s: float = 0.0
    cause: str = "done"


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a replay did. ``refused_starts`` counts STARTs of a plan that found no room.

    ``runs`` are in the order of the job list, the runs of one job by time.
    """

    policy: str
    gpus: int
    runs: tuple[Run, ...]
    decisions: int = 0
    refused_starts: int = 0
