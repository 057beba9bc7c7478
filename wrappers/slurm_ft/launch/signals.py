"""What a signal means to ft-run, and who has it already.

Slurm signals every process of a step at once, whatever its process group (proctrack/cgroup and
linuxproc; seen: a child in a group of its own gets TERM and USR2 directly). Passing such a signal
on would make it two, and a second signal means "at once". So only what came from elsewhere is
passed on, and what Slurm sent under proctrack/pgid, which knows one group only.
"""

from __future__ import annotations

import signal

from slurm_ft.launch.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# Passed on to the program as they are. Not in the list: what cannot be caught, what is meant for
# one process (SEGV and its like), CHLD, and the stops of job control, which Slurm and the terminal
# send to everybody themselves.
PASSED_ON = frozenset(
    {
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGALRM,
        signal.SIGWINCH,
        signal.SIGCONT,
        signal.SIGXCPU,
    }
)
_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")


def parse_signals(text: str, place: str = "--signals") -> tuple[signal.Signals, ...]:
    """``USR2,TERM`` to signals. Raises UsageError for what cannot mean "save and come back"."""
    found: list[signal.Signals] = []
    for word in text.split(","):
        name = word.strip().upper()
        try:
            number = signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
        except KeyError:
            number = None
        if number is None or number not in PASSED_ON or number is signal.SIGCONT:
            raise UsageError(
                f"{place}={text}: {word!r} is no signal that can mean save and come back; write"
                " for example USR2,TERM"
            )
        if number not in found:
            found.append(number)
    return tuple(found)


def usr1_warning(signals: tuple[signal.Signals, ...]) -> str:
    """NCCL's releases of mid-2022 catch USR1 in their proxy thread: it then never arrives."""
    if signal.SIGUSR1 not in signals:
        return ""
    return "--signals has USR1, which some releases of NCCL swallow; USR2 is safe (sbatch --signal)"


def sent_by_slurm(sender: int, proc: str = "/proc") -> bool:
    """Whether a signal came from the step's slurmstepd.

    0 is a sender outside this process's pid namespace, which is where slurmstepd is when the step
    runs in a container.
    """
    if sender == 0:
        return True
    try:
        with open(f"{proc}/{sender}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().startswith("slurmstepd")
    except OSError:
        return False


def signals_one_group_only(environment: Mapping[str, str]) -> bool:
    """Whether Slurm tracks the step by process group (proctrack/pgid)."""
    return slurm_setting(environment, "ProctrackType").lower().startswith("proctrack/pgid")


def slurm_setting(environment: Mapping[str, str], key: str) -> str:
    """A value of slurm.conf as this node has it; empty where it is not set there or not readable.

    From the file, since asking the controller would be a request per rank.
    """
    for path in (environment.get("SLURM_CONF", ""), *_CONFIGURATIONS):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                lines = file.readlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.strip().partition("=")
            if name.strip().lower() == key.lower():
                return value.partition("#")[0].strip()
        return ""
    return ""
