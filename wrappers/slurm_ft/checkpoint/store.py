"""The checkpoint store of a torch program: save, load, and saves that run beside training.

Every public call but ``done`` is collective: all ranks make it, in the same order. A save goes

    begin (agree on a temporary directory) -> stage -> plan, write, hash, fsync, commit

and `start` returns after the second part. The rest is left to a thread that has exchanges of its
own, on the store's process group and on a communicator made from it: on those that training uses,
the thread's collectives and the loop's would take each other's messages. A save is known to the
program when the ranks have looked at it together, in `finish`.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from slurm_ft.checkpoint import random_states
from slurm_ft.checkpoint.asynchronous import Writer
from slurm_ft.checkpoint.block_writer import BlockReader, BlockWriter
from slurm_ft.checkpoint.blocks import BlockStore
from slurm_ft.checkpoint.commit import (
    Committed,
    Rules,
    Saved,
    Ticket,
    Written,
    begin,
    commit,
    newest,
    pool,
)
from slurm_ft.checkpoint.errors import CheckpointError, LostPeerError
from slurm_ft.checkpoint.files import describe, hashed
from slurm_ft.checkpoint.layout import Complete, examine
from slurm_ft.checkpoint.loading import Loaded, own_part, undamaged
from slurm_ft.checkpoint.manifest import BLOCKS, DCP, FILES, Manifest, Meta
from slurm_ft.checkpoint.planner import FlatLoadPlanner, PiecesPlanner, told_as
from slurm_ft.checkpoint.staging import Buffers, Pieces, pieces_of, replica_words
from slurm_ft.checkpoint.state import (
    Nature,
    complete_flat,
    flatten,
    nature_of,
    put_back,
    tree_of,
)
from slurm_ft.checkpoint.writer import KnowingReader, NamingWriter, little_space
from slurm_ft.comm import Comm, ExchangeLostError
from slurm_ft.session.comms.solo import SoloComm
from slurm_ft.session.comms.torch_group import TorchComm

log = logging.getLogger(__name__)

# A save that takes longer than this on one rank has failed for all.
SAVE_LIMIT_S = 1800.0
# Of an exchange in the thread: limits are kept by whoever waits for the thread, and an exchange
# that ran over a limit of its own would spoil all saves to come.
_THREAD_S = 86400.0
# Between two looks at whether all ranks have written.
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05
# In the order of what the worst rank makes of a save.
_DONE, _RUNNING, _FAILED = 0, 1, 2


@dataclass(slots=True)
class _Flight:
    """A save that has begun and that the ranks have not looked at together."""

    step: int
    writer: Writer
    staging_s: float


class CheckpointStore:
    """Checkpoints of a torch program's state below ``root``, the same directory on all nodes.

    ``group`` is a gloo process group of all ranks that nothing else uses; ``None`` with one rank.
    ``check_replicas``: "first" compares what ranks hold under one key in the first save and
    whenever the keys change, "always" in each, "never" not at all. ``blocks`` is the root of a
    block store, where tensors that training does not change are kept once for many checkpoints.
    """

    def __init__(
        self,
        root: Path,
        comm: Comm,
        *,
        group: dist.ProcessGroup | None = None,
        keep: int = 2,
        quota_bytes: int | None = None,
        blocks: Path | None = None,
        check_replicas: str = "first",
        limit_s: float = SAVE_LIMIT_S,
    ) -> None:
        if group is None and comm.size > 1:
            raise CheckpointError(
                f"a checkpoint store on {comm.size} ranks needs a gloo process group of its own:"
                " group=torch.distributed.new_group(backend='gloo')"
            )
        if group is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise CheckpointError(
                f"torch.distributed has {dist.get_world_size()} ranks and this store one: give it a"
                " group and a communicator of all ranks that save together"
            )
        if check_replicas not in ("first", "always", "never"):
            raise CheckpointError(
                f"check_replicas={check_replicas!r}: give 'first', 'always' or 'never'"
            )
        self.root = root
        self.comm = comm
        self._group = group
        self._thread_comm: Comm = SoloComm() if group is None else TorchComm(_THREAD_S, group)
        self._rules = Rules(keep, quota_bytes)
        self._check = check_replicas
        self._limit_s = limit_s
        self._damaged: set[str] = set()
        self._blocks = self._open_blocks(blocks) if blocks is not None else None
        self._buffers = Buffers()
        self._flight: _Flight | None = None
        self._abandoned: Writer | None = None
        # What the last committed plan gave this rank to write, and the form it was made from.
        self._form: tuple[Any, ...] | None = None
        self._mine: frozenset[MetadataIndex] | None = None
        # Digests of tensors of which nobody says whether training changes them.
        self._digests: dict[MetadataIndex, tuple[str, ...]] = {}

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        meta: Meta | None = None,
        *,
        random: Mapping[str, Any] | None = None,
    ) -> Saved:
        """Save and return when it is durable. One that is under way is finished first.

        ``random`` are the random states to save (`random_states.capture`), this rank's present
        ones by default.

        Written in the thread too, though without a copy of what lies in host memory: a peer that
        hangs must not hold this rank beyond the limit.
        """
        self.finish()
        self._begin(step, state, meta or Meta(), staged=False, random=random)
        saved = self.finish()
        assert saved is not None
        return saved

    def start(self, step: int, state: Mapping[str, Any], meta: Meta | None = None) -> None:
        """Begin a save; the state may change as soon as this returns.

        At most one is under way: a second call finishes the first, and raises if that failed.
        """
        self.finish()
        self._begin(step, state, meta or Meta(), staged=True)

    def done(self) -> bool:
        """Whether `finish` would not wait for this rank. Local and cheap."""
        return self._flight is None or self._flight.writer.done()

    def finish(self, limit_s: float | None = None) -> Saved | None:
        """Wait for the save that is under way; ``None`` where there is none.

        Raises CheckpointError on every rank where it failed on any.
        """
        flight = self._flight
        if flight is None:
            return None
        self._flight = None
        problem = self._settle(flight.writer, self._limit_s if limit_s is None else limit_s)
        if problem is not None:
            raise CheckpointError(problem)
        committed = flight.writer.committed
        assert committed is not None
        took = flight.staging_s + flight.writer.seconds
        return Saved(flight.step, committed.path, committed.bytes, took)

    def latest(self) -> Complete | None:
        """The newest complete checkpoint by its manifest and sizes, the same on every rank."""
        return newest(self.comm, self.root, self._damaged)

    def load(
        self,
        state: Mapping[str, Any],
        complete: Complete | None = None,
        *,
        random: bool = True,
    ) -> Loaded | None:
        """Load the newest undamaged checkpoint into ``state``, and (``random``) the random states.

        Everything that ``state`` has must be in the checkpoint. ``None`` where nothing was saved.
        """
        self.finish()
        chosen = undamaged(
            self.comm,
            self.root,
            complete,
            must_trust=True,
            limit_s=self._limit_s,
            damaged=self._damaged,
            block_damage=self._block_damage,
        )
        if chosen is None:
            return None
        if chosen.manifest.layout == FILES:
            raise CheckpointError(
                f"{chosen.path} was written by a function of the program's own: give the session"
                " save= and restore="
            )
        self._read(chosen, state)
        return own_part(self.comm, chosen, random=random)

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Make the staging buffers before the first save, whose stall they would lengthen.

        Local: costs memory for the whole state until the second save knows who writes what.
        """
        self._buffers.stage(pieces_of(state), self._mine, borrow=False)

    def move(self, root: Path) -> None:
        """Keep checkpoints of another task below another directory from now on. Local."""
        if self._flight is not None:
            raise CheckpointError("a save is under way: finish it before the store moves")
        self.root = root
        self._damaged = set()
        self._form = self._mine = None

    def close(self) -> None:
        """Free buffers and exchanges. A save under way is not waited for."""
        idle = self.done() and (self._abandoned is None or self._abandoned.done())
        if idle:  # freeing a group would wait for what is under way on it
            self._thread_comm.close()
        self._flight = None
        self._buffers = Buffers()

    def _open_blocks(self, root: Path) -> BlockStore:
        problem, store = "", None
        try:
            store = BlockStore(root)
        except CheckpointError as exc:
            problem = str(exc)
        if words := pool(self.comm, problem):
            raise CheckpointError(words)
        assert store is not None
        return store

    def _begin(
        self,
        step: int,
        state: Mapping[str, Any],
        meta: Meta,
        *,
        staged: bool,
        random: Mapping[str, Any] | None = None,
    ) -> None:
        """Plan, agree, stage, and let the thread go."""
        started = time.monotonic()
        problem, pieces, form, nature = "", None, None, Nature()
        try:
            pieces = pieces_of(state)
            form, nature = pieces.form(), nature_of(state)
        except Exception as exc:  # whatever a user's state_dict() raises: all ranks are told
            problem = told_as(exc)
        if self._abandoned is not None and not self._abandoned.done():
            problem = "an earlier save that ran over its limit is not over yet"
        ticket, decided = begin(
            self.comm,
            self.root,
            step,
            self._rules,
            said={"problem": problem, "same": form == self._form and self._mine is not None},
            decide=self._decide,
            forget=self._forget,
        )
        assert pieces is not None  # else the answer was an error
        if not decided["same"]:
            self._form, self._mine = form, None
        compare = self._check == "always" or (self._check == "first" and not decided["same"])
        # To compare replicas, every rank needs its copy of everything.
        only = None if compare else self._mine
        pieces = self._buffers.stage(pieces, only, borrow=not staged)
        states = random_states.capture() if random is None else random

        def work() -> Committed:
            written = self._write(ticket, pieces, nature, compare, states, meta)
            return self._commit(ticket, meta, written)

        self._flight = _Flight(step, Writer(work), time.monotonic() - started)

    def _write(
        self,
        ticket: Ticket,
        pieces: Pieces,
        nature: Nature,
        compare: bool,
        states: Mapping[str, Any],
        meta: Meta,
    ) -> Written:
        """This rank's share of the work, in the thread."""
        problem = ""
        try:
            random_states.write(ticket.directory, self.comm.rank, states, dict(meta.position))
        except (OSError, TypeError, ValueError) as exc:
            problem = told_as(exc)
        planner = PiecesPlanner(pieces, replica_words(pieces) if compare else {})
        writer: NamingWriter | BlockWriter = NamingWriter(ticket.directory)
        if self._blocks is not None:
            writer = BlockWriter(
                ticket.directory, self.comm.rank, self._blocks, nature, self._digests
            )
        try:
            _quiet()
            dcp.save({}, storage_writer=writer, planner=planner, process_group=self._group)
            problem = problem or planner.problem or writer.problem
            if problem:
                self._mine = None
                return Written(error=problem)
            names = sorted({*writer.names, random_states.file_name(self.comm.rank)})
            files = tuple(hashed(ticket.directory, name) for name in names)
        except (Exception, CheckpointException) as exc:  # an exchange, or a digest
            self._mine = None
            return Written(error=problem or told_as(exc) + little_space(ticket.directory))
        self._mine = planner.written
        if isinstance(writer, BlockWriter):
            self._digests = writer.after
            return Written(files, tuple(writer.blocks.values()))
        return Written(files)

    def _settle(self, writer: Writer, limit_s: float) -> str | None:
        """Wait until the save is over on all ranks, or has failed on one; tells what failed.

        In rounds, because a rank whose peer has died leaves torch's collectives with an error, and
        the others would wait in them for this rank as it would wait for them here.
        """
        until, pause_s = time.monotonic() + limit_s, _FIRST_PAUSE_S
        problem = ""
        try:
            while True:
                if writer.wait(pause_s):
                    problem = writer.problem
                elif time.monotonic() > until:
                    problem = f"not saved within {limit_s:g} s"
                state = _FAILED if problem else _DONE if writer.done() else _RUNNING
                worst = self.comm.start_max(state).result()
                if worst == _DONE:
                    return None
                if worst == _FAILED:
                    return pool(self.comm, problem)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except ExchangeLostError as exc:
            raise LostPeerError(f"a rank was lost during a save: {exc}") from exc
        finally:
            if not writer.done():
                # It goes on beside, and may become complete yet; saves wait until it is over.
                self._abandoned = writer

    def _commit(self, ticket: Ticket, meta: Meta, written: Written) -> Committed:
        """Make it complete, in the thread."""
        blocks = self._blocks
        layout, place = (DCP, "") if blocks is None else (BLOCKS, str(blocks.root.absolute()))

        def tell(parts: Sequence[Written]) -> Manifest:
            return describe(
                ticket, meta, parts, self.comm.size, layout, str(torch.__version__), place
            )

        def record(name: str, manifest: Manifest) -> None:
            if blocks is not None:
                blocks.record(self.root, name, manifest)

        return commit(
            self._thread_comm,
            self.root,
            ticket,
            written,
            self._rules,
            tell,
            damaged=self._damaged,
            forget=self._forget,
            record=record,
        )

    def _forget(self, complete: Complete) -> None:
        """A checkpoint was deleted on rank 0."""
        if (store := self._store_of(complete)) is not None:
            store.forget(complete.path.parent, complete.path.name)

    def _store_of(self, complete: Complete) -> BlockStore | None:
        """The block store of a checkpoint, which may have been made with other options."""
        if complete.manifest.layout != BLOCKS:
            return None
        if self._blocks is not None and (
            not complete.manifest.blocks or self._blocks.has(complete.manifest.blocks[0])
        ):
            return self._blocks
        return BlockStore(Path(complete.manifest.block_store), create=False)

    def _decide(self, said: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Rank 0's answer to what all ranks say before a save."""
        problems = [f"rank {rank}: {w['problem']}" for rank, w in enumerate(said) if w["problem"]]
        if problems:
            raise CheckpointError("; ".join(problems[:4]))
        if self._blocks is not None and self._form is None:
            # A directory that was copied or moved here is not known to the collector yet.
            for complete in examine(self.root).complete:
                name = complete.path.name
                if complete.manifest.blocks and not self._blocks.is_recorded(self.root, name):
                    self._blocks.record(self.root, name, complete.manifest)
        return {"same": all(word["same"] for word in said)}

    def _block_damage(self, complete: Complete, key: str, size: int) -> str | None:
        store = self._store_of(complete)
        return store.damage(key, size) if store is not None else None

    def _reader(self, complete: Complete) -> Any:
        store = self._store_of(complete)
        if store is None:
            return KnowingReader(complete.path)
        return BlockReader(complete.path, store)

    def _read(self, complete: Complete, state: Mapping[str, Any]) -> None:
        problem = ""
        try:
            flat, paths = flatten(tree_of(state))
            reader = self._reader(complete)
            complete_flat(flat, paths, state, reader.read_metadata())
        except Exception as exc:  # a user's state_dict(), or a pickle of another torch
            problem = told_as(exc)
        if words := pool(self.comm, problem):
            raise CheckpointError(f"{complete.path} cannot be loaded: {words}")
        planner = FlatLoadPlanner(flat)
        try:
            _quiet()
            dcp.load({}, storage_reader=reader, planner=planner, process_group=self._group)
        except CheckpointException as exc:
            raise CheckpointError(f"{complete.path} cannot be loaded: {told_as(exc)}") from exc
        except RuntimeError as exc:  # gloo's: what this rank's own part raised was kept
            raise LostPeerError(f"a rank was lost during a load: {told_as(exc)}") from exc
        if words := pool(self.comm, planner.problem or reader.problem):
            raise CheckpointError(f"{complete.path} cannot be loaded: {words}")
        try:
            put_back(state, flat, paths)
        except Exception as exc:  # a user's load_state_dict()
            problem = told_as(exc)
        if words := pool(self.comm, problem):
            raise CheckpointError(f"{complete.path} does not fit the program: {words}")


def _quiet() -> None:
    """No warnings about what torch does inside of our own calls; the program's own stay.

    Filters and not `warnings.catch_warnings`, which would undo what another thread has set: a save
    beside training is one. Each names the text and, where it can, the module that is at fault.
    """
    # torch 2.6 asks each tensor of a save for its storage, and would say so once per rank.
    warnings.filterwarnings(
        "ignore",
        message="TypedStorage is deprecated",
        module=r"torch\.distributed\.checkpoint\.filesystem$",
    )
    if not dist.is_initialized():
        # One process without torch.distributed is meant here.
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
