"""Runs Slurm's commands: the one place where a process is started.

Always an argument list, always a time limit, always the same environment: C locale, times as epoch
seconds, job arrays in full, and none of the ``SQUEUE_*`` variables with which a site or a user
changes what the commands print. A reader would question the new session: a command may be a site's
wrapper script, and killing only the script would leave its child holding the pipe, so the whole
group is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_ext.domain.errors import NO_SUCH_COMMAND, SlurmCommandError

DEFAULT_TIMEOUT_S = 30.0
# After a kill the pipes close at once unless a grandchild left the group; do not wait for that one.
_AFTER_KILL_S = 1.0
_FOREIGN_PREFIXES = ("SQUEUE_", "SINFO_", "SPRIO_", "SCONTROL_", "SACCTMGR_", "SDIAG_")
_FOREIGN = frozenset(
    {"SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN", "SLURM_UNITS", "SLURM_EXACT"}
)
_OURS = {
    "LC_ALL": "C",
    "LANG": "C",
    "SLURM_TIME_FORMAT": "%s",
    # Without TZ, glibc looks at /etc/localtime again for every time that squeue prints: with 5,000
    # jobs that is half of squeue's run time. It also makes ISO times in updates mean UTC.
    "TZ": "UTC0",
    # 0 = whole array expressions; by default Slurm cuts them after 64 characters with "...".
    "SLURM_BITSTR_LEN": "0",
}


def slurm_environment(base: Mapping[str, str]) -> dict[str, str]:
    """``base`` without what would change the commands' output, with what we rely on."""
    kept = {
        name: value
        for name, value in base.items()
        if not name.startswith(_FOREIGN_PREFIXES) and name not in _FOREIGN
    }
    return {**kept, **_OURS}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command printed. Text that is not UTF-8 is kept readable, never an error."""

    stdout: str
    stderr: str
    rc: int


class CommandRunner:
    """Runs commands on this machine."""

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if timeout_s <= 0:
            raise ValueError(f"a time limit of {timeout_s} s would let no command answer")
        self.timeout_s = timeout_s

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float | None = None,
        check: bool = True,
    ) -> Answer:
        """Run to the end and return what it printed.

        Raises SlurmCommandError where the command cannot be started, takes longer than the limit,
        is killed by a signal, or (with ``check``) ends with another code than 0.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        full = self.command(argv)
        try:
            process = subprocess.Popen(
                full,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=slurm_environment(os.environ),
                start_new_session=True,
            )
        except FileNotFoundError as exc:
            words = (
                f"{argv[0]} cannot be started: not found on PATH; run this on a machine with"
                " Slurm's commands, or add their directory to PATH"
            )
            raise SlurmCommandError(argv, NO_SUCH_COMMAND, words) from exc
        except OSError as exc:
            words = f"{argv[0]} cannot be started: {exc.strerror}; mend its rights, or PATH"
            raise SlurmCommandError(argv, NO_SUCH_COMMAND, words) from exc
        try:
            out, err = process.communicate(stdin.encode(), timeout=limit)
        except subprocess.TimeoutExpired as exc:
            _kill(process)
            raise SlurmCommandError(argv, None, unanswered(limit, exc.stderr)) from exc
        except BaseException:
            _kill(process)
            raise
        answer = Answer(
            out.decode(errors="replace"), err.decode(errors="replace"), process.returncode
        )
        if answer.rc < 0 or (check and answer.rc != 0):
            raise SlurmCommandError(argv, answer.rc, answer.stderr)
        return answer

    def command(self, argv: Sequence[str]) -> list[str]:
        """The argument list that is really run; a test that reaches Slurm elsewhere changes it."""
        return list(argv)


def unanswered(limit_s: float, stderr: bytes | None) -> str:
    """Why a command was given up. What it complained of meanwhile tells a dead munged from a
    controller that is away."""
    lines = (stderr or b"").decode(errors="replace").strip().splitlines()
    return f"no answer within {limit_s:g} s" + (f" ({lines[-1][:200]})" if lines else "")


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_AFTER_KILL_S)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
