"""``slurm-ext checkpoint``: what lies in a checkpoint directory, is it whole, what may go.

Reads and deletes files by the rules of `slurm_ft.checkpoint`; torch is not needed and nothing is
unpickled. A chain of tasks keeps its checkpoints one directory down, one per task: those are looked
at too (`places`). Slurm is asked one thing, the directory that a job was submitted from, and only
where a job is named and the current directory does not hold its checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_ext.cli.tabular import Column, letters_help, parse_format, render
from slurm_ext.domain.codec import plain
from slurm_ext.domain.duration import FORMS, parse_duration
from slurm_ext.domain.errors import DataError, SlurmCommandError
from slurm_ext.domain.spans import counted, moment, span
from slurm_ext.slurm.process import CommandRunner
from slurm_ft.checkpoint.blocks import ROOTS, BlockStore
from slurm_ft.checkpoint.collect import DEFAULT_GRACE_S, Collected, collect, leftovers
from slurm_ft.checkpoint.layout import Complete, Listing, damage, examine
from slurm_ft.variables import BLOCK_STORE, CHECKPOINT_DIR

DEFAULT_FORMAT = "%26n %.12s %8t %19m %.6w %.4a %.9b %.9B %6l %R"
# Below the directory that a job was submitted from, as ft-run has it by default.
FOLDER = "ft-checkpoints"
_JOB = re.compile(r"\d+(_\d+)?\Z")


@dataclass(frozen=True, slots=True)
class _Row:
    """One directory of a listing."""

    name: str
    complete: Complete | None
    reason: str
    newest: bool
    now: float

    @property
    def state(self) -> str:
        if self.complete is None:
            return "BROKEN" if self.reason else "PARTIAL"
        return "LATEST" if self.newest else "COMPLETE"


def _size(count: int) -> str:
    amount = float(count)
    for unit in ("", "K", "M", "G", "T"):
        if amount < 1024 or unit == "T":
            return f"{amount:.0f}{unit}" if not unit or amount >= 100 else f"{amount:.3g}{unit}"
        amount /= 1024
    raise AssertionError("not reached")


def _of(row: _Row, word: Any) -> str:
    return "-" if row.complete is None else str(word(row.complete.manifest))


LETTERS: dict[str, Column[_Row]] = {
    "n": Column("NAME", lambda r: r.name, "directory"),
    "s": Column("STEP", lambda r: _of(r, lambda m: m.step), "step"),
    "t": Column("STATE", lambda r: r.state, "LATEST, COMPLETE, BROKEN or PARTIAL"),
    "m": Column("MADE", lambda r: _of(r, lambda m: moment(m.made_s, r.now)), "when it was made"),
    "g": Column("AGE", lambda r: _of(r, lambda m: span(r.now - m.made_s)), "age"),
    "w": Column("RANKS", lambda r: _of(r, lambda m: m.world_size), "ranks that wrote it"),
    "a": Column("ATT", lambda r: _of(r, lambda m: m.attempt), "attempt of the job"),
    "b": Column("SIZE", lambda r: _of(r, lambda m: _size(m.own_bytes)), "its own bytes"),
    "B": Column("SHARED", lambda r: _of(r, lambda m: _size(m.shared_bytes)), "in shared blocks"),
    "l": Column("LAYOUT", lambda r: _of(r, lambda m: m.layout), "dcp, blocks or files"),
    "T": Column("TORCH", lambda r: _of(r, lambda m: m.torch or "-"), "release of torch"),
    "R": Column("REASON", lambda r: r.reason, "why it is not complete"),
}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    parser = subparsers.add_parser(
        "checkpoint",
        help="list, verify and clean up checkpoints",
        description="Look at the checkpoints of a job, and clean up after jobs.",
    )
    below = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listing = below.add_parser(
        "ls",
        help="what lies in a checkpoint directory",
        description="List the checkpoints of a job, the newest first, then what is not complete; of"
        " a chain of tasks each task's.",
        epilog=f"Format fields:\n{letters_help(LETTERS)}\nDefault: {DEFAULT_FORMAT}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,  # -h is --noheader, as in squeue
    )
    listing.add_argument("--help", action="help", help="show this help and exit")
    _add_place(listing)
    listing.add_argument(
        "-o",
        "--format",
        metavar="FORMAT",
        default=DEFAULT_FORMAT,
        help="fields of a line, see below",
    )
    listing.add_argument("-h", "--noheader", action="store_true", help="no heading line")
    listing.add_argument("--json", action="store_true", help="manifests as a JSON object")
    listing.set_defaults(run=run_ls)

    verify = below.add_parser(
        "verify",
        help="are the checkpoints whole?",
        description="Check every checkpoint: manifest, presence and sizes of all files and blocks;"
        " with --deep also the content. Exits with 1 where one is damaged or none is there.",
    )
    _add_place(verify)
    verify.add_argument("--deep", action="store_true", help="read everything, compare digests")
    verify.set_defaults(run=run_verify)

    gc = below.add_parser(
        "gc",
        help="free what no checkpoint uses any more",
        description="In a block store: free blocks that no checkpoint uses. In a checkpoint"
        " directory: delete what unfinished saves have left. Complete checkpoints are never"
        " deleted.",
    )
    gc.add_argument(
        "place",
        nargs="*",
        metavar="DIR|JOBID",
        help=f"block stores, checkpoint directories or jobs (default: ${BLOCK_STORE})",
    )
    gc.add_argument("-n", "--dry-run", action="store_true", help="only tell what would be freed")
    gc.add_argument(
        "--older-than",
        metavar="TIME",
        default=span(DEFAULT_GRACE_S),
        help="spare what a save has wanted within this time, e.g. 12h or 2d (default:"
        f" {span(DEFAULT_GRACE_S)}); it must be longer than the longest save",
    )
    gc.set_defaults(run=run_gc)


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "place",
        nargs="?",
        metavar="DIR|JOBID",
        help=f"a checkpoint directory, or a job (default: ${CHECKPOINT_DIR})",
    )


def run_ls(args: argparse.Namespace) -> int:
    """Print the listing."""
    pieces = parse_format(args.format, LETTERS)
    root = find(args.place, JobFolders())
    listings = [examine(place) for place in places(root)]
    if args.json:
        told = [_document(listing) for listing in listings]
        single = [listing.root for listing in listings] == [root]
        print(json.dumps(told[0] if single else {"directory": str(root), "tasks": told}))
        return 0
    rows = [row for listing in listings for row in _rows(listing, root)]
    for line in render(rows, pieces, LETTERS, header=not args.noheader):
        print(line, flush=True)
    if not rows:
        print(f"slurm-ext: {root}: no checkpoint yet", file=sys.stderr)
    return 0


def places(root: Path) -> list[Path]:
    """The directories that hold saves: this one, and those of a chain's tasks below it."""
    below = sorted(
        path
        for path in root.iterdir()
        if not path.name.startswith((".", "step-")) and path.is_dir() and not path.is_symlink()
    )
    return [place for place in (root, *below) if _holds_saves(place)] or [root]


def _holds_saves(root: Path) -> bool:
    """Whether any save was begun here, also one that is broken or not complete."""
    listing = examine(root)
    return bool(listing.complete or listing.broken or listing.unfinished)


def run_verify(args: argparse.Namespace) -> int:
    """Check everything; 1 where something is wrong."""
    root = find(args.place, JobFolders())
    stores: dict[str, BlockStore] = {}

    def block_damage(complete: Complete, key: str, size: int) -> str | None:
        place = complete.manifest.block_store
        store = stores.get(place)
        if store is None:
            store = stores[place] = BlockStore(Path(place), create=False)
        return store.damage(key, size) if args.deep else store.absence(key, size)

    bad = 0
    for place in places(root):
        listing = examine(place)
        for complete in listing.complete:
            found = list(damage(complete, deep=args.deep, block_damage=block_damage))
            bad += bool(found)
            _verdict(f"{complete.path}: {'damaged' if found else 'ok'}", found)
        for name, reason in listing.broken:
            bad += 1
            _verdict(f"{place / name}: not complete", [reason])
        if not listing.complete and not listing.broken:
            bad += 1
            print(f"{place}: there is no checkpoint", file=sys.stderr)
    return 1 if bad else 0


def _verdict(line: str, reasons: Sequence[str]) -> None:
    # Buffered where it is no terminal: reasons on stderr would come before their line.
    print(line, flush=True)
    for words in reasons:
        print(f"  {words}", file=sys.stderr, flush=True)


def run_gc(args: argparse.Namespace) -> int:
    """Free what may go."""
    try:
        grace_s = parse_duration(args.older_than)
    except ValueError as exc:
        raise DataError(f"--older-than={args.older_than}", str(exc), f"write {FORMS}") from exc
    words: Sequence[str | None] = args.place or [os.environ.get(BLOCK_STORE)]
    would = "would be " if args.dry_run else ""
    for word in words:
        if word is None:
            raise DataError("gc", "no place is named", f"give a directory, or set {BLOCK_STORE}")
        place = Path(word)
        if (place / ROOTS).is_dir():
            store = BlockStore(place, create=False)
            _tell(place, collect(store, grace_s=grace_s, dry_run=args.dry_run), would)
            continue
        for folder in places(find(word, JobFolders())):
            gone = leftovers(folder, grace_s, dry_run=args.dry_run)
            for name in gone:
                print(f"{folder / name}: {would}deleted")
            print(f"{folder}: {counted(len(gone), 'unfinished save')} {would}deleted")
            _tell_kept(examine(folder), gone, grace_s)
    return 0


def _tell_kept(listing: Listing, gone: Sequence[str], grace_s: float) -> None:
    """What is not complete and stays all the same, and what to do about it."""
    for name in listing.unfinished:
        if name not in gone:
            print(
                f"{listing.root / name}: kept, a save has changed it within {span(grace_s)};"
                " where no save is running, give a shorter --older-than"
            )
    for name, reason in listing.broken:
        print(
            f"{listing.root / name}: kept, gc deletes unfinished saves only; it is broken and never"
            f" restored from ({reason}): delete it by hand where nobody can mend it"
        )


def _tell(place: Path, done: Collected, would: str) -> None:
    for name in done.dropped:
        print(f"{name} is gone: its note {would}dropped")
    for name in done.unsure:
        print(
            f"slurm-ext: warning: {name} cannot be looked at: its blocks are kept", file=sys.stderr
        )
    print(
        f"{place}: {counted(done.freed, 'block')} ({_size(done.freed_bytes)}) {would}freed,"
        f" {done.used} in use ({_size(done.used_bytes)}), {done.young} spared as recent"
        f" ({_size(done.young_bytes)}), {counted(done.leftovers, 'leftover')} {would}deleted"
    )


class JobFolders:
    """Asks Slurm for the directory that a job was submitted from."""

    def __init__(self, runner: CommandRunner | None = None) -> None:
        self._runner = runner or CommandRunner()

    def submitted_from(self, job: str) -> Path | None:
        """``None`` where neither the queue nor the accounting knows the job."""
        for argv in (
            ["squeue", "-h", "-j", job, "-o", "%Z"],
            ["sacct", "-X", "-n", "-P", "-o", "WorkDir", "-j", job],
        ):
            try:
                answer = self._runner.run(argv, check=False)
            except SlurmCommandError:
                continue
            first = answer.stdout.splitlines()[:1] if answer.rc == 0 else []
            if first and first[0].startswith("/"):
                return Path(first[0])
        return None


def find(word: str | None, slurm: JobFolders) -> Path:
    """The checkpoint directory that an argument means."""
    word = word or os.environ.get(CHECKPOINT_DIR)
    if word is None:
        raise DataError(
            "checkpoint", "no place is named", f"give DIR or JOBID, or set {CHECKPOINT_DIR}"
        )
    if not _JOB.match(word) or Path(word).is_dir():
        if not Path(word).is_dir():
            raise DataError(word, "is no directory", "give the directory with the step-* entries")
        return Path(word)
    tried = [Path(FOLDER) / word]
    if not tried[0].is_dir() and (submitted := slurm.submitted_from(word)) is not None:
        tried.append(submitted / FOLDER / word)
    if not tried[-1].is_dir():
        raise DataError(
            f"job {word}",
            f"has no checkpoints in {' or '.join(map(str, tried))}",
            f"give the directory itself where {CHECKPOINT_DIR} was set for the job",
        )
    return tried[-1]


def _rows(listing: Listing, root: Path) -> list[_Row]:
    """``root`` is what was asked for: a task's checkpoints are named with their task."""
    now = time.time()
    task = "" if listing.root == root else f"{listing.root.name}/"
    rows = [
        _Row(f"{task}{item.path.name}", item, "", number == 0, now)
        for number, item in enumerate(listing.complete)
    ]
    rows += [_Row(f"{task}{name}", None, why, False, now) for name, why in listing.broken]
    rows += [_Row(f"{task}{name}", None, "", False, now) for name in listing.unfinished]
    return rows


def _document(listing: Listing) -> dict[str, Any]:
    return {
        "directory": str(listing.root),
        "pointer": listing.pointer,
        "complete": [{"name": c.path.name, **plain(c.manifest)} for c in listing.complete],
        "broken": [{"name": name, "reason": reason} for name, reason in listing.broken],
        "unfinished": list(listing.unfinished),
    }
