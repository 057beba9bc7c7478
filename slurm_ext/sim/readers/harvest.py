"""What every reader does with a row: keep it, leave it out with a reason, or refuse it with a fix.

Three outcomes on purpose. A *refused* row is damaged, and somebody should know its line. A row that
is *left out* is sound but nothing to replay (a job without GPUs), so it is counted by reason. Only
refused rows make a strict reading fail.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from slurm_ext.domain.errors import DataError
from slurm_ext.estimate.csvtext import RowError
from slurm_ext.sim.readers.tracejob import Trace, TraceJob

# Bounds against slips (a date in place of seconds, a batch in place of a count), not limits of use.
MAX_SECONDS = 1e9
MAX_GPUS = 65536
MAX_BATCH = 2**31
MAX_SAMPLES = 1e15
MAX_TEXT = 255


class Row:
    """Typed cells of one row; every refusal knows where it stands."""

    __slots__ = ("file", "line", "values")

    def __init__(self, file: str, line: int, values: Mapping[str, str]) -> None:
        self.file, self.line, self.values = file, line, values

    def refuse(self, column: str, reason: str, fix: str) -> RowError:
        """The error for one cell of this row."""
        return RowError(self.file, self.line, column, self.values.get(column, ""), reason, fix)

    def text(self, column: str, *, needed: bool = False, high: int = MAX_TEXT) -> str:
        """The cell without surrounding blanks; empty where the column is absent."""
        value = self.values.get(column, "").strip()
        if needed and not value:
            raise self.refuse(column, "empty", "this column is needed in every row")
        if len(value) > high or not value.isprintable() or "\ufffd" in value:
            raise self.refuse(
                column,
                "too long, not printable or not UTF-8",
                f"write at most {high} plain characters",
            )
        return value

    def real(self, column: str, high: float, what: str) -> float | None:
        """A number from 0 to ``high``; ``None`` where the cell is blank."""
        value = self.text(column)
        if not value:
            return None
        try:
            # float() also reads "1_000", "infinity" and foreign digits, which no trace means.
            number = float(value) if value.isascii() and "_" not in value else math.nan
        except ValueError:
            number = math.nan
        if not 0 <= number <= high:  # also refuses NaN
            raise self.refuse(column, f"not a number from 0 to {high:g}", f"give {what}")
        return number

    def whole(self, column: str, high: int, what: str) -> int | None:
        """A whole number from 0 to ``high``, also written ``8.0``; ``None`` where blank."""
        number = self.real(column, high, what)
        if number is not None and not number.is_integer():
            raise self.refuse(column, "not a whole number", f"give {what}")
        return None if number is None else int(number)


class Harvest:
    """The jobs and complaints of one file. With ``strict`` the first complaint is raised."""

    def __init__(self, file: str, strict: bool = False) -> None:
        self.file, self.strict = file, strict
        self.jobs: list[TraceJob] = []
        self.skipped: list[str] = []
        self.left_out: Counter[str] = Counter()
        self._lines: dict[str, int] = {}

    def refuse(self, error: RowError) -> None:
        """Keep the complaint about one row, or raise it."""
        if self.strict:
            raise error
        self.skipped.append(str(error))

    def leave_out(self, reason: str) -> None:
        """Count one sound row that is not replayed."""
        self.left_out[reason] += 1

    def add(self, job: TraceJob, row: Row, column: str) -> None:
        """Keep one job; a second one of the same id is refused at ``column``."""
        earlier = self._lines.setdefault(job.job_id, row.line)
        if earlier != row.line:
            self.refuse(row.refuse(column, f"also on line {earlier}", "use each id once"))
            return
        self.jobs.append(job)

    def trace(self, fmt: str, origin_s: float = 0.0, limit: int | None = None) -> Trace:
        """Everything in order of submission. Raises DataError where no job is left."""
        if not self.jobs:
            # What a few damaged rows have is beside the point where sound ones were left out.
            bad = self.skipped[:1] if len(self.skipped) > self.left_out.total() else []
            why = [*self.notes(), *bad]
            raise DataError(
                self.file,
                f"no job to replay, read as {fmt}" + "".join(f"; {reason}" for reason in why),
                "mend these rows, or name another file or format",
            )
        jobs = sorted(self.jobs, key=lambda job: job.submit_s)
        return Trace(tuple(jobs[:limit]), tuple(self.skipped), fmt, self.notes(), origin_s)

    def notes(self) -> tuple[str, ...]:
        """How many rows were left out, the most frequent reason first."""
        return tuple(f"{count} left out: {reason}" for reason, count in self.left_out.most_common())
