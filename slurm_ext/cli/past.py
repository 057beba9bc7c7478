"""What Slurm's accounting says of a job that has left the queue.

Asked once, for a person who waits; its answer makes the words better. That there is no answer
(``None``: no slurmdbd, or it is away) is told apart from an answer without such a job.
"""

from __future__ import annotations

import pwd
from dataclasses import dataclass

from slurm_ext.domain.errors import SlurmCommandError
from slurm_ext.domain.spans import about, moment
from slurm_ext.domain.tres import parse_tres
from slurm_ext.slurm.parse_jobs import epoch
from slurm_ext.slurm.process import CommandRunner

_ANSWER_S = 5.0
_COLUMNS = "JobID,User,Partition,QOS,State,ExitCode,Start,End,AllocTRES"
# What the accounting still says of a job that has only just left, or was lost with its slurmctld.
_OPEN = frozenset({"RUNNING", "PENDING", "SUSPENDED", "REQUEUED"})


@dataclass(frozen=True, slots=True)
class Past:
    """One job or task, with times in seconds since the epoch. ``exit_code`` is CODE:SIGNAL."""

    job_id: str
    user: str
    partition: str
    qos: str
    state: str
    exit_code: str
    start_s: float | None
    end_s: float | None
    gpus: int

    @property
    def over(self) -> bool:
        """Whether the accounting has its end."""
        return self.state.partition(" ")[0] not in _OPEN

    def words(self, now: float) -> str:
        """When and how it ended, in one line."""
        if not self.over:
            return (
                f"has left the queue; Slurm's accounting does not have its end yet ({self.state})"
            )
        code, _, number = self.exit_code.partition(":")
        state = self.state
        by = state.removeprefix("CANCELLED by ")
        if by != state and by.isdecimal():
            state = f"CANCELLED by {_name_of(int(by))}"
        text = f"has ended: {state}"
        if code not in ("", "0"):
            text += f" with exit code {code}"
        if number not in ("", "0"):
            text += f" by signal {number}"
        if self.end_s is not None:
            text += f" at {moment(self.end_s, now)}"
            if self.start_s is not None:
                text += f", {about(self.end_s - self.start_s)} after its last start"
            else:
                text += ", without having started"
        return text


def ask(job_id: str, runner: CommandRunner) -> tuple[Past, ...] | None:
    """Its row, or those of an array's tasks; ``None`` where the accounting does not answer."""
    argv = ["sacct", "-X", "-n", "-P", "-j", job_id, "-o", _COLUMNS]
    try:
        text = runner.run(argv, timeout_s=_ANSWER_S).stdout
    except SlurmCommandError:
        return None
    found = []
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) != len(_COLUMNS.split(",")):
            return None
        start_s, end_s = epoch(cells[6]), epoch(cells[7])
        name, user, partition, qos, state, code = cells[:6]
        gpus = gpus_of(cells[8])
        found.append(Past(name, user, partition, qos, state, code, start_s, end_s, gpus))
    return tuple(found)


def gpus_of(tres: str) -> int:
    """GPUs of an allocation; 0 where the site does not track them."""
    try:
        return parse_tres(tres).gpus or 0
    except ValueError:
        return 0


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
