"""A checkpoint becomes real: the steps that all ranks take together, whatever wrote the data.

    begin    rank 0 cleans up, makes a new temporary directory; all ranks learn its name
    (each rank writes its files there, or notes why it could not)
    commit   rank 0 collects what was written, writes the manifest, renames, moves the pointer

Whatever goes wrong on one rank is carried in the exchange as a text, never as a missing call: all
ranks return, or all raise the same CheckpointError, and no rank is left waiting. The order on disk
is: data, manifest, their directory, rename, parent directory, pointer. Killed at any point, there
is a complete checkpoint of this step or of the one before.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_ext.domain.codec import plain
from slurm_ext.domain.errors import SlurmExtError
from slurm_ft.checkpoint.errors import CheckpointError, LostPeerError
from slurm_ft.checkpoint.hashing import replace_durably, sync_directory, write_new
from slurm_ft.checkpoint.layout import (
    LATEST,
    TEMPORARY,
    Complete,
    Listing,
    examine,
    free_name,
    names_in,
    read_complete,
)
from slurm_ft.checkpoint.manifest import MANIFEST, BlockEntry, FileEntry, Manifest
from slurm_ft.checkpoint.retention import delete, delete_tree, make_room, superfluous
from slurm_ft.comm import Comm, ExchangeLostError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rules:
    """How many complete checkpoints stay, and how many bytes the directory may hold."""

    keep: int = 2
    quota_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Ticket:
    """A save that has begun: where its files go until it is complete."""

    step: int
    serial: int
    directory: Path


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank has written, or why it has not."""

    files: tuple[FileEntry, ...] = ()
    blocks: tuple[BlockEntry, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """Where a complete checkpoint lies, and its bytes without those in a shared store."""

    path: Path
    bytes: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint. ``save_s`` is what it took, without waiting for the program."""

    step: int
    path: Path
    bytes: int
    save_s: float


def begin(
    comm: Comm,
    root: Path,
    step: int,
    rules: Rules,
    *,
    said: Mapping[str, Any] | None = None,
    decide: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]] | None = None,
    forget: Callable[[Complete], None] | None = None,
) -> tuple[Ticket, Mapping[str, Any]]:
    """Agree on a new temporary directory; every rank calls it.

    ``said`` is this rank's word to rank 0, whose ``decide`` answers all of them; a CheckpointError
    that it raises is raised on every rank.
    """
    said_by_all = _exchange(lambda: comm.gather(dict(said or {})))
    answer: dict[str, Any] = {}
    if said_by_all is not None:
        try:
            decided = dict(decide(said_by_all)) if decide is not None else {}
            ticket = _prepare(root, step, rules, forget)
            answer = {"name": ticket.directory.name, "serial": ticket.serial, "decided": decided}
        except (SlurmExtError, OSError) as exc:
            answer = {"error": _words(exc, root)}
    answer = _exchange(lambda: comm.broadcast(answer))
    if "error" in answer:
        raise CheckpointError(f"step {step} is not saved: {answer['error']}")
    return Ticket(step, answer["serial"], root / answer["name"]), answer["decided"]


def _prepare(
    root: Path, step: int, rules: Rules, forget: Callable[[Complete], None] | None
) -> Ticket:
    # Readable as the umask says; never writable by others, who could then change what is unpickled.
    root.mkdir(parents=True, exist_ok=True)
    listing = examine(root)
    for name in listing.unfinished:
        delete_tree(root / name)
    for name, reason in listing.broken:
        log.warning("%s is not a complete checkpoint: %s", root / name, reason)
    if rules.quota_bytes is not None:
        # The best guess before anything is written: as much as the last one.
        expected = listing.complete[0].manifest.own_bytes if listing.complete else 0
        _fit(listing, expected, rules.quota_bytes, forget)
    serial = 1 + max((item.manifest.serial for item in listing.complete), default=0)
    directory = root / f"{TEMPORARY}{step:012d}-{secrets.token_hex(6)}"
    directory.mkdir(mode=0o755)
    return Ticket(step, serial, directory)


def _fit(
    listing: Listing,
    needed: int,
    quota: int,
    forget: Callable[[Complete], None] | None,
) -> None:
    gone, lacking = make_room(listing.complete, needed, quota)
    if lacking:
        raise CheckpointError(
            f"{listing.root}: its quota of {quota} bytes lacks {lacking} for a checkpoint of"
            f" {needed} bytes beside the last complete one; raise the quota or save less state"
        )
    for item in gone:
        log.info("%s makes room for the next checkpoint", item.path)
        delete(item, forget)


def commit(
    comm: Comm,
    root: Path,
    ticket: Ticket,
    written: Written,
    rules: Rules,
    describe: Callable[[Sequence[Written]], Manifest],
    *,
    limit_s: float | None = None,
    damaged: Collection[str] = (),
    forget: Callable[[Complete], None] | None = None,
    record: Callable[[str, Manifest], None] | None = None,
) -> Committed:
    """Make the checkpoint complete, or raise the same CheckpointError on every rank.
    ``describe`` makes the manifest on rank 0 from what all ranks have written. ``record`` is told
    the final name before the rename, ``forget`` each checkpoint that was deleted afterwards.
    """
    everything = _exchange(lambda: comm.gather(plain(written), limit_s))
    answer: dict[str, Any] = {}
    if everything is not None:
        try:
            parts = [_written(item) for item in everything]
            if wrong := _together([part.error or "" for part in parts]):
                raise CheckpointError(wrong)
            manifest = describe(parts)
            name = _complete(root, ticket, manifest, rules, record, forget)
            answer = {"name": name, "bytes": manifest.own_bytes}
        except (SlurmExtError, OSError, TypeError, ValueError) as exc:
            # The latter two: what the program said about the checkpoint has no JSON form.
            answer = {"error": _words(exc, ticket.directory)}
            delete_tree(ticket.directory)
    answer = _exchange(lambda: comm.broadcast(answer, limit_s))
    if "error" in answer:
        raise CheckpointError(f"step {ticket.step} is not saved: {answer['error']}")
    if comm.rank == 0:
        _retire(root, rules, damaged, forget)
    return Committed(root / answer["name"], answer["bytes"])


def _complete(
    root: Path,
    ticket: Ticket,
    manifest: Manifest,
    rules: Rules,
    record: Callable[[str, Manifest], None] | None,
    forget: Callable[[Complete], None] | None,
) -> str:
    """Rank 0's part. Every file is looked at again: another node's rank may have written it."""
    for entry in manifest.files:
        size = (ticket.directory / entry.name).stat().st_size
        if size != entry.size:
            raise CheckpointError(
                f"{ticket.directory / entry.name}: {size} bytes arrived of {entry.size}"
            )
    if rules.quota_bytes is not None:
        _fit(examine(root), manifest.own_bytes, rules.quota_bytes, forget)
    write_new(ticket.directory / MANIFEST, manifest.to_json().encode())
    _sync_tree(ticket.directory, {entry.name for entry in manifest.files})
    name = free_name(ticket.step, names_in(root))
    if record is not None:
        record(name, manifest)
    os.rename(ticket.directory, root / name)
    sync_directory(root)
    try:
        replace_durably(root / LATEST, f"{name}\n".encode())
    except OSError as exc:
        # The checkpoint is complete without it: readers go by the manifests.
        log.warning("%s: cannot be written (%s); it names an older step", root / LATEST, exc)
    return name


def _sync_tree(directory: Path, names: Collection[str]) -> None:
    inner = {parent for name in names for parent in (directory / name).parents}
    for path in sorted({p for p in inner if p.is_relative_to(directory)} | {directory}):
        sync_directory(path)


def _retire(
    root: Path,
    rules: Rules,
    damaged: Collection[str],
    forget: Callable[[Complete], None] | None,
) -> None:
    try:
        for item in superfluous(examine(root), rules.keep, damaged):
            delete(item, forget)
    except (OSError, SlurmExtError) as exc:
        log.warning("%s: old checkpoints stay for now: %s", root, exc)


def _seen(path: Path) -> Complete:
    """What rank 0 has committed, as this rank's node sees it (file systems lag by seconds)."""
    until = time.monotonic() + SEEN_LIMIT_S
    while True:
        try:
            return read_complete(path)
        except CheckpointError as exc:
            if time.monotonic() > until:
                raise CheckpointError(
                    f"{path}: rank 0 has committed it and this rank does not see it ({exc}): the"
                    " checkpoint directory must be the same on all nodes"
                ) from exc
        time.sleep(SEEN_POLL_S)


# NFS clients keep the attributes of a directory for up to 60 s (acdirmax).
SEEN_LIMIT_S = 70.0
SEEN_POLL_S = 0.1


def newest(comm: Comm, root: Path, avoid: Collection[str] = ()) -> Complete | None:
    """The newest complete checkpoint but those to ``avoid``, the same on every rank.

    ``None`` where nothing was ever saved. Where something was and nothing of it is usable, that is
    an error: to begin at step 0 again is for a person to decide.
    """
    answer: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            chosen = _choose(examine(root), avoid)
            answer = {"name": chosen.path.name if chosen else None}
        except (SlurmExtError, OSError) as exc:
            answer = {"error": _words(exc, root)}
    answer = _exchange(lambda: comm.broadcast(answer))
    if "error" in answer:
        raise CheckpointError(answer["error"])
    if answer["name"] is None:
        return None
    problem, complete = "", None
    try:
        complete = _seen(root / answer["name"])
    except CheckpointError as exc:
        problem = str(exc)
    if words := pool(comm, problem, SEEN_LIMIT_S * 2):
        raise CheckpointError(words)
    return complete


def _choose(listing: Listing, avoid: Collection[str]) -> Complete | None:
    for name, reason in listing.broken:
        log.warning("%s is passed over: %s", listing.root / name, reason)
    for item in listing.complete:
        if item.path.name not in avoid:
            return item
    bad = [name for name, _ in listing.broken] + [c.path.name for c in listing.complete]
    if bad:
        raise CheckpointError(
            f"{listing.root}: no usable checkpoint is left ({', '.join(bad)} damaged, see"
            f" 'slurm-ext checkpoint verify --deep'); restore one from a backup, or move"
            " them away to begin again"
        )
    return None


def pool(comm: Comm, problem: str, limit_s: float | None = None) -> str:
    """The problems of all ranks in one text, on every rank; empty where nobody has one."""
    problems = _exchange(lambda: comm.gather(problem, limit_s))
    words = _together(problems) if problems is not None else ""
    return str(_exchange(lambda: comm.broadcast(words, limit_s)))


def _together(problems: Sequence[str]) -> str:
    """One text for what may have befallen thousands of ranks in the same way."""
    ranks: dict[str, list[int]] = {}
    for rank, problem in enumerate(problems):
        if problem:
            ranks.setdefault(problem, []).append(rank)
    if len(ranks) == 1 and len(next(iter(ranks.values()))) == len(problems):
        return next(iter(ranks))
    told = [
        f"rank {who[0]}{f' and {len(who) - 1} more' if len(who) > 1 else ''}: {problem}"
        for problem, who in ranks.items()
    ]
    return "; ".join(told[:4]) + (f"; and {len(told) - 4} more" if len(told) > 4 else "")


def _exchange(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ExchangeLostError as exc:
        raise LostPeerError(f"a rank was lost while checkpoints were agreed on: {exc}") from exc


def _written(raw: Mapping[str, Any]) -> Written:
    return Written(
        tuple(FileEntry(**item) for item in raw["files"]),
        tuple(BlockEntry(**item) for item in raw["blocks"]),
        raw["error"],
    )


def _words(exc: BaseException, place: Path) -> str:
    if isinstance(exc, OSError):
        return f"{exc.filename or place}: {exc.strerror or exc}"
    return str(exc)
