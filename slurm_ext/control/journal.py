"""The journal: history, ledger, directives and what jobs taught, in one SQLite file on local disk.

What is ours on a job is written here *before* Slurm is asked to change it, so that a daemon killed
between the two still knows what to give back. The history is bounded in rows. A file that is
damaged is moved aside and a new one begun: what was lost is rebuilt from Slurm and from the plan
documents in the spool (`rebuild`), and no job ever waits for the journal.

Not thread-safe: one thread at a time uses a journal. SQLite runs in WAL mode with
``synchronous=NORMAL``: a power failure may lose the last cycles, never damage the file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from slurm_ext.control.files import is_there
from slurm_ext.domain.codec import dumps, loads
from slurm_ext.domain.errors import DataError, ProtocolError
from slurm_ext.domain.journal import JOURNAL_VERSION, JournalRow, LedgerEntry
from slurm_ext.estimate.calibration import Sample
from slurm_ext.estimate.history import Declared, PastRun

_log = logging.getLogger(__name__)

# Rows are removed in steps of this share, so that not every cycle has to remove some.
_TRIM_SHARE = 0.05
# How long another process (release, a reader) may keep the file locked before we give up.
_BUSY_S = 5.0
# What says nothing against the file: rights, memory, a lock, a full disk. Moving the file aside
# would lose what is ours, and the new one could not be used either.
_NO_DAMAGE = frozenset(
    {
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
    }
)

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE history (
    id INTEGER PRIMARY KEY,
    at_s REAL NOT NULL,
    cycle INTEGER NOT NULL,
    job_id TEXT NOT NULL,
    event TEXT NOT NULL,
    reason TEXT NOT NULL,
    fields TEXT NOT NULL,
    terms TEXT NOT NULL,
    outcome TEXT NOT NULL,
    version INTEGER NOT NULL
);
CREATE INDEX history_job ON history (job_id, id);
CREATE TABLE ledger (job_id TEXT PRIMARY KEY, entry TEXT NOT NULL);
CREATE TABLE directive (base_id INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE run (
    id INTEGER PRIMARY KEY,
    user TEXT NOT NULL,
    kind TEXT NOT NULL,
    declared_s REAL NOT NULL,
    actual_s REAL NOT NULL
);
"""
# Tables that came later: made where they are absent, so that a journal of before goes on.
_ADDED = "CREATE TABLE IF NOT EXISTS sample (job_id TEXT PRIMARY KEY, text TEXT NOT NULL)"
# Past runs kept over all users: enough for the habits of some hundred users.
_MAX_RUNS = 20_000


class Journal:
    """An open journal. Every method raises DataError when the file has become unusable."""

    def __init__(self, path: Path, max_rows: int) -> None:
        """Open or create. A damaged file or one of another version is a DataError."""
        self.path = path
        self._max_rows = max_rows
        with self._guard():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare()
                self._inode = os.stat(path).st_ino
            except BaseException:
                self._db.close()
                raise

    def _prepare(self) -> None:
        db = self._db
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        answer = db.execute("PRAGMA quick_check(1)").fetchone()
        if answer is None or answer[0] != "ok":
            raise sqlite3.DatabaseError(f"damaged: {answer[0] if answer else 'no answer'}")
        with self._transaction():
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name='meta'").fetchone():
                for statement in _SCHEMA.split(";"):
                    db.execute(statement)
                db.execute("INSERT INTO meta VALUES ('version', ?)", (str(JOURNAL_VERSION),))
            db.execute(_ADDED)
            row = db.execute("SELECT value FROM meta WHERE key='version'").fetchone()
        if row is None or row[0] != str(JOURNAL_VERSION):
            found = "none" if row is None else row[0]
            raise sqlite3.DatabaseError(f"version {found}, this release writes {JOURNAL_VERSION}")

    def close(self) -> None:
        """Close the file; what was written stays."""
        self._db.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as exc:
            raise DataError(
                str(self.path),
                f"journal cannot be used: {exc}",
                "free the disk and mend its rights; a damaged file is moved aside by itself",
            ) from exc

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # the first error is the one to tell
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @property
    def lost(self) -> bool:
        """Whether the file under our feet was removed or replaced by another."""
        try:
            return os.stat(self.path).st_ino != self._inode
        except OSError:
            return True

    # -- ledger ----------------------------------------------------------------------------------

    def ledger(self) -> dict[str, LedgerEntry]:
        """Everything that is ours, by job id. A row that cannot be read is a DataError."""
        with self._guard():
            rows = self._db.execute("SELECT job_id, entry FROM ledger").fetchall()
        try:
            return {job: loads(LedgerEntry, text, f"{self.path}: {job}") for job, text in rows}
        except ProtocolError as exc:
            raise DataError(str(self.path), str(exc), "move the journal aside") from exc

    def store(
        self,
        changed: Iterable[LedgerEntry] = (),
        removed: Iterable[str] = (),
        rows: Sequence[JournalRow] = (),
        directives: Mapping[int, str] | None = None,
    ) -> None:
        """Write ledger changes and history in one transaction."""
        entries = [(entry.job_id, dumps(entry)) for entry in changed]
        gone = [(job_id,) for job_id in removed]
        if not (entries or gone or rows or directives):
            return
        with self._guard(), self._transaction():
            self._db.executemany("DELETE FROM ledger WHERE job_id=?", gone)
            self._db.executemany("INSERT OR REPLACE INTO ledger VALUES (?,?)", entries)
            self._db.executemany(
                "INSERT INTO history (at_s, cycle, job_id, event, reason, fields, terms, outcome,"
                " version) VALUES (?,?,?,?,?,?,?,?,?)",
                [
                    (
                        row.at_s,
                        row.cycle,
                        row.job_id,
                        row.event,
                        row.reason,
                        row.fields,
                        row.terms,
                        row.outcome,
                        row.version,
                    )
                    for row in rows
                ],
            )
            if directives:
                self._db.executemany(
                    "INSERT OR REPLACE INTO directive VALUES (?,?)", list(directives.items())
                )
            if rows:
                self._trim()

    def _trim(self) -> None:
        low, high = self._db.execute("SELECT MIN(id), MAX(id) FROM history").fetchone()
        if high - low + 1 > self._max_rows:
            keep = int(self._max_rows * (1 - _TRIM_SHARE))
            self._db.execute("DELETE FROM history WHERE id <= ?", (high - keep,))

    # -- directives ------------------------------------------------------------------------------

    def directives(self) -> dict[int, str]:
        """AdminComments as they were first read, by the number of the job or array."""
        with self._guard():
            return dict(self._db.execute("SELECT base_id, text FROM directive").fetchall())

    def forget_directives(self, base_ids: Iterable[int]) -> None:
        """Drop the directives of jobs that are gone."""
        with self._guard(), self._transaction():
            self._db.executemany(
                "DELETE FROM directive WHERE base_id=?", [(base_id,) for base_id in base_ids]
            )

    # -- past runs -------------------------------------------------------------------------------

    def runs(self) -> list[PastRun]:
        """Past runs in the order in which they ended."""
        with self._guard():
            rows = self._db.execute(
                "SELECT user, declared_s, actual_s, kind FROM run ORDER BY id"
            ).fetchall()
        return [
            PastRun(user, declared, actual, Declared(kind)) for user, declared, actual, kind in rows
        ]

    def add_runs(self, runs: Sequence[PastRun]) -> None:
        """Remember jobs that ended; the oldest beyond a fixed number are forgotten."""
        if not runs:
            return
        with self._guard(), self._transaction():
            self._db.executemany(
                "INSERT INTO run (user, kind, declared_s, actual_s) VALUES (?,?,?,?)",
                [(run.user, run.kind.value, run.declared_s, run.actual_s) for run in runs],
            )
            self._db.execute(
                "DELETE FROM run WHERE id <= (SELECT MAX(id) FROM run) - ?", (_MAX_RUNS,)
            )

    # -- reported speeds -------------------------------------------------------------------------

    def samples(self) -> list[Sample]:
        """What jobs reported about their speed. One that cannot be read any more is left out."""
        with self._guard():
            rows = self._db.execute("SELECT job_id, text FROM sample ORDER BY job_id").fetchall()
        found = []
        for job_id, text in rows:
            try:
                found.append(loads(Sample, text, f"{self.path}: sample of {job_id}"))
            except ProtocolError as exc:
                _log.warning("a reported speed of another release is forgotten: %s", exc)
        return found

    def store_samples(self, changed: Sequence[Sample], gone: Sequence[str]) -> None:
        """Write new samples and drop those that count no more."""
        if not changed and not gone:
            return
        with self._guard(), self._transaction():
            self._db.executemany("DELETE FROM sample WHERE job_id=?", [(job,) for job in gone])
            self._db.executemany(
                "INSERT OR REPLACE INTO sample VALUES (?,?)",
                [(sample.job_id, dumps(sample)) for sample in changed],
            )

    # -- history ---------------------------------------------------------------------------------

    def history(self, job_id: str | None = None, last: int = 100) -> list[JournalRow]:
        """The last rows, oldest first; of one job where it is named."""
        where, values = ("WHERE job_id=?", [job_id]) if job_id is not None else ("", [])
        with self._guard():
            rows = self._db.execute(
                "SELECT at_s, cycle, job_id, event, reason, fields, terms, outcome, version"
                f" FROM history {where} ORDER BY id DESC LIMIT ?",
                [*values, last],
            ).fetchall()
        return [JournalRow(*row) for row in reversed(rows)]

    def rows(self) -> int:
        """How many rows of history there are."""
        with self._guard():
            found: int = self._db.execute("SELECT COUNT(*) FROM history").fetchone()[0]
        return found

    def last_cycle(self) -> int:
        """Number of the last cycle that wrote anything, 0 in a new file."""
        with self._guard():
            row = self._db.execute("SELECT cycle FROM history ORDER BY id DESC LIMIT 1").fetchone()
        return int(row[0]) if row else 0


def open_journal(path: Path, max_rows: int, now_s: float) -> tuple[Journal, str]:
    """Open the journal; a damaged file is moved aside and a new one begun.

    The second value is empty, or says what was lost and where the old file lies now. Raises
    DataError where a file cannot be used although it may be whole (locked, full disk, rights), and
    where not even a new one can be made.
    """
    existed = is_there(path)
    try:
        journal = Journal(path, max_rows)
        try:
            journal.ledger()
        except DataError:
            journal.close()
            raise
    except DataError as exc:
        if not existed or _undamaged(exc.__cause__):
            raise
        aside = path.with_name(f"{path.name}.damaged-{int(now_s)}")
        try:
            os.replace(path, aside)
            for tail in ("-wal", "-shm"):
                side = path.with_name(path.name + tail)
                if side.exists():
                    os.replace(side, aside.with_name(aside.name + tail))
        except OSError as move:
            raise DataError(
                str(path), f"is damaged and cannot be moved aside: {move}", "remove it"
            ) from exc
        return Journal(path, max_rows), f"{exc}; moved to {aside}"
    return journal, "" if existed else f"{path}: new journal"


def _undamaged(error: BaseException | None) -> bool:
    """Whether SQLite's error is about something else than the content of the file."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(code, int) and code & 0xFF in _NO_DAMAGE
