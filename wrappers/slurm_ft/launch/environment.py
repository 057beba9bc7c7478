"""The environment of the user's program, and where the job's files lie.

A variable that the user has set stays as it is. Two kinds are not the user's: what ft-run itself
has done (job, attempt, status file), and what another ft-run chose and ``FT_CHOSEN`` lists: a job
that is submitted from inside a job inherits it, and would write into the state and checkpoints of
the other, and take that one's ranks for its own.
"""

from __future__ import annotations

import errno
import os
import stat

from slurm_ft import variables
from slurm_ft.launch.identity import same_job
from slurm_ft.launch.limited import LateError, within
from slurm_ft.launch.marks import Marks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from slurm_ft.launch.identity import Identity
    from slurm_ft.launch.options import Options
    from slurm_ft.launch.plan import Settled
    from slurm_ft.launch.timeouts import Timeouts

# The spool is the daemon's and may lie on a file server that hangs.
SPOOL_LIMIT_S = 5.0
# Holds what was asked in the directive until ft-run knows what holds.
_DIRECTIVE = (
    variables.GPUS,
    variables.PRECISION,
    variables.GRAD_CHECKPOINTING,
    variables.FROZEN,
)
_ALWAYS_OURS = (
    variables.JOB,
    variables.SLURM_JOB,
    variables.ATTEMPT,
    variables.STATUS,
    variables.NODES,
    variables.PLAN_DIGEST,
    variables.CHOSEN,
    *_DIRECTIVE,
)


# Read by the program as numbers, also where the user has given one of them as in 10m.
_TIMES = (
    variables.GRACE_S,
    variables.COLLECTIVE_TIMEOUT_S,
    variables.INIT_TIMEOUT_S,
    variables.CHECKPOINT_INTERVAL,
)
# Of one job alone, also where they were given on the command line of its ft-run.
_OF_ONE_JOB = (variables.CHECKPOINT_DIR, variables.STATE_DIR, variables.CHAIN)


class Paths:
    """Where the job's files lie; empty text where there is no such file."""

    __slots__ = ("checkpoint_dir", "progress", "spool", "state_dir", "status")

    def __init__(self) -> None:
        self.checkpoint_dir = ""
        self.progress = ""
        self.spool = ""
        self.state_dir = ""
        self.status = ""


def without_chosen(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what an ft-run further up has chosen."""
    own = dict(environment)
    kept = _OF_ONE_JOB if same_job(environment) else ()
    for name in own.pop(variables.CHOSEN, "").split(","):
        if name not in kept:
            own.pop(name, None)
    return own


def choose_paths(identity: Identity, options: Options) -> Paths:
    """Directories of the job. Outside Slurm there is no state: nothing ever comes back there."""
    paths = Paths()
    paths.spool = options["spool"] if identity.job_id else ""
    # Whole paths: the program may change its directory before the session opens.
    paths.checkpoint_dir = os.path.abspath(
        options["checkpoint-dir"]
        or os.path.join(identity.submit_dir, "ft-checkpoints", identity.job_id or "local")
    )
    if not identity.job_id and not options["state-dir"]:
        return paths
    paths.state_dir = os.path.abspath(
        options["state-dir"]
        or os.path.join(
            os.path.expanduser("~"), ".slurm-ext", "state", f"{identity.cluster}-{identity.job_id}"
        )
    )
    marks = Marks(paths.state_dir, identity.job_id or "local", identity.attempt, identity.step_id)
    paths.status = marks.status(identity.rank)
    return paths


def prepare(paths: Paths, identity: Identity) -> str:
    """Make the directories of this job. Returns what could not be had, empty where all is well.

    Without a state directory the program runs, and the job comes back from its checkpoints, but
    nothing is counted. The spool belongs to the daemon: only the user's own part is made.
    """
    missing = ""
    if paths.state_dir:
        try:
            os.makedirs(paths.state_dir, 0o700, exist_ok=True)
            # What a killed attempt of the same number said (a controller that lost its state).
            if os.path.lexists(paths.status):
                os.unlink(paths.status)
        except OSError as exc:
            missing = f"{paths.state_dir}: {exc.strerror}: attempts of this job are not counted"
            paths.state_dir = paths.status = ""
    if identity.leads:
        unreported = find_spool(paths, identity)
        missing = missing or unreported
    return missing


def find_spool(paths: Paths, identity: Identity) -> str:
    """Find the user's own part of the spool. Returns why there is none, where there should be."""
    if not paths.spool:
        return ""
    own = os.path.join(paths.spool, str(os.getuid()))
    try:
        if within(SPOOL_LIMIT_S, lambda: _usable(paths.spool, own)):
            paths.progress = os.path.join(own, f"progress-{identity.job_id}.json")
    except LateError:
        return f"{own}: no answer in {SPOOL_LIMIT_S:g} s: progress is not reported"
    except OSError as exc:
        return f"{own}: {exc.strerror}: progress is not reported"
    return ""


def _usable(spool: str, own: str) -> bool:
    """Whether the user's part of the spool can be written; makes it where the spool exists."""
    if not os.path.isdir(spool):
        return False
    # Another job of this user may be as fast.
    os.makedirs(own, 0o755, exist_ok=True)
    info = os.lstat(own)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        # Who made it could exchange what lies in it, or send it elsewhere.
        raise PermissionError(errno.EPERM, f"it is no directory of user {os.getuid()}")
    return os.access(own, os.W_OK)


def compose(
    environment: Mapping[str, str],
    identity: Identity,
    options: Options,
    paths: Paths,
    timeouts: Timeouts,
    settled: Settled,
    port: int,
) -> dict[str, str]:
    """The program's environment."""
    ours = {
        variables.JOB: identity.job_id,
        variables.SLURM_JOB: identity.said,
        variables.ATTEMPT: str(identity.attempt),
        variables.STATE_DIR: paths.state_dir,
        variables.STATUS: paths.status,
        variables.PROGRESS: paths.progress,
        variables.CHECKPOINT_DIR: paths.checkpoint_dir,
        variables.BLOCK_STORE: options["block-store"],
        variables.CHAIN: os.path.abspath(options["chain"]) if options["chain"] else "",
        variables.SIGNALS: options["signals"],
        variables.GRACE_S: options["grace"],
        variables.CHECKPOINT_INTERVAL: options["checkpoint-interval"],
        variables.CHECKPOINT_QUOTA: options["checkpoint-quota"],
        **timeouts.variables(),
        **settled.values,
        "MASTER_ADDR": identity.head(),
        "MASTER_PORT": str(port),
    }
    if not identity.launcher and not identity.starter:
        ours["RANK"] = str(identity.rank)
        ours["WORLD_SIZE"] = str(identity.size)
        ours["LOCAL_RANK"] = str(identity.local_rank)
    # An option of the command line is the user's word, also against the user's environment.
    spoken = {
        variables.CHECKPOINT_DIR: "checkpoint-dir",
        variables.STATE_DIR: "state-dir",
        variables.BLOCK_STORE: "block-store",
        variables.CHAIN: "chain",
        variables.SIGNALS: "signals",
        variables.GRACE_S: "grace",
        variables.COLLECTIVE_TIMEOUT_S: "collective-timeout",
        variables.CHECKPOINT_INTERVAL: "checkpoint-interval",
        variables.CHECKPOINT_QUOTA: "checkpoint-quota",
    }
    result = dict(environment)
    for name in _ALWAYS_OURS:
        if name not in (variables.PRECISION, variables.GRAD_CHECKPOINTING, variables.FROZEN):
            result.pop(name, None)
    chosen: list[str] = []
    for name, value in ours.items():
        if not value:
            continue
        theirs = name in environment and name not in _ALWAYS_OURS
        if theirs and not (name in spoken and spoken[name] in options.given):
            if name in _TIMES:
                result[name] = value
            continue
        result[name] = value
        # What was said on a command line is the user's word and goes where the environment goes,
        # but for what is this job's own. FT_SLURM_JOB says itself which job it is about.
        said = name in spoken and spoken[name] in options.given
        users = said and (name not in _OF_ONE_JOB or environment.get(name) == value)
        if not users and name != variables.SLURM_JOB:
            chosen.append(name)
    result[variables.CHOSEN] = ",".join(sorted({*chosen, variables.CHOSEN}))
    return result
