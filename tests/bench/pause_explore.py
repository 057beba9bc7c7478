"""Every behaviour of the pause protocol for a few ranks: an explicit search over its states.

The world is asynchronous and hostile: a write arrives at once, or never, or travels for as long as
it likes (also after its sender died); a timer fires whenever it likes; a rank may be late, or
stuck for ever; each rank, the controller and the store may die at any moment; a rank may be cut
off from the store, may fail to release or to restore, and may be interrupted. What is bounded: the
number of ranks, of writes that travel at the same time and, if wanted, of faults.
Because timers may fire at any time, what holds here holds for every choice of limits; that the
limits fit the collective time-out is the subject of pause_schedules.py.

A reading is taken at once: entries are written once, so an old reading is what a quicker rank
would have acted on, and acting late is covered by writes that travel. A timer or an interrupt
takes effect with the next reading, so the two are one move.

Parts of the world (boards, ranks, controllers) are numbered, and the moves of a part are computed
once per number: a state is a short tuple of numbers. States that differ only in the order of the
ranks are one state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import permutations
from typing import Any

from slurm_ft.pause.controller import Controller, Stage, on_controller
from slurm_ft.pause.member import COMMITTED, Member, Phase, on_member
from slurm_ft.pause.protocol import (
    COMMIT,
    GO,
    REQUEUE,
    Agreed,
    Ask,
    Board,
    Effect,
    Event,
    Exit,
    Interrupt,
    Key,
    Lost,
    Read,
    Released,
    Request,
    Restored,
    Resume,
    Rung,
    Step,
    Timer,
    Turn,
    Write,
    abandon,
    abort,
    everyone,
)

EPOCH = 1
# One letter instead of a sentence: reasons multiply states and steer nothing.
_WHY = "x"
_FIELD = {
    Key.ACK: "acks",
    Key.PAUSED: "paused",
    Key.UP: "ups",
    Key.GONE: "gone",
    Key.DECISION: "decision",
    Key.RESUME: "resume",
    Key.GO: "go",
    Key.REQUEST: "request",
}


class At(StrEnum):
    """Where a rank's program is. NEXT waits in the collective of the step after the pause."""

    BEFORE = "before"
    PAUSE = "pause"
    NEXT = "next"
    EXITED = "exited"
    CRASHED = "crashed"
    STUCK = "stuck"


ENDED = frozenset({At.EXITED, At.CRASHED, At.STUCK})


@dataclass(frozen=True, slots=True)
class Node:
    """One rank: its program, its machine, and whether a failed restore lost its state."""

    at: At
    member: Member
    busy: bool = False  # a Release or Restore is under way
    broken: bool = False


MemberRule = Callable[[Member, Event], Turn[Member]]
ControllerRule = Callable[[Controller, Event], Turn[Controller]]


@dataclass(frozen=True)
class Rules:
    """The protocol under test; a mutant replaces one part of it."""

    member: MemberRule = on_member
    controller: ControllerRule = on_controller
    write_once: bool = True


@dataclass(frozen=True)
class Found:
    """Result of a search. ``trace`` leads from the start to the violation."""

    states: int
    ends: frozenset[str]
    violation: str = ""
    trace: tuple[str, ...] = ()


class _Numbers:
    """Values to small numbers and back."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._of: dict[Any, int] = {}

    def of(self, value: Any) -> int:
        number = self._of.get(value)
        if number is None:
            number = self._of[value] = len(self.values)
            self.values.append(value)
        return number


Item = tuple[Key, str | int]
# board, store alive, controller, writes that travel (bits), faults left, one number per rank
World = tuple[int, ...]
_BOARD, _STORE, _CONTROLLER, _FLIGHT, _FAULTS, _RANKS = range(6)
# What a part does: name, whether ordinary, its new number, its writes, complaints about the step
Move = tuple[str, bool, int, tuple[int, ...], str]


def _permute(bits: int, order: tuple[int, ...]) -> int:
    return sum(1 << order[rank] for rank in range(len(order)) if bits >> rank & 1)


class Explorer:
    """Breadth-first over all states that the rules reach.

    ``travelling`` bounds the writes that are under way at the same time; ``faults`` the deaths,
    losses and failures in one behaviour, ``None`` leaves them without a bound.
    """

    def __init__(
        self,
        size: int,
        rung: Rung,
        rules: Rules | None = None,
        *,
        faults: int | None = None,
        travelling: int = 1,
        interrupts: bool = True,
    ) -> None:
        self.size = size
        self.rules = rules or Rules()
        self.most_faults = -1 if faults is None else faults
        self.faults = self.most_faults != 0
        self.travelling = travelling
        self.interrupts = interrupts
        self.request = Request(EPOCH, "a", rung)
        self._boards, self._nodes, self._controllers, self._items = (_Numbers() for _ in range(4))
        self._rank_cache: dict[tuple[int, int, int, bool], tuple[Move, ...]] = {}
        self._controller_cache: dict[tuple[int, int, int], tuple[Move, ...]] = {}
        self._arrive_cache: dict[tuple[int, int], tuple[int, str]] = {}
        self._live_cache: dict[tuple[int, int], int] = {}
        self._check_cache: dict[tuple[int, ...], str] = {}
        self._permuted: dict[tuple[str, int, int], int] = {}
        self._orders = [tuple(order) for order in permutations(range(size))]

    def start(self) -> World:
        """Nobody has heard of the pause; the controller has just asked."""
        turn = self.rules.controller(Controller(self.size), Ask(self.request))
        ranks = tuple(
            self._nodes.of(Node(At.BEFORE, Member(rank, self.size))) for rank in range(self.size)
        )
        return (
            self._boards.of(Board()),
            1,
            self._controllers.of(turn.state),
            sum(1 << item for item in self._writes(turn.effects)),
            self.most_faults,
            *ranks,
        )

    def run(self, most_states: int = 3_000_000) -> Found:
        """Search; the first violation ends it."""
        start = self._canonical(self.start())
        seen: dict[World, tuple[World | None, str]] = {start: (None, "start")}
        back: dict[World, list[World]] = {}
        good: list[World] = []
        ends: set[str] = set()
        queue = deque([start])
        while queue:
            world = queue.popleft()
            moved = False
            left = world[_FAULTS]
            for name, ordinary, raw, complaint in self._moves(world):
                if not ordinary and left >= 0:
                    if not left:
                        continue
                    raw = (*raw[:_FAULTS], left - 1, *raw[_RANKS:])
                after = raw if raw in seen else self._canonical(raw)
                if complaint or after not in seen:
                    complaint = complaint or self._check(after)
                    if complaint:
                        return self._found(seen, ends, complaint, world, name)
                    seen[after] = (world, name)
                    queue.append(after)
                if after == world:
                    continue
                if ordinary:
                    moved = True
                    back.setdefault(after, []).append(world)
            end = self._end(world)
            if end:
                ends.add(end)
                good.append(world)
            elif not moved:
                return self._found(seen, ends, "nothing can happen any more", world)
            if len(seen) > most_states:
                raise RuntimeError(f"more than {most_states} states; explore fewer ranks")
        # From every state an allowed end must be within reach by ordinary moves alone.
        reach = set(good)
        stack = list(good)
        while stack:
            for world in back.get(stack.pop(), ()):
                if world not in reach:
                    reach.add(world)
                    stack.append(world)
        for world in seen:
            if world not in reach:
                return self._found(seen, ends, "no allowed end can be reached", world)
        return Found(len(seen), frozenset(ends))

    def _found(
        self,
        seen: dict[World, tuple[World | None, str]],
        ends: set[str],
        what: str,
        world: World,
        last: str = "",
    ) -> Found:
        trace: list[str] = [last] if last else []
        at: World | None = world
        while at is not None:
            at, name = seen[at]
            trace.append(name)
        return Found(len(seen), frozenset(ends), what, tuple(reversed(trace)))

    # --- the order of ranks does not matter -----------------------------------------------------

    def _canonical(self, world: World) -> World:
        best = world
        for which in range(1, len(self._orders)):
            moved = (
                self._of_order("board", which, world[_BOARD]),
                world[_STORE],
                world[_CONTROLLER],
                self._of_order("flight", which, world[_FLIGHT]),
                world[_FAULTS],
                *self._ranks_of_order(which, world),
            )
            best = min(best, moved)
        return best

    def _ranks_of_order(self, which: int, world: World) -> list[int]:
        order = self._orders[which]
        ranks = [0] * self.size
        for rank in range(self.size):
            ranks[order[rank]] = self._of_order("node", which, world[_RANKS + rank])
        return ranks

    def _of_order(self, kind: str, which: int, number: int) -> int:
        key = (kind, which, number)
        known = self._permuted.get(key)
        if known is None:
            known = self._permuted[key] = self._permute_part(kind, self._orders[which], number)
        return known

    def _permute_part(self, kind: str, order: tuple[int, ...], number: int) -> int:
        if kind == "node":
            node: Node = self._nodes.values[number]
            return self._nodes.of(
                replace(node, member=replace(node.member, rank=order[node.member.rank]))
            )
        if kind == "board":
            board: Board = self._boards.values[number]
            return self._boards.of(
                replace(
                    board,
                    acks=_permute(board.acks, order),
                    paused=_permute(board.paused, order),
                    ups=_permute(board.ups, order),
                    gone=_permute(board.gone, order),
                )
            )
        flight = 0
        for item in range(number.bit_length()):
            if number >> item & 1:
                key, value = self._items.values[item]
                if isinstance(value, int):
                    value = _permute(value, order)
                flight |= 1 << self._items.of((key, value))
        return flight

    # --- moves ----------------------------------------------------------------------------------

    def _moves(self, world: World) -> Iterator[tuple[str, bool, World, str]]:
        board, store, controller, flight, _ = world[:_RANKS]
        if store:
            for item in range(flight.bit_length()):
                if flight >> item & 1:
                    after, complaint = self._arrive(board, item)
                    left = self._live(after, flight & ~(1 << item))
                    key, value = self._items.values[item]
                    moved = (after, store, controller, left, *world[_FAULTS:])
                    yield f"{key}={value} arrives", True, moved, complaint
            if self.faults:
                yield "store dies", False, (board, 0, controller, 0, *world[_FAULTS:]), ""
        for name, ordinary, number, writes, complaint in self._controller_moves(
            controller, board, store
        ):
            base = (board, store, number, flight, *world[_FAULTS:])
            yield from self._sent(f"controller {name}", ordinary, base, writes, complaint)
        ended = any(self._nodes.values[number].at in ENDED for number in world[_RANKS:])
        for rank in range(self.size):
            place = _RANKS + rank
            for name, ordinary, number, writes, complaint in self._rank_moves(
                world[place], board, store, ended
            ):
                base = (*world[:place], number, *world[place + 1 :])
                yield from self._sent(f"rank {rank} {name}", ordinary, base, writes, complaint)

    def _sent(
        self, name: str, ordinary: bool, base: World, writes: tuple[int, ...], complaint: str
    ) -> Iterator[tuple[str, bool, World, str]]:
        """The writes of one move: all arrive; or all are lost; or all travel, if few do."""
        if not base[_STORE] or not writes:
            yield name, ordinary, base, complaint
            return
        board, wrong = base[_BOARD], complaint
        for item in writes:
            board, why = self._arrive(board, item)
            wrong = wrong or why
        flight = self._live(board, base[_FLIGHT])
        yield name, ordinary, (board, *base[1:_FLIGHT], flight, *base[_FAULTS:]), wrong
        if self.faults:
            yield f"{name} (write lost)", False, base, complaint
            flight = base[_FLIGHT]
            for item in writes:
                flight |= 1 << item
            flight = self._live(base[_BOARD], flight)
            if flight != base[_FLIGHT] and flight.bit_count() <= self.travelling:
                moved = (*base[:_FLIGHT], flight, *base[_FAULTS:])
                yield f"{name} (write travels)", False, moved, complaint

    def _controller_moves(self, number: int, board: int, store: int) -> tuple[Move, ...]:
        key = (number, board, store)
        known = self._controller_cache.get(key)
        if known is None:
            found = list(self._controller_moves_of(number, board, store))
            known = self._controller_cache[key] = tuple(found)
        return known

    def _controller_moves_of(self, number: int, board: int, store: int) -> Iterator[Move]:
        controller: Controller | None = self._controllers.values[number]
        if controller is None or controller.stage is Stage.DONE:
            return
        if self.faults:
            yield "dies", False, self._controllers.of(None), (), ""
        read = Read(self._boards.values[board])
        events: list[tuple[str, tuple[Event, ...]]] = []
        if store:
            events.append(("reads", (read,)))
            if not controller.expired:
                events.append(("reads too late", (Timer(), read)))
            if not controller.resume:
                events.append(("is asked to resume", (Resume(_WHY), read)))
        else:
            events.append(("finds no store", (Lost(),)))
        for name, several in events:
            state, effects = controller, list[Effect]()
            for event in several:
                turn = self.rules.controller(state, event)
                state = turn.state
                effects.extend(turn.effects)
            yield name, True, self._controllers.of(state), self._writes(effects), ""

    def _rank_moves(self, number: int, board: int, store: int, ended: bool) -> tuple[Move, ...]:
        key = (number, board, store, ended)
        known = self._rank_cache.get(key)
        if known is None:
            found = list(self._rank_moves_of(self._nodes.values[number], board, store, ended))
            known = self._rank_cache[key] = tuple(found)
        return known

    def _rank_moves_of(self, node: Node, board: int, store: int, ended: bool) -> Iterator[Move]:
        if node.at in ENDED:
            return
        seen: Board = self._boards.values[board]
        if self.faults:
            yield "dies", False, *self._finish(node, At.CRASHED), ""
        if node.at is At.BEFORE:
            if seen.request is not None:
                yield self._event("arrives", True, node, seen, Agreed(EPOCH))
                if self.faults:
                    yield "is stuck", False, *self._finish(node, At.STUCK), ""
            if ended:
                yield "fails in a collective", True, *self._finish(node, At.EXITED), ""
            return
        if node.at is At.NEXT:
            if ended:
                yield "fails in a collective", True, *self._finish(node, At.EXITED), ""
            return
        read = Read(seen)
        if node.busy:
            releasing = node.member.phase is Phase.RELEASING
            done = Released if releasing else Restored
            idle = replace(node, busy=False)
            yield self._event("is done", True, idle, seen, done())
            if self.faults:
                broken = replace(idle, broken=node.broken or not releasing)
                yield self._event("fails at it", False, broken, seen, done(_WHY))
            if not node.member.expired:
                yield self._event("takes too long", True, node, seen, Timer())
            if store:
                yield self._event("reads while busy", True, node, seen, read)
            return
        if store:
            yield self._event("reads", True, node, seen, read)
            if not node.member.expired and node.member.phase is not Phase.ENTERING:
                yield self._event("reads too late", True, node, seen, Timer(), read)
            if self.faults and self.interrupts and not node.member.urgent:
                yield self._event("is interrupted", False, node, seen, Interrupt(_WHY), read)
        if not store or self.faults:
            yield self._event("finds no store", not store, node, seen, Lost())

    def _finish(self, node: Node, at: At) -> tuple[int, tuple[int, ...]]:
        number = self._nodes.of(Node(at, Member(node.member.rank, self.size)))
        # What the parent of an ended rank writes; a stuck one has not ended.
        gone = () if at is At.STUCK else (self._items.of((Key.GONE, node.member.bit)),)
        return number, gone

    def _event(self, name: str, ordinary: bool, node: Node, board: Board, *events: Event) -> Move:
        member, effects = node.member, list[Effect]()
        for event in events:
            turn = self.rules.member(member, event)
            member = turn.state
            effects.extend(turn.effects)
        writes = self._writes(effects)
        complaint = ""
        for effect in effects:
            match effect:
                case Step():
                    complaint = self._step_complaint(node, board)
                    after = Node(At.NEXT, Member(member.rank, self.size))
                    return name, ordinary, self._nodes.of(after), writes, complaint
                case Exit():
                    number, gone = self._finish(node, At.EXITED)
                    return name, ordinary, number, (*writes, *gone), ""
        member = replace(
            member,
            urgent=_WHY if member.urgent else "",
            failure=_WHY if member.failure else "",
            request=self.request if member.request else None,
        )
        starts = member.phase is not node.member.phase
        busy = node.busy or (starts and member.phase in (Phase.RELEASING, Phase.RESTORING))
        if starts and member.phase in (Phase.HELD, Phase.UP):
            busy = False
        after = replace(node, at=At.PAUSE, member=member, busy=busy)
        return name, ordinary, self._nodes.of(after), writes, ""

    # --- the board ------------------------------------------------------------------------------

    def _writes(self, effects: Any) -> tuple[int, ...]:
        found: list[int] = []
        for effect in effects:
            if isinstance(effect, Write):
                value: str | int = _WHY
                if isinstance(effect.value, int) or effect.value in (COMMIT, GO, REQUEUE):
                    value = effect.value
                elif effect.key is Key.DECISION:
                    value = abort(_WHY)
                elif effect.key is Key.GO:
                    value = abandon(_WHY)
                item = self._items.of((effect.key, value))
                if item not in found:
                    found.append(item)
        return tuple(found)

    def _matters(self, board: Board, item: Item) -> bool:
        key, value = item
        now = getattr(board, _FIELD[key])
        if isinstance(value, int):
            return not now & value
        if key is Key.REQUEST or self.rules.write_once:
            return not now
        return bool(now != value)

    def _live(self, board: int, flight: int) -> int:
        """Without the writes that can no longer change anything."""
        if not flight:
            return 0
        known = self._live_cache.get((board, flight))
        if known is None:
            known = self._live_cache[board, flight] = self._live_of(board, flight)
        return known

    def _live_of(self, board: int, flight: int) -> int:
        found: Board = self._boards.values[board]
        for item in range(flight.bit_length()):
            if flight >> item & 1 and not self._matters(found, self._items.values[item]):
                flight &= ~(1 << item)
        return flight

    def _arrive(self, board: int, item: int) -> tuple[int, str]:
        key = (board, item)
        known = self._arrive_cache.get(key)
        if known is None:
            known = self._arrive_cache[key] = self._arrive_of(board, item)
        return known

    def _arrive_of(self, board: int, item: int) -> tuple[int, str]:
        found: Board = self._boards.values[board]
        key, value = self._items.values[item]
        if not self._matters(found, (key, value)):
            return board, ""
        name = _FIELD[key]
        complaint = ""
        if isinstance(value, int):
            value = getattr(found, name) | value
        elif key is Key.REQUEST:
            value = self.request
        elif key in (Key.DECISION, Key.GO) and getattr(found, name):
            complaint = f"{key} changed from {getattr(found, name)!r} to {value!r}"
        return self._boards.of(replace(found, **{name: value})), complaint

    # --- what must hold -------------------------------------------------------------------------

    def _step_complaint(self, node: Node, board: Board) -> str:
        if node.broken:
            return "a rank trains on with a state that it could not restore"
        bound = node.member.phase not in (Phase.IDLE, Phase.ENTERING)
        aborted = bool(board.decision) and board.decision != COMMIT
        if bound and not aborted and board.go != GO:
            return "a bound rank took a step without an abort or a go"
        return ""

    def _check(self, world: World) -> str:
        key = (world[_BOARD], *world[_RANKS:])
        known = self._check_cache.get(key)
        if known is None:
            known = self._check_cache[key] = self._check_of(world)
        return known

    def _check_of(self, world: World) -> str:
        board: Board = self._boards.values[world[_BOARD]]
        nodes: list[Node] = [self._nodes.values[number] for number in world[_RANKS:]]
        committed = [n for n in nodes if n.at is At.PAUSE and n.member.phase in COMMITTED]
        if committed:
            going = any(n.at is At.NEXT for n in nodes)
            if going and any(n.member.phase is not Phase.UP for n in committed):
                return "a rank is paused while another trains"
            if going and board.go != GO:
                return "a rank went on before the go"
            if any(
                n.at is At.BEFORE or (n.at is At.PAUSE and n.member.phase is Phase.ENTERING)
                for n in nodes
            ):
                return "a rank is paused without the acknowledgement of all"
        if board.go == GO and board.ups != everyone(self.size):
            return "go before all were up"
        return ""

    def _end(self, world: World) -> str:
        board: Board = self._boards.values[world[_BOARD]]
        ats = {self._nodes.values[number].at for number in world[_RANKS:]}
        if ats == {At.NEXT}:
            return "resumed" if board.go == GO else "aborted"
        if ats == {At.BEFORE} and board.request is None:
            return "never began"
        if ats <= ENDED:
            return "saved" if board.go == REQUEUE else "requeued"
        return ""
