"""``ft-run``: one per rank, in front of the user's program.

    srun ft-run [options] -- python train.py ...

It gives the program its environment, stays beside it and, on rank 0, decides whether the job comes
back. Everything up to the start of the program uses little of the standard library: a job of many
ranks starts that often, from a file system that all of them share. A failure here keeps the
program from starting only where starting it would be wrong: a missing spool, state directory or
plan never does.
"""

from __future__ import annotations

import os
import signal
import sys

from slurm_ext.domain.errors import SlurmExtError
from slurm_ft import variables
from slurm_ft.exits import ASKS_FOR_REQUEUE
from slurm_ft.launch import joining, launchers, processes, supervise
from slurm_ft.launch.environment import (
    choose_paths,
    compose,
    find_spool,
    prepare,
    without_chosen,
)
from slurm_ft.launch.errors import CommandError, LaunchError, UsageError
from slurm_ft.launch.identity import Identity, doubtful_count
from slurm_ft.launch.marks import Marks
from slurm_ft.launch.options import Options, parse
from slurm_ft.launch.plan import settle, settle_from_spool
from slurm_ft.launch.ports import choose_port, ephemeral_range
from slurm_ft.launch.pulse import Pulse
from slurm_ft.launch.signals import parse_signals, usr1_warning
from slurm_ft.launch.timeouts import for_launcher, order_timeouts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from slurm_ft.launch.environment import Paths


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the program's own exit code, or one of `errors`."""
    try:
        own = without_chosen(os.environ)
        options = parse(sys.argv[1:] if argv is None else argv, own)
        if options.on("help") or options.on("version"):
            return _tell_about(options)
        if options["after"]:
            from slurm_ft.launch import after

            return after.conclude(options, own, _tell)
        if not options.command:
            raise UsageError("no command; write ft-run [options] -- COMMAND")
        return _run(options, own)
    except LaunchError as exc:
        _tell(str(exc))
        return exc.code
    except SlurmExtError as exc:
        _tell(str(exc))
        return LaunchError.code


def _run(options: Options, own: dict[str, str]) -> int:
    signals = parse_signals(options["signals"], options.places["signals"])
    # Before anything else: a thread that is started earlier could take a signal away from the loop.
    mask = supervise.block(signals)
    identity = Identity(own, options.command, options["launcher"])
    if options["max-requeues"]:
        # On every rank: where rank 0 alone refused, the others would wait for it.
        from slurm_ft.requeue.limits import parse_limits

        parse_limits(options["max-requeues"], options.places["max-requeues"])
    timeouts = order_timeouts(
        options.seconds("collective-timeout"), own, options.places["collective-timeout"]
    )
    paths = choose_paths(identity, options)
    if doubtful_count(os.environ) and not _came_back(identity, paths):
        identity.attempt = 0
        paths = choose_paths(identity, options)
    missing = prepare(paths, identity)
    if identity.judged.guessed and identity.job_id:
        _hold_to_guess(identity, paths, options.command)
    marks = Marks(paths.state_dir, identity.job_id, identity.attempt, identity.step_id)
    if options["chain"] and not os.path.isfile(options["chain"]):
        # Perhaps on this node alone.
        why = (
            f"{options.places['chain']}={options['chain']}: no such file; write the tasks into it"
            " first, or name another"
        )
        return joining.fail(UsageError(why), identity, options, paths, marks, _tell)
    if paths.spool:
        settled = settle_from_spool(
            paths.spool, identity.base_id, identity.attempt, identity.gpus, identity.nodes
        )
    else:
        settled = settle(identity.gpus, identity.nodes, None)
    # Outside Slurm the ranks of one node have their launcher in common.
    port = choose_port(
        identity.slurm_id or os.getppid(), identity.step_id, identity.attempt, ephemeral_range()
    )
    environment = compose(own, identity, options, paths, timeouts, settled, port)
    if identity.launcher:
        environment.update(for_launcher(options.seconds("grace"), environment))
    command = list(options.command)
    if options.ft_args:
        from slurm_ft.launch.templates import fill

        command += fill(options.ft_args, environment)

    if identity.leads:
        notes = (
            identity.alone(options.command, own),
            _taken(identity, options.command),
            missing,
            settled.note,
            usr1_warning(signals),
            *timeouts.warnings,
        )
        for note in notes:
            if note:
                _tell(note)
    if options.on("verbose") and identity.leads:
        _tell_identity(identity, environment, command)
    try:
        return _supervise(options, identity, paths, marks, environment, command, signals, mask)
    except LaunchError as exc:
        return joining.fail(exc, identity, options, paths, marks, _tell)


def _supervise(
    options: Options,
    identity: Identity,
    paths: Paths,
    marks: Marks,
    environment: dict[str, str],
    command: list[str],
    signals: tuple[signal.Signals, ...],
    mask: set[signal.Signals],
) -> int:
    if identity.attempt and marks.done_before() and _ended_well(identity, paths):
        if identity.leads:
            from slurm_ft.launch.lead import Lead

            Lead(identity, options, paths, environment, command, marks, _tell).skip()
        return 0
    hook = options["on-preempt"]
    here = identity.leads or options.on("on-preempt-each")
    orders = supervise.Orders(
        signals,
        environment,
        lambda: joining.has_session(paths.status),
        has_left=_Left(paths.status),
        grace_s=options.seconds("grace"),
        hook=hook if here else "",
        hook_elsewhere="" if here or not hook else marks.hook,
        hook_written=marks.hook if identity.leads else "",
        launcher=identity.launcher,
        own_group=not _at_terminal(),
    )
    prctl = processes.control()
    processes.adopt_orphans(prctl)
    if options["on-resume"] and identity.attempt:
        _resume(options["on-resume"], environment, mask, prctl)
    ignored: list[int] = []
    if hook:
        # The hook saves for a program that knows nothing of signals.
        ignored += signals
    elif identity.launcher:
        # The agent does not know them and would die of them; TERM it knows.
        ignored += [number for number in signals if number != signal.SIGTERM]
    pid = processes.start(
        command,
        environment,
        mask=mask,
        ignored=ignored,
        own_group=orders.own_group,
        prctl=prctl,
    )
    supervisor = supervise.Supervisor(pid, orders, mask, prctl)
    if not identity.job_id:
        return supervisor.run().code
    if not identity.leads:
        from slurm_ft.launch import follow

        joining.await_others(orders, identity, paths, marks, environment)
        ending = _run_out(supervisor, identity, paths)

        def stand_in(term: int) -> int:
            from slurm_ft.launch.lead import Lead

            find_spool(paths, identity)
            lead = Lead(identity, options, paths, environment, command, marks, _tell)
            gone = f"the ft-run of rank 0 is gone, and rank {identity.rank} takes its place"
            return lead.stand_in(ending, term, gone)

        return follow.conclude(ending, identity.rank, marks, stand_in)
    from slurm_ft.launch.lead import Lead

    lead = Lead(identity, options, paths, environment, command, marks, _tell)
    orders.heard = lead.heard
    joining.await_others(orders, identity, paths, marks, environment, Pulse(marks))
    lead.begin(supervisor)
    ending = _run_out(supervisor, identity, paths)
    # Written where a chain is taken up, see slurm_ft.switch.chain; that would import too much here.
    known = os.path.join(paths.state_dir, "chain.d", "given")
    if options["chain"] and not ending.code and not os.path.exists(known):
        _tell(
            f"the program has ended without looking at the tasks of {options['chain']}: --chain is"
            " for programs that read FT_CHAIN, as slurm_ft.train does"
        )
    return lead.conclude(ending)


def _run_out(
    supervisor: supervise.Supervisor, identity: Identity, paths: Paths
) -> supervise.Ending:
    """Stay until the program has ended; ranks that are paused do not wait for one that died."""
    ending = supervisor.run()
    if ending.code and paths.status and not identity.leads:
        from pathlib import Path

        from slurm_ft import status

        # Rank 0 reads its own first.
        status.forget_stead(Path(paths.status))
    if ending.code and ending.code not in ASKS_FOR_REQUEUE and not identity.launcher:
        from slurm_ft.pause import obituary

        obituary.tell(paths.state_dir, identity.job_id or "local", identity.attempt, identity.rank)
    return ending


def _resume(
    hook: str,
    environment: Mapping[str, str],
    mask: set[signal.Signals],
    prctl: Callable[[int, int], int] | None,
) -> None:
    """Run the command of --on-resume. Its failure keeps the program from starting."""
    pid = processes.start(
        ["/bin/sh", "-c", hook], environment, mask=mask, own_group=False, prctl=prctl
    )
    _, status = os.waitpid(pid, 0)
    code = processes.exit_code(status)
    if code:
        raise CommandError(
            f"the command of --on-resume ended with {code}; the program is not started", code
        )


def _hold_to_guess(identity: Identity, paths: Paths, command: Sequence[str]) -> None:
    """Take what an earlier attempt guessed: the same program must not work or fail by its place."""
    where = (paths.state_dir, identity.job_id, identity.step_id, command)
    known = launchers.recall(*where) if identity.attempt else None
    if known is not None:
        identity.judged = known
    elif identity.leads:
        launchers.keep(*where, identity.judged)


def _taken(identity: Identity, command: Sequence[str]) -> str:
    """That the command was taken for a launcher, unless the user said that it is one."""
    if not identity.launcher or not identity.judged.because:
        return ""
    return (
        f"{os.path.basename(command[0])} is taken for a launcher, because"
        f" {identity.judged.because}: RANK, WORLD_SIZE and LOCAL_RANK are its to set;"
        " --launcher=no where it starts no ranks"
    )


def _came_back(identity: Identity, paths: Paths) -> bool:
    """Whether this very job has had an attempt before this one."""
    from pathlib import Path

    from slurm_ext.domain.errors import ProtocolError
    from slurm_ft.requeue import attempts

    path = Path(paths.state_dir, attempts.file_name(identity.job_id))
    try:
        known = attempts.load(path, identity.job_id).attempts
    except (ProtocolError, OSError):
        return True
    return any(attempt.number < identity.attempt for attempt in known)


def _ended_well(identity: Identity, paths: Paths) -> bool:
    """Whether nothing of the attempt before is left to do."""
    from pathlib import Path

    from slurm_ft.requeue import attempts

    path = Path(paths.state_dir, attempts.file_name(identity.job_id))
    return attempts.ended_well(path, identity.job_id, identity.attempt - 1)


class _Left:
    """Whether the session has left. First asked when the signal comes, to know which one it is:
    a launcher may have started its ranks again, with a status of theirs, before the next look."""

    def __init__(self, path: str):
        self._path = path
        self._pid: int | None = None

    def __call__(self) -> bool:
        from pathlib import Path

        from slurm_ft import status

        said = status.read(Path(self._path)) if self._path else None
        if said is None:
            return False
        if self._pid is None:
            self._pid = said.pid
        if said.leaving is not None:
            return not processes.runs(said.pid)
        return said.pid != self._pid and not processes.runs(self._pid)


def _at_terminal() -> bool:
    """Whether a person sits there: then the terminal's own signals reach the program directly."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _tell(line: str) -> None:
    """A line for the user; in one write, because ranks share the job's output."""
    sys.stderr.write(f"ft-run: {line}\n")
    sys.stderr.flush()


def _tell_identity(
    identity: Identity, environment: Mapping[str, str], command: Sequence[str]
) -> None:
    if not identity.job_id:
        _tell("outside Slurm: one rank, no attempts, no requeue")
    elif not identity.in_step:
        _tell("not started by srun: one rank, whatever --ntasks says")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    names.update(environment.get(variables.CHOSEN, "").split(","))
    for name in sorted(names - {variables.CHOSEN}):
        if name in environment:
            _tell(f"{name}={environment[name]}")
    _tell(f"command: {' '.join(command)}")


def _tell_about(options: Options) -> int:
    from slurm_ft.launch.usage import usage, version

    sys.stdout.write(version() if options.on("version") else usage())
    return 0


if __name__ == "__main__":
    sys.exit(main())
