"""From what the jobs and Slurm wrote down to runs of the workload, with every job accounted for.

Times come from stamps that the jobs themselves wrote in microseconds: Slurm's records have whole
seconds, and at scale 60 a second is a minute of the workload. Slurm's records are the witness:
state, GPUs and times of every job have to agree, or the replay has failed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ci.replay.jobs import ReplayJob
from slurm_ext.domain.errors import SlurmExtError
from slurm_ext.domain.nodelist import expand
from slurm_ext.sim.engine import Run

# sacct has whole seconds, and a job is launched a moment after Slurm counts it as started, more on
# a machine that is short of CPU.
CLOCK_TOLERANCE_S = 5.0
SACCT_FIELDS = ("JobIDRaw", "JobName", "State", "Start", "End", "AllocTRES")


class ReplayFailedError(SlurmExtError):
    """A replay whose result would not be the whole truth."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a job, in real seconds since the epoch. ``end_s`` None: it was stopped."""

    job_id: str
    restart: int
    start_s: float
    end_s: float | None
    seats: Mapping[str, int]

    @property
    def gpus(self) -> int:
        """GPUs over all nodes."""
        return sum(self.seats.values())


@dataclass(frozen=True, slots=True)
class Witness:
    """What Slurm's accounting says of a job; times in epoch seconds."""

    job_id: str
    name: str
    state: str
    start_s: float
    end_s: float
    gpus: int


def parse_stamps(text: str, name: str) -> tuple[Attempt, ...]:
    """Attempts of one job from its stamp file, in the order in which they were made."""
    attempts: list[Attempt] = []
    for line in text.splitlines():
        words = line.split()
        try:
            match words:
                case ["start", at, job_id, restart, gpus, nodelist, tasks]:
                    seats = _seats(nodelist, tasks)
                    if sum(seats.values()) != int(gpus):
                        raise ValueError(f"{gpus} GPUs do not fit {tasks} on {nodelist}")
                    attempts.append(Attempt(job_id, int(restart), float(at), None, seats))
                case ["end", at, job_id, restart]:
                    last = attempts[-1]
                    if (last.job_id, last.restart) != (job_id, int(restart)):
                        raise ValueError("an end without its start")
                    attempts[-1] = Attempt(
                        last.job_id, last.restart, last.start_s, float(at), last.seats
                    )
                case _:
                    raise ValueError("unknown line")
        except (ValueError, IndexError, SlurmExtError) as exc:
            raise ReplayFailedError(f"stamps of job {name}: {line!r}: {exc}") from exc
    return tuple(attempts)


def _seats(nodelist: str, tasks_per_node: str) -> dict[str, int]:
    """GPUs per node from SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE (one GPU for each task)."""
    counts: list[int] = []
    for group in tasks_per_node.split(","):
        count, _, times = group.partition("(x")
        counts += [int(count)] * (int(times.rstrip(")")) if times else 1)
    return dict(zip(expand(nodelist), counts, strict=True))


def parse_sacct(text: str) -> dict[str, Witness]:
    """Job name -> what `sacct -X -n -P` with SACCT_FIELDS and SLURM_TIME_FORMAT=%s printed."""
    found: dict[str, Witness] = {}
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) != len(SACCT_FIELDS):
            raise ReplayFailedError(f"sacct answered {line!r}, not {'|'.join(SACCT_FIELDS)}")
        job_id, name, state, start, end, tres = cells
        gpus = dict(part.partition("=")[::2] for part in tres.split(",")).get("gres/gpu", "0")
        found[name] = Witness(job_id, name, state, _time(start), _time(end), int(gpus))
    return found


def _time(text: str) -> float:
    return float(text) if text.isdigit() else float("nan")


@dataclass(frozen=True, slots=True)
class Record:
    """One job of the replay, finished, in workload seconds since the first submission.

    ``scattered`` tells that Slurm spread it over more nodes than its GPU count needs: a real job
    would then be slower than the sleeping one.
    """

    run: Run
    requested_gpus: int
    scattered: bool


def as_rows(records: Sequence[Record]) -> list[dict[str, object]]:
    """What happened to each job, for a file: workload seconds, to a hundredth."""
    return [
        {
            "job_id": record.run.job_id,
            "submit_s": round(record.run.submit_s, 2),
            "start_s": round(record.run.start_s, 2),
            "end_s": round(record.run.end_s, 2),
            "nodes": dict(record.run.seats),
        }
        for record in records
    ]


def account(
    jobs: Sequence[ReplayJob],
    submissions: Mapping[str, float],
    stamps: Mapping[str, str],
    witnesses: Mapping[str, Witness],
    scale: float,
    gpus_per_node: int,
) -> tuple[Record, ...]:
    """A record of every job; ReplayFailedError names each job that is not accounted for."""
    if not submissions:
        raise ReplayFailedError("no job was submitted")
    origin = min(submissions.values())
    records: list[Record] = []
    problems: list[str] = []
    for job in jobs:
        if job.name not in submissions:
            problems.append(f"{job.name} was never submitted")
            continue
        attempts = parse_stamps(stamps.get(job.name, ""), job.name)
        complaint = _complaint(job, attempts, witnesses.get(job.name))
        if complaint:
            problems.append(f"{job.name} ({job.workload.job_id}) {complaint}")
            continue
        attempt = attempts[0]
        run = Run(
            job_id=job.name,
            submit_s=(submissions[job.name] - origin) * scale,
            start_s=(attempt.start_s - origin) * scale,
            end_s=((attempt.end_s or attempt.start_s) - origin) * scale,
            gpus=attempt.gpus,
            seats=attempt.seats,
            error_free_s=job.error_free_s,
        )
        fewest = math.ceil(attempt.gpus / gpus_per_node)
        records.append(Record(run, job.workload.gpus, len(attempt.seats) > fewest))
    if problems:
        raise ReplayFailedError(
            f"{len(problems)} of {len(jobs)} jobs are not accounted for: " + "; ".join(problems)
        )
    return tuple(records)


def _complaint(job: ReplayJob, attempts: Sequence[Attempt], witness: Witness | None) -> str:
    """Why the job's own story and Slurm's do not agree on a finished job; empty if they do."""
    if not attempts:
        return "never started"
    if len(attempts) > 1:
        return f"was started {len(attempts)} times, although nothing here stops a job"
    last = attempts[0]
    if last.end_s is None:
        return "started and did not finish"
    if witness is None:
        return "is unknown to sacct"
    if witness.state != "COMPLETED":
        return f"is {witness.state} for Slurm"
    if witness.job_id != last.job_id:
        return f"is job {last.job_id} for itself and {witness.job_id} for Slurm"
    if witness.gpus != last.gpus:
        return f"counted {last.gpus} GPUs, Slurm accounts {witness.gpus}"
    if not abs(witness.start_s - last.start_s) <= CLOCK_TOLERANCE_S:
        return f"started at {last.start_s:.1f}, for Slurm at {witness.start_s:.0f}"
    if not abs(witness.end_s - last.end_s) <= CLOCK_TOLERANCE_S:
        return f"ended at {last.end_s:.1f}, for Slurm at {witness.end_s:.0f}"
    short_s = job.sleep_s.get(last.gpus, float("inf")) - (last.end_s - last.start_s)
    if short_s > 0.01:
        return f"ran {short_s:.2f} s less than {last.gpus} GPUs take"
    return ""
