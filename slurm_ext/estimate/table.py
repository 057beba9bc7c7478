"""The throughput table on disk: one SQLite file in WAL mode, on a local disk.

One writer at a time (``slurm-ext table import``, the daemon), any number of readers. Readers are
ordinary users who may not write into the directory, and SQLite then cannot create the shared-memory
file of a WAL database that nobody has open. The choice a reader would question: in that case, and
only when no log is lying beside it, the file is opened as immutable, and what was read counts only
if the file did not change meanwhile.

Measuring a key again merges into its row. Nothing is ever half imported: one call, one transaction.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from slurm_ext.domain.errors import DataError, SlurmExtError, SourceMissingError
from slurm_ext.estimate.csvtext import parse_placement, placement_text
from slurm_ext.estimate.index import ThroughputIndex
from slurm_ext.estimate.measurement import Cost, CostKind, Key, Measurement, Settings

DEFAULT_TABLE = Path("/var/lib/slurm-ext/throughput.sqlite")  # the default of the key `table`
SCHEMA_VERSION = 1
APPLICATION_ID = 0x66745F31  # "ft_1", so that another program's file is not taken for ours
BUSY_S = 10.0
READ_TRIES = 3
FILE_MODE = 0o644  # measurements are no secret: explain reads them as the user

_KEY = (
    "model, revision, input_shape, gpu_type, gpus, nodes, placement, local_batch, accumulation,"
    " frozen, precision, grad_checkpointing, stages, micro_batches, environment"
)
_VALUE = (
    "throughput, step_time_s, sync_time_s, memory_gb, variance, count, out_of_memory, measured_s,"
    " source"
)
_SCHEMA = f"""
CREATE TABLE throughput (
    model TEXT NOT NULL, revision TEXT NOT NULL, input_shape TEXT NOT NULL,
    gpu_type TEXT NOT NULL, gpus INTEGER NOT NULL, nodes INTEGER NOT NULL,
    placement TEXT NOT NULL, local_batch INTEGER NOT NULL, accumulation INTEGER NOT NULL,
    frozen TEXT NOT NULL, precision TEXT NOT NULL, grad_checkpointing INTEGER NOT NULL,
    stages INTEGER NOT NULL, micro_batches INTEGER NOT NULL, environment TEXT NOT NULL,
    throughput REAL NOT NULL, step_time_s REAL, sync_time_s REAL, memory_gb REAL, variance REAL,
    count INTEGER NOT NULL, out_of_memory INTEGER NOT NULL, measured_s REAL, source TEXT NOT NULL,
    PRIMARY KEY ({_KEY})
) STRICT, WITHOUT ROWID;
CREATE TABLE costs (
    kind TEXT NOT NULL, model TEXT NOT NULL, gpu_type TEXT NOT NULL, gpus INTEGER NOT NULL,
    seconds REAL NOT NULL, source TEXT NOT NULL,
    PRIMARY KEY (kind, model, gpu_type, gpus)
) STRICT, WITHOUT ROWID;
CREATE TABLE imports (
    digest TEXT PRIMARY KEY, name TEXT NOT NULL, rows INTEGER NOT NULL, at_s REAL NOT NULL
) STRICT, WITHOUT ROWID;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""
# Three states in one column; 2 is "not recorded", since a key column cannot be NULL.
_SWITCH = {None: 2, False: 0, True: 1}
_SWITCH_BACK = {v: k for k, v in _SWITCH.items()}
_MARKS = ", ".join("?" * 24)


@dataclass(frozen=True, slots=True)
class Content:
    """Everything in a table."""

    measurements: tuple[Measurement, ...]
    costs: tuple[Cost, ...]

    def index(self) -> ThroughputIndex:
        """The content arranged for lookups."""
        return ThroughputIndex(self.measurements, self.costs)


def read_table(path: Path) -> Content:
    """Read a whole table. Needs read permission only.

    Raises SourceMissingError where there is no file or it cannot be opened, DataError where it is
    damaged or of another version. An absent table is never an empty one.
    """
    for _ in range(READ_TRIES):
        with _explained(path):
            if not path.exists():
                raise SourceMissingError(
                    f"throughput table {path}", "no such file; make one with slurm-ext table import"
                )
            before = table_stamp(path)
            connection, exact = _open_to_read(path)
            try:
                _check_version(connection, path)
                content = _content(connection)
            finally:
                connection.close()
            if exact or table_stamp(path) == before:
                return content
    raise SourceMissingError(f"throughput table {path}", "it changed at every try; read it again")


def load_index(path: Path) -> ThroughputIndex:
    """:func:`read_table`, arranged for lookups."""
    return read_table(path).index()


def table_bytes(path: Path) -> bytes:
    """The whole table as one file's content, for a copy that others may read."""
    with _explained(path):
        connection, _ = _open_to_read(path)
        try:
            return connection.serialize()
        finally:
            connection.close()


def table_stamp(path: Path) -> tuple[int, ...]:
    """Numbers that change when the table does; cheap enough to be asked every cycle."""
    stamp: list[int] = []
    for name in (path, _beside(path, "-wal")):
        try:
            status = name.stat()
            stamp += (status.st_ino, status.st_mtime_ns, status.st_size)
        except FileNotFoundError:
            stamp += (0, 0, 0)
    return tuple(stamp)


class TableWriter:
    """A table opened for writing; use it as a context manager. It is made where it is absent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        fresh = not path.exists() or path.stat().st_size == 0
        if not path.parent.is_dir():
            raise DataError(str(path), "its directory does not exist", f"mkdir -p {path.parent}")
        if fresh:
            _make_file(path)
        with _explained(path):
            self._connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
            try:
                if fresh:
                    self._connection.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}COMMIT;")
                _check_version(self._connection, path)
                mode = self._connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
                if mode != "wal":
                    raise DataError(
                        str(path), "its file system has no shared memory", "use a local disk"
                    )
                self._connection.execute("PRAGMA synchronous = NORMAL")
            except BaseException:
                self._connection.close()
                raise

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the log is written back into it."""
        self._connection.close()

    def add(
        self,
        measurements: Iterable[Measurement] = (),
        costs: Iterable[Cost] = (),
        *,
        digest: str = "",
        name: str = "",
        at_s: float = 0.0,
    ) -> bool:
        """Merge everything in one transaction.

        ``digest`` names the content of an imported file: a second import of the same content
        changes nothing and answers ``False``, for it is no second measurement.
        """
        with _explained(self.path), self._transaction():
            if (
                digest
                and self._connection.execute(
                    "SELECT 1 FROM imports WHERE digest = ?", (digest,)
                ).fetchone()
            ):
                return False
            rows = 0
            for m in measurements:
                self._merge(m)
                rows += 1
            for c in costs:
                self._connection.execute(
                    "INSERT OR REPLACE INTO costs VALUES (?, ?, ?, ?, ?, ?)",
                    (c.kind.value, c.model, c.gpu_type, c.gpus, c.seconds, c.source),
                )
                rows += 1
            if digest:
                self._connection.execute(
                    "INSERT INTO imports VALUES (?, ?, ?, ?)", (digest, name, rows, at_s)
                )
        return True

    def _merge(self, m: Measurement) -> None:
        key = _key_values(m.key)
        where = " AND ".join(f"{name} = ?" for name in _KEY.split(", "))
        found = self._connection.execute(
            f"SELECT {_KEY}, {_VALUE} FROM throughput WHERE {where}", key
        ).fetchone()
        merged = _measurement(found).merged(m) if found else m
        self._connection.execute(
            f"INSERT OR REPLACE INTO throughput ({_KEY}, {_VALUE}) VALUES ({_MARKS})",
            (
                *key,
                merged.throughput,
                merged.step_time_s,
                merged.sync_time_s,
                merged.memory_gb,
                merged.variance,
                merged.count,
                merged.out_of_memory,
                merged.measured_s,
                merged.source,
            ),
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")


def _open_to_read(path: Path) -> tuple[sqlite3.Connection, bool]:
    """A connection, and whether SQLite itself keeps what it reads consistent."""
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_S)
    try:
        connection.execute("PRAGMA user_version").fetchone()
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        return connection, True
    except sqlite3.OperationalError:
        connection.close()
        log = _beside(path, "-wal")
        if not os.access(path, os.R_OK) or (log.exists() and log.stat().st_size):
            raise
    except BaseException:
        connection.close()
        raise
    return sqlite3.connect(f"{uri}&immutable=1", uri=True, timeout=BUSY_S), False


def _content(connection: sqlite3.Connection) -> Content:
    connection.execute("BEGIN")
    rows = connection.execute(f"SELECT {_KEY}, {_VALUE} FROM throughput ORDER BY {_KEY}")
    measurements = tuple(_measurement(row) for row in rows)
    costs = tuple(
        Cost(CostKind(kind), seconds, model, gpu_type, gpus, source)
        for kind, model, gpu_type, gpus, seconds, source in connection.execute(
            "SELECT kind, model, gpu_type, gpus, seconds, source FROM costs"
            " ORDER BY kind, model, gpu_type, gpus"
        )
    )
    return Content(measurements, costs)


def _key_values(key: Key) -> tuple[str | int, ...]:
    s = key.settings
    return (
        key.model,
        s.revision,
        s.input_shape,
        key.gpu_type,
        key.gpus,
        key.nodes,
        placement_text(key.placement),
        key.local_batch,
        key.accumulation,
        s.frozen,
        s.precision,
        _SWITCH[s.grad_checkpointing],
        s.stages,
        s.micro_batches,
        s.environment,
    )


def _measurement(row: tuple) -> Measurement:  # type: ignore[type-arg]  # columns of mixed types
    settings = Settings(
        revision=row[1],
        input_shape=row[2],
        frozen=row[9],
        precision=row[10],
        grad_checkpointing=_SWITCH_BACK[row[11]],
        stages=row[12],
        micro_batches=row[13],
        environment=row[14],
    )
    placement = parse_placement(row[6]) if row[6] else ()
    key = Key(row[0], row[3], row[4], row[5], placement, row[7], row[8], settings)
    return Measurement(key, *row[15:])


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise DataError(
            str(path), "this is not a throughput table", "name the right file, or move it away"
        )
    if version != SCHEMA_VERSION:
        raise DataError(
            str(path),
            f"schema version {version}, this release knows {SCHEMA_VERSION}",
            "export with the release that wrote it, move the file away and import again",
        )


def _make_file(path: Path) -> None:
    """An empty file that everybody may read and that belongs to the directory's owner."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, FILE_MODE)
    except OSError as exc:
        raise DataError(
            str(path), f"cannot be created ({exc.strerror})", "run as the user of the daemon"
        ) from exc
    try:
        os.fchmod(descriptor, FILE_MODE)
        if os.geteuid() == 0:
            # An administrator's first import must not lock out the daemon's own user.
            owner = path.parent.stat()
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
    finally:
        os.close(descriptor)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """SQLite's errors as ours, with the way out."""
    try:
        yield
    except SlurmExtError:
        raise
    except (sqlite3.OperationalError, OSError) as exc:
        if "no such" not in str(exc) or isinstance(exc, OSError):
            raise SourceMissingError(
                f"throughput table {path}",
                f"{exc}; check that the file and its directory are readable (and writable for "
                "import), and move the file away if it is damaged",
            ) from exc
        raise _damaged(path, exc) from exc
    except (sqlite3.Error, KeyError, ValueError, TypeError) as exc:
        raise _damaged(path, exc) from exc


def _damaged(path: Path, exc: Exception) -> DataError:
    return DataError(
        str(path),
        f"damaged ({exc})",
        "move the file away and run slurm-ext table import again; jobs start without it, planned "
        "by their time limits",
    )
