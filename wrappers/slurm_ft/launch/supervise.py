"""Stand by the program until it has ended: pass signals on, run the hook, keep the limits.

One thread, no handlers: every signal that matters is blocked and waited for, so that nothing is
lost between two looks and no code runs at a random place. What may take long (a hook, a question
to Slurm) is a process of its own that the same loop waits for.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from slurm_ft import variables
from slurm_ft.launch import processes
from slurm_ft.launch.errors import CommandError
from slurm_ft.launch.signals import PASSED_ON, sent_by_slurm, signals_one_group_only
from slurm_ft.launch.waiting import FROM_KERNEL, wait_signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

# What ft-run keeps of the time until SIGKILL for reading Slurm's record and requeueing.
MARGIN_S = 5.0
# The same as a share, for a grace of seconds.
MARGIN_SHARE = 0.25
# From TERM to KILL for a program that the hook has saved already.
STOP_S = 10.0
# How often files and processes without a signal of their own are looked at.
POLL_S = 0.25
# How often children are counted without having been told: a lost SIGCHLD must not be the end.
LOOK_S = 60.0
# What a launcher takes to notice by itself that its ranks have left.
LAUNCHER_S = 2.0
# In place of the time since when its ranks have left: it was told to end.
_TOLD = float("inf")
# A program whose shell died of the signal: for how long without any other limit.
LINGER_S = 600.0
MAX_OUTPUT = 65536


class Ending:
    """How the program ended. ``code`` is its own, as a shell tells it.

    ``asked`` is the first signal that meant "save and come back", ``asked_s`` when it came.
    ``forced`` says that ft-run killed the program, ``stopped`` that it ended it after the hook.
    ``hook`` is the hook's exit code, ``None`` where none ran. ``told`` is why another rank could
    not start, where the program was ended for that; the code is that rank's then. ``unlaunched``
    says that Slurm did not get the step started on all of its nodes.
    """

    __slots__ = (
        *("asked", "asked_s", "code", "ended_s", "forced", "hook", "stopped", "told"),
        "unlaunched",
    )

    def __init__(self) -> None:
        self.code = 0
        self.asked: signal.Signals | None = None
        self.asked_s = 0.0
        self.ended_s = 0.0
        self.forced = False
        self.stopped = False
        self.hook: int | None = None
        self.told = ""
        self.unlaunched = False


class Orders:
    """What holds for this rank. ``has_session`` is asked when a signal comes.

    ``hook`` is the command of --on-preempt where this rank runs it; ``hook_elsewhere`` the file
    that rank 0 writes when its own has ended, where this rank waits for it instead.
    ``has_left`` is asked about the session under a launcher, which may start its ranks again;
    first when the signal comes.
    ``heard`` is called once per signal of ``signals``, before anything is waited for; ``look``
    every ``look_s`` seconds, whatever happens.
    """

    __slots__ = (
        "environment",
        "grace_s",
        "has_left",
        "has_session",
        "heard",
        "hook",
        "hook_elsewhere",
        "hook_written",
        "launcher",
        "look",
        "look_s",
        "own_group",
        "signals",
    )

    def __init__(
        self,
        signals: tuple[signal.Signals, ...],
        environment: Mapping[str, str],
        has_session: Callable[[], bool],
        *,
        grace_s: float | None = None,
        hook: str = "",
        hook_elsewhere: str = "",
        hook_written: str = "",
        launcher: bool = False,
        own_group: bool = True,
        has_left: Callable[[], bool] | None = None,
        heard: Callable[[Supervisor], None] | None = None,
        look: Callable[[Supervisor], None] | None = None,
        look_s: float = LOOK_S,
    ) -> None:
        self.signals = signals
        self.environment = environment
        self.has_session = has_session
        self.grace_s = grace_s
        self.hook = hook
        self.hook_elsewhere = hook_elsewhere
        self.hook_written = hook_written
        self.launcher = launcher
        self.own_group = own_group
        self.has_left = has_left
        self.heard = heard
        self.look = look
        self.look_s = look_s


def block(signals: Sequence[signal.Signals]) -> set[signal.Signals]:
    """Block what the loop waits for; returns the mask to be restored in every child."""
    # Inherited as ignored, children would vanish unseen.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return signal.pthread_sigmask(  # type: ignore[return-value]
        signal.SIG_BLOCK, {signal.SIGCHLD, *PASSED_ON, *signals}
    )


class Supervisor:
    """The loop. ``mask`` is what `block` returned; ``pid`` the program.

    With ``prctl`` (see `processes.control`) the commands end when ft-run does, however it ends.
    """

    def __init__(
        self,
        pid: int,
        orders: Orders,
        mask: set[signal.Signals],
        prctl: Callable[[int, int], int] | None = None,
    ) -> None:
        self.pid = pid
        self.orders = orders
        self.ending = Ending()
        self.kill_at: float | None = None
        self._mask = mask
        self._prctl = prctl
        self._waited = {signal.SIGCHLD, *PASSED_ON, *orders.signals}
        self._commands: dict[int, tuple[int | None, Callable[[int, str], None]]] = {}
        self._status: int | None = None
        self._hook_pid = 0
        self._waits_for_hook = False
        self._left_at: float | None = None
        self._looked_at = time.monotonic()

    # -- from outside ------------------------------------------------------------------------------

    def command(
        self,
        argv: Sequence[str],
        then: Callable[[int, str], None],
        environment: Mapping[str, str] | None = None,
        *,
        capture: bool = True,
        ignored: Iterable[int] = (),
    ) -> int:
        """Run a command beside the program; ``then(exit code, its output)`` when it has ended.

        What is captured has to fit into a pipe: a command that writes more would wait for ever.
        ``ignored`` are signals that it begins with ignoring: Slurm sends them to it as well.
        Returns its process id. Raises CommandError where it cannot be executed.
        """
        ends = os.pipe2(os.O_CLOEXEC) if capture else None
        try:
            pid = processes.start(
                argv,
                os.environ if environment is None else environment,
                mask=self._mask,
                ignored=ignored,
                prctl=self._prctl,
                stdout=ends[1] if ends else None,
            )
        except CommandError:
            if ends:
                os.close(ends[0])
            raise
        finally:
            if ends:
                os.close(ends[1])
        self._commands[pid] = (ends[0] if ends else None, then)
        return pid

    def limit(self, at: float) -> None:
        """Kill the program at this time (of `time.monotonic`) unless that is decided earlier."""
        self.kill_at = at if self.kill_at is None else min(self.kill_at, at)

    def end(self, code: int, told: str) -> None:
        """End the program, which waits for a rank that will never come."""
        if self._status is None and not self.ending.told:
            self.ending.code, self.ending.told = code, told
            self._stop()

    def run(self) -> Ending:
        """Return when the program has ended, and the hook if one was run."""
        while not self._over():
            info = wait_signal(self._waited, self._patience())
            if self.orders.look is not None:
                self._look(self.orders.look)
            if info is None:
                self._expire()
            elif info.si_signo == signal.SIGCHLD:
                self._reap()
            else:
                self._hear(info)
        self.ending.ended_s = time.time()
        if self._left_at == _TOLD:
            # A launcher that is ended while it starts ranks again leaves those behind.
            processes.kill_below(os.getpid(), self._spared())
        # What still runs holds the job's output open, and nobody waits for its answer any more. A
        # command that has one only asks, and may ignore TERM; a helper ends in order.
        for pid, (read_end, _) in self._commands.items():
            processes.send_group(pid, signal.SIGTERM if read_end is None else signal.SIGKILL)
            if read_end is not None:
                os.close(read_end)
        return self.ending

    # -- inside ------------------------------------------------------------------------------------

    def _over(self) -> bool:
        if self._status is None or self._hook_pid:
            return False
        lingering = (
            self.ending.asked is not None
            and not self.ending.forced
            and os.WIFSIGNALED(self._status)
            and bool(self._below())
        )
        if lingering and self.kill_at is None:
            self.limit(time.monotonic() + LINGER_S)
        return not lingering

    def _below(self) -> list[int]:
        """Processes of the program, without those that ft-run started for itself."""
        own = set(self._commands)
        for pid in tuple(own):
            own.update(processes.descendants(pid))
        return [pid for pid in processes.descendants(os.getpid()) if pid not in own]

    def _look(self, look: Callable[[Supervisor], None]) -> None:
        now = time.monotonic()
        if now - self._looked_at >= self.orders.look_s:
            self._looked_at = now
            look(self)

    def _patience(self) -> float:
        """Seconds until something has to be looked at without a signal."""
        wait = LOOK_S
        if self.orders.look is not None:
            wait = min(wait, self.orders.look_s)
        if self.kill_at is not None:
            wait = max(0.0, self.kill_at - time.monotonic())
        if self.ending.asked is not None:
            polled = self._status is not None or self._waits_for_hook or self.orders.launcher
            wait = min(wait, POLL_S if polled else wait)
        return wait

    def _expire(self) -> None:
        self._reap()
        now = time.monotonic()
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at = now + 1.0
            self.ending.forced = True
            processes.kill_below(os.getpid(), self._spared())
            return
        if self._waits_for_hook and os.path.exists(self.orders.hook_elsewhere):
            self._waits_for_hook = False
            self._stop()
        if self.orders.launcher and self._status is None:
            self._end_launcher(now)

    def _end_launcher(self, now: float) -> None:
        """Keep a launcher from starting again what has left in order (torchrun --max-restarts)."""
        if self._left_at is None:
            if self.orders.has_left is not None and self.orders.has_left():
                self._left_at = now
        elif now - self._left_at > LAUNCHER_S:
            self._left_at = _TOLD
            processes.send(self.pid, signal.SIGTERM)

    def _spared(self) -> set[int]:
        """Questions to Slurm go on when the program is killed; the hook does not."""
        return {pid for pid in self._commands if pid != self._hook_pid}

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self._status = status
                if not self.ending.told:
                    self.ending.code = processes.exit_code(status)
            elif pid in self._commands:
                read_end, then = self._commands.pop(pid)
                text = b"" if read_end is None else _drain(read_end)
                then(processes.exit_code(status), text.decode(errors="replace"))

    def _hear(self, info: signal.struct_siginfo) -> None:
        number = signal.Signals(info.si_signo)
        orders = self.orders
        if number in orders.signals:
            first = self.ending.asked is None
            if first:
                self.ending.asked = number
                self.ending.asked_s = time.time()
                if orders.launcher and orders.has_left is not None:
                    orders.has_left()
                if orders.grace_s is not None:
                    margin_s = min(MARGIN_S, orders.grace_s * MARGIN_SHARE)
                    self.limit(time.monotonic() + orders.grace_s - margin_s)
            if orders.heard is not None:
                orders.heard(self)
            if (orders.hook or orders.hook_elsewhere) and not orders.has_session():
                if first:
                    self._begin_hook(number)
                return
        if not self._has_it(info):
            self._pass_on(number)

    def _has_it(self, info: signal.struct_siginfo) -> bool:
        """Whether the program got this signal from where ft-run got it."""
        if info.si_code == FROM_KERNEL:
            return not self.orders.own_group
        return sent_by_slurm(info.si_pid) and not signals_one_group_only(self.orders.environment)

    def _pass_on(self, number: signal.Signals) -> None:
        if self._status is not None:
            for pid in self._below():
                processes.send(pid, number)
        elif self.orders.launcher and number in self.orders.signals:
            # Past the launcher's agent, which would kill its ranks after a time of its own.
            ranks = processes.children(self.pid)
            for pid in ranks or [self.pid]:
                processes.send(pid, number)
        elif self.orders.own_group:
            processes.send_group(self.pid, number)
        else:
            processes.send(self.pid, number)

    def _begin_hook(self, number: signal.Signals) -> None:
        if not self.orders.hook:
            self._waits_for_hook = True
            return
        self._hook_pid = self.command(
            ["/bin/sh", "-c", self.orders.hook],
            self._end_hook,
            {
                **self.orders.environment,
                variables.CHILD_PID: str(self.pid),
                "FT_SIGNAL": number.name.removeprefix("SIG"),
            },
            capture=False,
            # A preemption without grace sends TERM to every process of the step, the hook too. What
            # the hook starts inherits this; KILL still ends all of it.
            ignored={signal.SIGTERM, *self.orders.signals},
        )

    def _end_hook(self, code: int, _text: str) -> None:
        self._hook_pid = 0
        self.ending.hook = code
        if code:
            sys.stderr.write(
                f"ft-run: the command of --on-preempt ended with {code}: nothing was saved on"
                " request\n"
            )
        if self.orders.hook_written:
            try:
                with open(self.orders.hook_written, "w", encoding="ascii") as file:
                    file.write(f"{code}\n")
            except OSError as exc:
                sys.stderr.write(f"ft-run: {self.orders.hook_written}: {exc.strerror}\n")
        self._stop()

    def _stop(self) -> None:
        """End the program: what was worth saving is saved."""
        if self._status is not None:
            return
        self.ending.stopped = True
        if not processes.catches(self.pid, signal.SIGTERM):
            # Under a hook the program began with ignoring TERM.
            processes.kill_below(os.getpid(), self._commands)
        elif self.orders.own_group:
            processes.send_group(self.pid, signal.SIGTERM)
        else:
            processes.send(self.pid, signal.SIGTERM)
        self.limit(time.monotonic() + STOP_S)


def _drain(read_end: int) -> bytes:
    """What a command that has ended left in its pipe."""
    with open(read_end, "rb", buffering=0) as file:
        # Whatever it left running may hold the other end: take what is there, wait for nothing.
        os.set_blocking(read_end, False)
        found = b""
        while len(found) < MAX_OUTPUT:
            part = file.read(MAX_OUTPUT)
            if not part:
                break
            found += part
    return found
