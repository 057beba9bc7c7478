"""``slurm-ext check``: is everything set up? Each line is ok, or says how to mend it.

The questions about Slurm's configuration are a pure function of what Slurm says about itself
(`slurm_questions`), so that a table of small configurations tests them. Nothing is changed. A
line that must be mended makes the exit code 1; advice does not.
"""

from __future__ import annotations

import argparse
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from slurm_ext.cli import check_visitor
from slurm_ext.cli.backend import open_backend
from slurm_ext.cli.check_requeue import longest_save_s, requeue_questions, victims_of
from slurm_ext.cli.check_visitor import Visitor, visitor
from slurm_ext.cli.checkline import Level as Level
from slurm_ext.cli.checkline import Line as Line
from slurm_ext.cli.checkline import advice as _advice
from slurm_ext.cli.checkline import mend as _mend
from slurm_ext.cli.checkline import ok as _ok
from slurm_ext.cli.daemon import add_config_options
from slurm_ext.control.config import Act, Config, load_config
from slurm_ext.control.files import is_there
from slurm_ext.control.heartbeat import is_stale, last_beat
from slurm_ext.control.journal import Journal
from slurm_ext.control.locks import daemon_lives
from slurm_ext.control.permits import facts_from
from slurm_ext.control.released import is_released, released_mark
from slurm_ext.control.spool import Spool
from slurm_ext.domain.errors import DataError, SourceMissingError
from slurm_ext.domain.request import PLANS
from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.domain.spans import counted
from slurm_ext.estimate.table import load_index
from slurm_ext.slurm.backend import Backend
from slurm_ext.slurm.facts import Identity, SlurmConfig
from slurm_ext.slurm.process import CommandRunner

# Jobs that Slurm's schedulers look at in one pass. Below this our order reaches only the head of
# a long queue; the defaults of Slurm are 500 and 100.
LEAST_DEPTH = 1000
_DEFAULT_BF_MAX_JOB_TEST = 500
_DEFAULT_QUEUE_DEPTH = 100
DEFAULT_GRACE_S = 5.0  # of the Lua module, where config.lua does not say otherwise
OLDEST_RELEASE = (22, 5)
TESTED_RELEASES = ((24, 11), (26, 5))
ON_SLURMCTLD = "look on slurmctld's machine"
# Slurm stamps whole seconds, so a clock that is right may seem a second off.
MAX_SKEW_S = 2.0
_SHARED_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.glusterfs", "cifs", "smb3"}
)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    parser = subparsers.add_parser(
        "check",
        help="is everything set up? each line ok or how to mend it",
        description="Look at configuration, rights, Slurm, plugin, Lua module, tables, spool and"
        " clocks. Run it as the daemon's user on the daemon's machine; what somebody else cannot"
        " see is called unseen. Exit code 1 when a line says mend.",
    )
    add_config_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print every line."""
    config = load_config(args.config, overrides=args.overrides)
    acting = sorted(name for name, settings in config.partitions.items() if settings.act)
    words = f"acting in {', '.join(acting)}" if acting else "observing only"
    who = visitor(config)
    lines = [_ok("configuration", f"policy {config.policy}, {words}")]
    lines += _local(config) if who is None else _local_seen(config, who)
    lines += _slurm(config, who)
    for line in lines:
        print(line)
    hidden = sum(line.level is Level.UNSEEN for line in lines)
    if who is not None and hidden:
        print(
            f"slurm-ext: {counted(hidden, 'line')} not visible to {who.user}; run as root or"
            f" {who.daemon} for the whole check",
            file=sys.stderr,
        )
    return 1 if any(line.level is Level.MEND for line in lines) else 0


# -- Slurm ---------------------------------------------------------------------------------------


def _slurm(config: Config, who: Visitor | None = None) -> Iterator[Line]:
    backend = open_backend(config)
    runner = CommandRunner(config.command_timeout_s)
    try:
        slurm = backend.slurm_config()
    except SourceMissingError as exc:
        yield _mend("slurmctld", str(exc), "start it, and let this machine reach it")
        return
    yield from slurm_questions(slurm, config)
    for name, ask in (
        ("rights", lambda: _rights(backend, who)),
        ("queue", lambda: cluster_questions(backend.snapshot(), config)),
        ("requeueing", lambda: requeueing(slurm, config, backend.snapshot(), runner)),
        ("plugin", lambda: plugin(runner)),
        ("clock", lambda: clock(runner)),
    ):
        yield from _asked(name, ask)
    for line in lua(slurm, config):
        yield line if who is None else _lua_seen(line, who)


def _rights(backend: Backend, who: Visitor | None) -> Iterator[Line]:
    if who is None:
        return rights(backend.identity())
    return iter([who.cannot_see("rights", f"what {who.daemon} may do in Slurm")])


def _lua_seen(line: Line, who: Visitor) -> Line:
    """A file of slurmctld's that another user may read, or that lies on another machine."""
    if line.level is Level.ADVICE and line.fix == ON_SLURMCTLD:
        return who.cannot_see(line.name, line.found)
    return line


def requeueing(
    slurm: SlurmConfig, config: Config, snapshot: Snapshot, runner: CommandRunner
) -> Iterator[Line]:
    """Do jobs come back after preemption, in time and with everything saved?"""
    victims = victims_of(slurm, snapshot.partitions, runner)
    try:
        documents = list(Spool(config.spool).read_plans().values())
    except SourceMissingError:
        documents = []  # another line tells what is wrong with the spool
    yield from requeue_questions(slurm, victims, longest_save_s(documents), lifts=config.acting)


def _asked(name: str, ask: Callable[[], Iterator[Line]]) -> list[Line]:
    try:
        return list(ask())
    except SourceMissingError as exc:
        return [_mend(name, str(exc), "mend that command first")]


def slurm_questions(slurm: SlurmConfig, config: Config) -> Iterator[Line]:
    """Version and parameters. Pure."""
    yield _release(slurm)
    facts = facts_from(slurm)
    if facts.multifactor:
        yield _ok("PriorityType", "priority/multifactor")
    else:
        yield _mend(
            "PriorityType",
            slurm.priority_type or "unknown",
            "set PriorityType=priority/multifactor",
        )
    if facts.site_factor_plugin:
        yield _mend(
            "site_factor", facts.site_factor_plugin, "unset PrioritySiteFactorPlugin in slurm.conf"
        )
    else:
        yield _ok("site_factor", "no plugin")
    lease = any(config.may(name, Act.LEASE) for name in config.partitions)
    if facts.lease_refusal():
        line = _mend if lease else _advice
        yield line("leases", facts.lease_refusal(), "add PriorityFlags=ACCRUE_ALWAYS")
    else:
        yield _ok("leases", "do not cost jobs their age")
    yield from _scheduler(slurm, resizing=lease)
    if slurm.preempt_type and "off" not in slurm.preempt_mode:
        if "send_user_signal" in slurm.preempt_parameters:
            yield _ok("preemption", "send_user_signal is set")
        else:
            yield _advice(
                "preemption",
                "jobs do not get their own --signal",
                "add PreemptParameters=send_user_signal",
            )


def _release(slurm: SlurmConfig) -> Line:
    if slurm.release < OLDEST_RELEASE:
        return _mend("slurm", slurm.version or "unknown version", "22.05 or newer is needed")
    if slurm.release not in TESTED_RELEASES:
        tested = " and ".join(f"{year:02d}.{month:02d}" for year, month in TESTED_RELEASES)
        return _advice("slurm", slurm.version, f"tested with {tested}; observe before acting")
    return _ok("slurm", slurm.version)


def _scheduler(slurm: SlurmConfig, *, resizing: bool) -> Iterator[Line]:
    tracked = slurm.get("AccountingStorageTRES")
    if "gres/gpu" in tracked.lower():
        yield _ok("AccountingStorageTRES", tracked)
    else:
        yield _advice(
            "AccountingStorageTRES",
            tracked or "empty",
            "add gres/gpu, so that GPUs are accounted, limited and read exactly",
        )
    parameters = slurm.scheduler_parameters
    if slurm.scheduler_type != "backfill":
        yield _advice(
            "SchedulerType", slurm.scheduler_type or "unknown", "set SchedulerType=sched/backfill"
        )
    else:
        yield _ok("SchedulerType", "sched/backfill")
    for name, default in (
        ("bf_max_job_test", _DEFAULT_BF_MAX_JOB_TEST),
        ("default_queue_depth", _DEFAULT_QUEUE_DEPTH),
    ):
        text = parameters.get(name, "")
        depth = int(text) if text.isdigit() else default
        if depth < LEAST_DEPTH:
            yield _advice(
                name,
                f"{depth} jobs",
                f"add SchedulerParameters={name}={LEAST_DEPTH}, or jobs behind it are not seen",
            )
        else:
            yield _ok(name, f"{depth} jobs")
    if "disable_job_shrink" in parameters:
        yield _ok("disable_job_shrink", "set")
    else:
        line = _mend if resizing else _advice
        yield line(
            "disable_job_shrink",
            "not set",
            "add SchedulerParameters=disable_job_shrink, so that a late resize cannot take ranks"
            " from a job that has just started",
        )


def rights(identity: Identity) -> Iterator[Line]:
    """May we write to other people's jobs?"""
    level = identity.admin_level or "no AdminLevel"
    if identity.operator:
        yield _ok("rights", f"{identity.user} is {level}")
    else:
        yield _mend(
            "rights",
            f"{identity.user} has {level}",
            f"sacctmgr modify user where name={identity.user} set adminlevel=Operator",
        )


def cluster_questions(snapshot: Snapshot, config: Config) -> Iterator[Line]:
    """Partitions and GPUs that the configuration and the table speak of. Pure."""
    known = {partition.name for partition in snapshot.partitions}
    unknown = sorted(set(config.partitions) - known)
    if unknown:
        yield _mend(
            "partitions",
            f"{', '.join(unknown)} in the configuration",
            f"Slurm has {', '.join(sorted(known))}",
        )
    else:
        yield _ok("partitions", f"{len(known)} in Slurm")
    types = sorted({node.gpu_type for node in snapshot.nodes if node.gpus})
    gpus = sum(node.gpus for node in snapshot.nodes)
    if not gpus:
        yield _mend("GPUs", "no node has any", "declare them in gres.conf and slurm.conf")
        return
    named = ", ".join(kind or "(no type)" for kind in types)
    yield _ok("GPUs", f"{gpus} of type {named}")
    without = [k for k in types if k and k.lower() not in {n.lower() for n in config.gpu_memory_gb}]
    if without:
        yield _advice(
            "gpu_memory_gb",
            f"nothing for {', '.join(without)}",
            "add it, so that configurations that do not fit are left out",
        )


def plugin(runner: CommandRunner) -> Iterator[Line]:
    """Does sbatch know our options?"""
    if "--ft-model" in runner.run(["sbatch", "--help"]).stdout:
        yield _ok("SPANK plugin", "sbatch knows --ft-model")
    else:
        yield _mend(
            "SPANK plugin",
            "sbatch does not know --ft-model",
            "make -C spank install, and include plugstack.conf.d/slurm-ext.conf",
        )


def lua(slurm: SlurmConfig, config: Config) -> Iterator[Line]:
    """Does job_submit.lua call our module?"""
    if "lua" not in slurm.job_submit_plugins:
        yield _mend("Lua module", "JobSubmitPlugins has no lua", "set JobSubmitPlugins=lua")
        return
    folder = Path(slurm.get("SLURM_CONF") or "/etc/slurm/slurm.conf").parent
    path = folder / "job_submit.lua"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as exc:
        yield _advice("Lua module", f"{path}: {exc.strerror}", ON_SLURMCTLD)
        return
    if "slurm_ext" in text:
        yield _ok("Lua module", f"{path} calls it")
        yield grace(folder / "lua" / "config.lua", config.grace_s)
    else:
        yield _mend(
            "Lua module", f"{path} does not call it", "add the last two lines of ours to it"
        )


def grace(path: Path, ours_s: float) -> Line:
    """Is the submit grace the same number on both sides? Else a grace looks like a --begin."""
    theirs_s = DEFAULT_GRACE_S
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        text = ""
    except OSError as exc:
        return _advice("submit grace", f"{path}: {exc.strerror}", ON_SLURMCTLD)
    code = re.sub(r"--.*", "", text)  # Lua's comments
    found = re.search(r"\bsubmit_grace_s\s*=\s*([0-9.]+)", code)
    if found is not None:
        theirs_s = float(found[1])
    if theirs_s == ours_s:
        return _ok("submit grace", f"{ours_s:g} s")
    return _mend(
        "submit grace",
        f"{theirs_s:g} s in {path}, {ours_s:g} s in the configuration",
        "set grace_s and submit_grace_s to the same number",
    )


def clock(runner: CommandRunner) -> Iterator[Line]:
    """Is our clock slurmctld's? Leases are written in our time and expire in its."""
    before = time.time()
    answer = runner.run(["sdiag"]).stdout
    after = time.time()
    match = re.search(r"sdiag output at .*\((\d+)\)", answer)
    if match is None:
        yield _advice("clock", "sdiag tells no time", "compare the clocks by hand")
        return
    theirs = float(match[1])
    skew = max(before - MAX_SKEW_S - theirs, theirs - after, 0.0)
    if skew > 0:
        yield _mend(
            "clock", f"slurmctld's differs by about {skew:.0f} s", "run NTP on both machines"
        )
    else:
        yield _ok("clock", "agrees with slurmctld's")


# -- this machine --------------------------------------------------------------------------------


def _local_seen(config: Config, who: Visitor) -> Iterator[Line]:
    """The same as an ordinary user sees it."""
    yield check_visitor.as_seen(who, "throughput table", config.table, table(config))
    yield check_visitor.journal(config, who)
    yield check_visitor.spool(config, who, spool(config))
    yield from check_visitor.daemon(config, who)


def table(config: Config) -> Line:
    """Are there measurements to estimate from?"""
    try:
        index = load_index(config.table)
    except (DataError, SourceMissingError) as exc:
        return _mend(
            "throughput table", str(exc), f"slurm-ext table import --starter (into {config.table})"
        )
    return _ok("throughput table", f"{config.table}: {index.rows} rows")


def _local(config: Config) -> Iterator[Line]:
    yield table(config)
    yield journal(config)
    yield spool(config)
    yield heartbeat(config)
    yield from released(config)


def journal(config: Config) -> Line:
    """Can the journal be written, and does it lie on a local disk?"""
    kind = file_system(config.journal.parent)
    if kind in _SHARED_FILE_SYSTEMS:
        return _mend("journal", f"{config.journal} lies on {kind}", "put it on a local disk")
    try:
        there = is_there(config.journal)
    except DataError as exc:
        return _mend("journal", f"{exc.place} {exc.reason}", exc.fix)
    if there and not os.access(config.journal, os.R_OK | os.W_OK):
        return _mend("journal", f"{config.journal} is not yours", "run as the daemon's user")
    if there:
        try:
            with Journal(config.journal, config.journal_max_rows) as opened:
                return _ok("journal", f"{config.journal}: {opened.rows()} rows")
        except DataError as exc:
            return _mend("journal", str(exc), "the daemon moves it aside by itself when it starts")
    if os.access(config.journal.parent, os.W_OK):
        return _ok("journal", f"{config.journal} will be made")
    return _mend(
        "journal",
        f"{config.journal.parent} is not writable",
        "create it for the daemon's user, mode 0750",
    )


def spool(config: Config) -> Line:
    """Is the spool ours, world-writable and sticky?"""
    try:
        found = config.spool.lstat()
        plans = (config.spool / PLANS).lstat()
    except OSError as exc:
        return _mend(
            "spool",
            f"{config.spool}: {exc.strerror}",
            f"mkdir -p -m 1777 {config.spool}; mkdir {config.spool}/{PLANS}, both owned by the"
            " daemon's user, on the shared file system",
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode != 0o1777:
        return _mend("spool", f"{config.spool} has mode {mode:04o}", f"chmod 1777 {config.spool}")
    if plans.st_uid != os.geteuid() and os.geteuid() != 0:
        return _mend(
            "spool",
            f"{config.spool}/{PLANS} belongs to user {plans.st_uid}",
            "give it to the daemon's user",
        )
    return _ok("spool", f"{config.spool}")


def heartbeat(config: Config) -> Line:
    """Does a daemon live?"""
    try:
        alive = daemon_lives(config.journal)
    except DataError as exc:
        return _mend("daemon", f"{exc.place} {exc.reason}", exc.fix)
    last = last_beat(config.heartbeat)
    if not alive:
        return _advice("daemon", "none runs", "systemctl start slurm-ext")
    if last is None or is_stale(config.heartbeat, time.time()):
        return _mend("daemon", "runs, but completes no cycle", "look at its log")
    return _ok("daemon", f"process {last.pid}, cycle {last.cycle}")


def released(config: Config) -> Iterator[Line]:
    """Did an administrator take everything back?"""
    try:
        if is_released(config.journal):
            mark = released_mark(config.journal)
            yield _advice("released", f"{mark} exists", "slurm-ext release --resume")
    except DataError as exc:
        yield _mend("released", f"{exc.place} {exc.reason}", exc.fix)


def file_system(path: Path) -> str:
    """Type of the file system that holds ``path``, or of the nearest parent that we can see."""
    while not os.path.exists(path) and path != path.parent:  # unlike Path.exists, it never raises
        path = path.parent
    real = str(path.resolve())
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split()
        mount = fields[1].replace("\\040", " ")
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fields[2]
    return kind
