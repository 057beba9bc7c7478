"""Random schedules of pauses and misfortunes on a simulated transport with a virtual clock.

A schedule is a seed: it draws a job (2 to 8 ranks), pauses, resumes and faults (stall, kill, lost
signal, dropped and delayed messages, dead controller, dead store, stops of all ranks with a
staggered wake, failed release or restore, an interrupt) and then only follows the virtual clock:
the same seed always gives the same story. The machines and the driver are the product's own; only
clock, store access, collectives and user steps are simulated.

What must hold at the end of each schedule:

* nothing hangs: every rank has finished all its steps or has exited;
* no split: either all ranks finish or none does;
* a job dies only where a fault explains it; lost signals, dropped and delayed messages, a dead
  controller, a failed release, an interrupt or a stop during a pause never cost the job anything;
* ranks leave a pause within Limits.spread_s of each other, and no rank is paused while another
  trains;
* the parameters of a job that survives equal those of a job without any pause, bit by bit.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from slurm_ft.pause.controller import Controller, Stage, on_controller, settled
from slurm_ft.pause.drive import Drive
from slurm_ft.pause.limits import Limits, check_limits
from slurm_ft.pause.member import COMMITTED, Member, on_member
from slurm_ft.pause.protocol import (
    GO,
    Agreed,
    Ask,
    Board,
    Effect,
    End,
    Exit,
    Interrupt,
    Key,
    Release,
    Released,
    Request,
    Restore,
    Restored,
    Resume,
    Rung,
    Step,
    Tell,
)
from slurm_ft.pause.table import StoreLostError, Table

STEPS = 12
COLLECTIVE_S = 12.0
LONGEST_STEP_S = 1.0
LIMITS = Limits(
    ack_s=3.0, slack_s=1.0, lost_s=2.0, release_s=4.0, restore_s=4.0, up_s=9.0, poll_s=0.25
)
check_limits(LIMITS, COLLECTIVE_S, LONGEST_STEP_S)
# A rank looks at the board at least so often, also without news.
LOOK_S = 1.0
# Everything is over long before; a schedule that runs longer hangs.
HORIZON_S = 400.0


@dataclass
class Story:
    """What became of one schedule."""

    seed: int
    size: int
    faults: tuple[str, ...] = ()
    ends: list[str] = field(default_factory=list)
    survived: bool = False
    wrong: str = ""
    log: list[str] = field(default_factory=list)


@dataclass
class _Rank:
    """One rank of the simulated job."""

    number: int
    member: Member
    step: int = 0
    state: str = "compute"  # compute, collective, pause, done, exited
    params: bytes = b"start"
    seen: int = 0
    drive: Drive[Member] | None = None
    epoch: int = 0
    stopped_until: float = -1.0
    arrived_s: float = 0.0
    freed: bool = False
    turn: int = 0  # an event of an older turn is stale
    left: dict[int, float] = field(default_factory=dict)


class _Access:
    """The store as one party reaches it."""

    def __init__(self, job: Job, name: str) -> None:
        self.job = job
        self.name = name
        self.down: list[tuple[float, float]] = []

    def _up(self) -> bool:
        now = self.job.now
        return self.job.store_alive and not any(a <= now < b for a, b in self.down)

    def newest(self) -> int:
        if not self._up():
            raise StoreLostError("simulated")
        return self.job.table.newest()

    def read(self, epoch: int) -> Board:
        if not self._up():
            raise StoreLostError("simulated")
        return self.job.table.read(epoch)

    def wait(self, epoch: int, seen: Board, limit_s: float) -> Board:
        return self.read(epoch)

    def write(self, epoch: int, key: Key, value: str | int | Request) -> None:
        if self._up():
            self.job.written(epoch, key, value)
            return
        if self.job.store_alive and self.job.random.random() < 0.3:
            # Not answered, yet it arrives in the end.
            delay_s = self.job.random.uniform(0.1, 6.0)
            self.job.after(delay_s, lambda: self.job.written(epoch, key, value))
        raise StoreLostError("simulated")

    def close(self) -> None:
        """Nothing to close."""


class Job:
    """A job, its store, its controller and its bad luck."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        size = self.random.choice((2, 2, 3, 4, 8))
        self.story = Story(seed, size)
        self.size = size
        self.table = Table()
        self.store_alive = True
        self.ranks = [_Rank(number, Member(number, size)) for number in range(size)]
        self.access = [_Access(self, f"rank {number}") for number in range(size)]
        self.controller: Drive[Controller] | None = None
        self.controller_access = _Access(self, "controller")
        self.asked: list[Request] = []
        self._blame: set[str] = set()
        self._stalls: dict[tuple[int, int], float] = {}
        self._deaf: set[int] = set()
        self._bad_release: set[int] = set()
        self._bad_restore: set[int] = set()
        self._draw()

    # --- the schedule ---------------------------------------------------------------------------

    def _draw(self) -> None:
        rnd = self.random
        faults: list[str] = []
        for number in range(rnd.choice((1, 1, 2, 3))):
            begin_s = rnd.uniform(0.0, 6.0) + 9.0 * number
            rung = rnd.choice((Rung.HOLD, Rung.MEMORY, Rung.MEMORY, Rung.MEMORY, Rung.JOB))
            if rung is Rung.JOB and rnd.random() < 0.6:
                rung = Rung.MEMORY
            hold_s = rnd.choice((0.5, 3.0, 20.0))
            self.after(begin_s, self._asker(f"p{number}", rung, hold_s))
            if rnd.random() < 0.7:
                self.after(begin_s + rnd.uniform(0.0, 8.0), self._resume)
        for _ in range(rnd.choice((0, 1, 1, 2, 3))):
            faults.append(self._misfortune())
        self.story.faults = tuple(faults)
        for rank in self.ranks:
            self._compute(rank)

    def _misfortune(self) -> str:
        rnd = self.random
        at_s = rnd.uniform(0.0, 15.0)
        rank = rnd.randrange(self.size)
        kind = rnd.choice(
            (
                "stall",
                "stall",
                "kill",
                "deaf",
                "deaf",
                "drop",
                "drop",
                "cut off",
                "controller dies",
                "controller dies",
                "controller restarts",
                "store dies",
                "stop while paused",
                "stop",
                "release fails",
                "restore fails",
                "interrupt",
                "partition of the controller",
            )
        )
        match kind:
            case "stall":
                stall_s = rnd.choice((1.5, 3.5, 6.0, 30.0))
                self._stalls[rank, rnd.randrange(STEPS)] = stall_s
                if stall_s > COLLECTIVE_S - LONGEST_STEP_S:
                    self._blame.add(f"rank {rank} stalls for {stall_s:g} s")
            case "kill":
                self.after(at_s, lambda: self._kill(rank))
            case "deaf":
                self._deaf.update(rnd.sample(range(self.size), rnd.randrange(self.size)))
            case "drop":
                length_s = rnd.uniform(0.1, LIMITS.lost_s * 0.9)
                if self.access[rank].down:
                    # Two gaps in a row can be one that is longer than lost_s.
                    self._blame.add(f"rank {rank} cannot reach the store for long")
                self.access[rank].down.append((at_s, at_s + length_s))
            case "cut off":
                self.access[rank].down.append((at_s, at_s + 100.0))
                self._blame.add(f"rank {rank} is cut off")
            case "controller dies":
                self.after(at_s, self._controller_dies)
            case "controller restarts":
                self.after(at_s, self._controller_dies)
            case "store dies":
                self.after(at_s, self._store_dies)
            case "stop while paused":
                self.after(at_s, lambda: self._stop(while_paused=True))
            case "stop":
                self.after(at_s, lambda: self._stop(while_paused=False))
            case "release fails":
                self._bad_release.add(rank)
            case "restore fails":
                self._bad_restore.add(rank)
                self._blame.add(f"rank {rank} cannot restore")
            case "interrupt":
                self.after(at_s, lambda: self._interrupt(rank))
            case _:
                self.controller_access.down.append((at_s, at_s + rnd.uniform(1.0, 30.0)))
        return f"{kind} ({rank}, {at_s:.2f} s)"

    # --- time -----------------------------------------------------------------------------------

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._count, what))

    def clock(self) -> float:
        return self.now

    def note(self, text: str) -> None:
        self.story.log.append(f"{self.now:8.3f} {text}")

    def run(self) -> Story:
        while self._queue and not self.story.wrong:
            at_s, _, what = heapq.heappop(self._queue)
            if at_s > HORIZON_S:
                break
            self.now = at_s
            what()
            if all(rank.state in ("done", "exited") for rank in self.ranks):
                break
        self._judge()
        return self.story

    def _wrong(self, text: str) -> None:
        if not self.story.wrong:
            self.story.wrong = text
            self.note(f"WRONG: {text}")

    def _judge(self) -> None:
        states = {rank.state for rank in self.ranks}
        if not states <= {"done", "exited"}:
            held = ", ".join(f"rank {r.number}: {r.state}" for r in self.ranks)
            self._wrong(f"hangs: {held}")
        elif len(states) > 1:
            if not self._blame:
                self._wrong("some ranks finished and others exited")
        elif states == {"exited"}:
            saved = any(end == End.SAVED for end in self.story.ends)
            if not self._blame and not saved:
                self._wrong("the job died and no fault explains it")
        else:
            self.story.survived = True
            want = b"start"
            for step in range(STEPS):
                want = _train(want, step)
            if any(rank.params != want for rank in self.ranks):
                self._wrong("the parameters differ from those of a job without a pause")

    # --- training -------------------------------------------------------------------------------

    def _compute(self, rank: _Rank) -> None:
        rank.state = "compute"
        rank.turn += 1
        turn = rank.turn
        length_s = self.random.uniform(0.2, 0.6) + self._stalls.pop((rank.number, rank.step), 0.0)
        self._at(rank, turn, length_s, lambda: self._arrive(rank))

    def _at(self, rank: _Rank, turn: int, delay_s: float, what: Callable[[], None]) -> None:
        """Later, on this rank, unless something else came first; a stopped process does it late."""

        def now() -> None:
            if rank.turn != turn or rank.state in ("done", "exited"):
                return
            if self.now < rank.stopped_until:
                self._at(rank, turn, rank.stopped_until - self.now, what)
                return
            what()

        self.after(delay_s, now)

    def _arrive(self, rank: _Rank) -> None:
        rank.state = "collective"
        rank.arrived_s = self.now
        rank.turn += 1
        self._at(rank, rank.turn, COLLECTIVE_S, lambda: self._collective_fails(rank, "time-out"))
        if any(peer.state in ("exited", "done") for peer in self.ranks):
            self._peer_closed(rank)
            return
        inside = [p for p in self.ranks if p.state == "collective" and p.step == rank.step]
        if len(inside) == self.size:
            flag = max(peer.seen for peer in self.ranks)
            for peer in self.ranks:
                peer.turn += 1
                delay_s = self.random.uniform(0.0, 0.02)
                self._at(peer, peer.turn, delay_s, self._completer(peer, flag))

    def _completer(self, rank: _Rank, flag: int) -> Callable[[], None]:
        return lambda: self._complete(rank, flag)

    def _complete(self, rank: _Rank, flag: int) -> None:
        if rank.freed:
            self._wrong(f"rank {rank.number} trains without its memory")
        rank.params = _train(rank.params, rank.step)
        rank.step += 1
        if flag > rank.epoch and rank.step < STEPS:
            # The flag may be read late: a rank may be stuck between collective and safe point.
            late_s = self._stalls.pop((rank.number, -rank.step), 0.0)
            self._at(rank, rank.turn, late_s, lambda: self._enter(rank, flag))
        else:
            self._go_on(rank)

    def _go_on(self, rank: _Rank) -> None:
        if rank.step >= STEPS:
            rank.state = "done"
            self.note(f"rank {rank.number} has finished")
            self.after(0.05, lambda: self._tell_gone(rank))
        else:
            self._compute(rank)

    def _collective_fails(self, rank: _Rank, why: str) -> None:
        self.note(f"rank {rank.number}: collective {rank.step} fails ({why})")
        self._exit(rank, End.ABANDONED, why)

    def _peer_closed(self, rank: _Rank) -> None:
        # Usually noticed at once; a node that vanished is noticed by the time-out alone.
        if self.random.random() < 0.8:
            delay_s = self.random.uniform(0.0, 0.3)
            turn = rank.turn
            self._at(rank, turn, delay_s, lambda: self._collective_fails(rank, "peer closed"))

    def _exit(self, rank: _Rank, end: End, reason: str) -> None:
        rank.state = "exited"
        rank.turn += 1
        self.story.ends.append(end)
        self.note(f"rank {rank.number} exits: {end} ({reason})")
        self.after(self.random.uniform(0.05, 1.0), lambda: self._tell_gone(rank))
        for peer in self.ranks:
            if peer.state == "collective":
                self._peer_closed(peer)

    def _tell_gone(self, rank: _Rank) -> None:
        try:
            self.access[rank.number].write(max(1, rank.epoch), Key.GONE, 1 << rank.number)
        except StoreLostError:
            self.note(f"nobody hears that rank {rank.number} ended")

    # --- the pause on a rank --------------------------------------------------------------------

    def _enter(self, rank: _Rank, epoch: int) -> None:
        rank.state = "pause"
        rank.epoch = epoch
        rank.turn += 1
        rank.drive = Drive(
            rank.member,
            on_member,
            epoch=epoch,
            limits=LIMITS,
            store=self.access[rank.number],
            clock=self.clock,
        )
        self.note(f"rank {rank.number} enters pause {epoch} after step {rank.step}")
        self._do(rank, rank.drive.feed(Agreed(epoch)))
        self._look(rank)

    def _look(self, rank: _Rank) -> None:
        """One poll, then the next one at the latest in LOOK_S, sooner at a deadline."""
        if rank.state != "pause" or rank.drive is None:
            return
        if self.now < rank.stopped_until:
            self._at(rank, rank.turn, rank.stopped_until - self.now, lambda: self._look(rank))
            return
        rank.turn += 1
        before = rank.drive.state
        self._do(rank, rank.drive.poll())
        if rank.state != "pause" or self._is_busy(rank):
            return
        next_s = LOOK_S
        if rank.drive.state != before:
            next_s = 0.0
        elif not self.access[rank.number]._up():
            next_s = LIMITS.poll_s
        elif rank.drive.deadline is not None:
            next_s = min(next_s, max(0.001, rank.drive.deadline - self.now))
        self._at(rank, rank.turn, next_s, lambda: self._look(rank))

    def _do(self, rank: _Rank, effects: list[Effect]) -> None:
        assert rank.drive is not None
        rank.member = rank.drive.state
        for effect in effects:
            match effect:
                case Release():
                    self._check_committed(rank)
                    self._busy(rank, self._release)
                case Restore():
                    self._busy(rank, self._restore)
                case Step(end, reason):
                    self._left(rank, end, reason)
                case Exit(end, reason):
                    self._check_spread(rank)
                    self._exit(rank, end, reason)

    def _busy(self, rank: _Rank, what: Callable[[_Rank], None]) -> None:
        rank.turn += 1
        length_s = self.random.uniform(0.01, 1.0)
        self._at(rank, rank.turn, length_s, lambda: what(rank))

    def _release(self, rank: _Rank) -> None:
        assert rank.drive is not None
        fails = rank.number in self._bad_release
        rank.freed = not fails
        self._do(rank, rank.drive.feed(Released("no memory" if fails else "")))
        self._look(rank)

    def _restore(self, rank: _Rank) -> None:
        assert rank.drive is not None
        fails = rank.freed and rank.number in self._bad_restore
        rank.freed = fails
        self._do(rank, rank.drive.feed(Restored("no memory" if fails else "")))
        self._look(rank)

    def _left(self, rank: _Rank, end: End, reason: str) -> None:
        self.note(f"rank {rank.number} leaves pause {rank.epoch}: {end} ({reason})")
        self.story.ends.append(end)
        if rank.freed:
            self._wrong(f"rank {rank.number} leaves the pause without its memory")
        for peer in self.ranks:
            if peer.state == "pause" and peer.member.phase in COMMITTED:
                board = self.table.read(rank.epoch)
                if peer.freed or board.go != GO:
                    self._wrong(f"rank {rank.number} trains while rank {peer.number} is paused")
        rank.left[rank.epoch] = self.now
        self._check_spread(rank)
        rank.drive = None
        self._go_on(rank)

    def _check_spread(self, rank: _Rank) -> None:
        """Since the first step out of this pause: nobody may be waited for longer than agreed."""
        stopped = any(p.stopped_until > 0 for p in self.ranks)
        first = min(
            (p.left[rank.epoch] for p in self.ranks if rank.epoch in p.left), default=self.now
        )
        if not stopped and self.now - first > LIMITS.spread_s + 2 * LOOK_S and not self._stalled():
            self._wrong(f"rank {rank.number} leaves {self.now - first:.1f} s after the first")

    def _stalled(self) -> bool:
        return any("stall" in fault for fault in self.story.faults)

    def _check_committed(self, rank: _Rank) -> None:
        for peer in self.ranks:
            if peer.state in ("compute", "collective") and peer.number != rank.number:
                self._wrong(f"rank {rank.number} pauses while rank {peer.number} trains")

    # --- controller -----------------------------------------------------------------------------

    def _asker(self, name: str, rung: Rung, hold_s: float) -> Callable[[], None]:
        return lambda: self._ask(name, rung, hold_s)

    def _ask(self, name: str, rung: Rung, hold_s: float) -> None:
        access = self.controller_access
        try:
            last = access.newest()
            if last and not settled(access.read(last)):
                self.note(f"{name} is refused: pause {last} is under way")
                return
        except StoreLostError:
            self.note(f"{name} cannot be asked: the store does not answer")
            return
        request = Request(last + 1, name, rung, wait_s=6.0, hold_s=hold_s, by=name)
        self.note(f"{name} asks for pause {request.epoch} ({rung}, {hold_s:g} s)")
        self.asked.append(request)
        drive = Drive(
            Controller(self.size),
            on_controller,
            epoch=request.epoch,
            limits=LIMITS,
            store=access,
            clock=self.clock,
        )
        self.controller = drive
        drive.feed(Ask(request))
        for rank in self.ranks:
            if rank.number not in self._deaf:
                self.after(self.random.uniform(0.0, 0.3), self._hearer(rank, request.epoch))
        if len(self._deaf) == self.size:
            self.note("nobody hears")
        self._watch(drive)

    def _hearer(self, rank: _Rank, epoch: int) -> Callable[[], None]:
        def hear() -> None:
            rank.seen = max(rank.seen, epoch)

        return hear

    def _watch(self, drive: Drive[Controller]) -> None:
        if self.controller is not drive:
            return
        for effect in drive.poll():
            if isinstance(effect, Tell):
                self.note(f"controller: {effect.end} ({effect.reason})")
        if drive.state.stage is Stage.DONE:
            self.controller = None
            return
        self.after(LIMITS.poll_s, lambda: self._watch(drive))

    def _resume(self) -> None:
        if self.controller is not None:
            self.note("asked to resume")
            self.controller.feed(Resume("asked"))

    # --- misfortunes ----------------------------------------------------------------------------

    def written(self, epoch: int, key: Key, value: str | int | Request) -> None:
        if not self.store_alive or not self.table.write(epoch, key, value):
            return
        self.note(f"board {epoch}: {key} {value if not isinstance(value, Request) else ''}")
        # News wakes those who wait; who waits for what is the store's business, not the rank's.
        if key in (Key.DECISION, Key.RESUME, Key.GO, Key.GONE, Key.UP):
            for rank in self.ranks:
                if rank.state == "pause" and rank.drive is not None and not self._is_busy(rank):
                    turn = rank.turn
                    delay_s = self.random.uniform(0.001, 0.02)
                    self._at(rank, turn, delay_s, self._looker(rank))

    def _looker(self, rank: _Rank) -> Callable[[], None]:
        return lambda: self._look(rank)

    @staticmethod
    def _is_busy(rank: _Rank) -> bool:
        return rank.member.phase in ("releasing", "restoring")

    def _kill(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.state in ("done", "exited"):
            return
        self._blame.add(f"rank {number} is killed")
        self._exit(rank, End.ABANDONED, "killed")

    def _controller_dies(self) -> None:
        if self.controller is not None:
            self.note("the controller dies")
        self.controller = None

    def _store_dies(self) -> None:
        self.note("the store dies")
        if any(rank.state == "pause" for rank in self.ranks) or any(
            rank.seen > rank.epoch for rank in self.ranks
        ):
            self._blame.add("the store died during a pause")
        self.store_alive = False

    def _stop(self, *, while_paused: bool) -> None:
        paused = all(rank.state == "pause" for rank in self.ranks)
        if while_paused and not paused:
            return
        if not paused:
            self._blame.add("all ranks were stopped in the middle of a step")
        length_s = self.random.uniform(1.0, 20.0)
        if paused and length_s > LIMITS.ack_s:
            # Some may be in the middle of entering or leaving: the spread is the stop's.
            held = all(rank.member.phase == "held" for rank in self.ranks)
            if not held:
                self._blame.add("all ranks were stopped on the way into or out of a pause")
        self.note(f"all ranks are stopped for about {length_s:.1f} s")
        for rank in self.ranks:
            rank.stopped_until = self.now + length_s + self.random.uniform(0.0, 1.0)

    def _interrupt(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.drive is not None and rank.state == "pause":
            self.note(f"rank {number} is interrupted")
            self._do(rank, rank.drive.feed(Interrupt("preemption")))


def _train(params: bytes, step: int) -> bytes:
    return hashlib.blake2b(params + step.to_bytes(4, "big"), digest_size=16).digest()


def run_schedule(seed: int) -> Story:
    """One schedule from its seed."""
    return Job(seed).run()
