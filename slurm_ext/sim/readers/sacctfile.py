"""The text of ``sacct --parsable2``: separator, heading and cells, before any meaning.

sacct quotes nothing. A job name or comment may hold the separator or a line end, so that its row
has too many cells or spans lines. Both are put together again where that is certain: when every
column that a user cannot write into stands before the first that a user can, as in
:data:`FORMAT`. Elsewhere such a row is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from slurm_ext.domain.errors import DataError
from slurm_ext.estimate.csvtext import RowError
from slurm_ext.sim.readers.harvest import Row

# What to ask sacct for. Columns that users write come last.
FORMAT = (
    "JobID,User,Account,Partition,State,Submit,Eligible,Start,End,TimelimitRaw,NNodes,NodeList,"
    "ReqTRES,AllocTRES,AdminComment,JobName,Comment"
)
COMMAND = (
    "sacct --allusers --allocations --duplicates --parsable2 --starttime=now-30days"
    f" --endtime=now --format={FORMAT}"
)
# Without these (and AllocTRES or ReqTRES) there is no job to speak of.
NEEDED = ("JobID", "State", "Submit", "Start", "End")
# Columns that may hold any text. AdminComment is Lua's, but a site may copy names into it.
FREE = frozenset(
    {"admincomment", "jobname", "comment", "systemcomment", "submitline", "workdir", "extra"}
)
_FIRST = re.compile(r"(jobid(?:raw)?)([^0-9a-z_]+)([0-9a-z]+)", re.IGNORECASE)
_JOB = re.compile(r"\d+(?:_(?:\d+|\[[^\]]*\]))?(?:\+\d+)?(?:\..+)?", re.ASCII)


def is_heading(line: str) -> bool:
    """Whether ``line`` can be the first line of sacct's output."""
    return _FIRST.match(line) is not None


def rows(
    lines: Iterable[str],
    file: str,
    *,
    columns: Sequence[str] | None = None,
    delimiter: str | None = None,
) -> Iterator[Row | RowError]:
    """Rows with lower-case column names, and one error for each line that is not a row.

    ``columns`` name the cells of output without a heading (``sacct --noheader``). The separator is
    taken from the heading; without one it is ``delimiter``, or the bar. Raises DataError where the
    heading is missing or unusable.
    """
    names = None if columns is None else [name.strip().lower() for name in columns]
    if names is not None:
        _check(names, file)
        delimiter = delimiter or "|"
    numbered = enumerate(lines, start=1)
    kept: tuple[int, str] | None = None
    for number, line in numbered:
        if names is None:
            if not line.strip():
                continue
            heading = line.removeprefix("\ufeff")
            match = _FIRST.match(heading)
            if match is None:
                raise DataError(
                    f"{file}:{number}",
                    "no heading that begins with JobID",
                    "leave --noheader out, or name the columns: --sacct-columns=JobID,State,...",
                )
            delimiter = delimiter or match[2]
            names = [name.strip().lower() for name in heading.split(delimiter)]
            # `sacct --parsable` ends every line with the separator.
            if names and not names[-1]:
                names.pop()
            _check(names, file)
            continue
        assert delimiter is not None
        if kept is not None:
            # The row before broke off inside a text of a user's: this line goes on with it.
            number, line = kept[0], f"{kept[1]}\n{line}"
            kept = None
        elif not line.strip():
            continue
        if _breaks_off(line, names, delimiter):
            kept = (number, line)
            continue
        yield _row(line, number, names, delimiter, file)
    if kept is not None:
        yield _row(kept[1], kept[0], names or [], delimiter or "|", file)
    if names is None:
        raise DataError(file, "empty", f"write it with {COMMAND}")


def _check(names: Sequence[str], file: str) -> None:
    """Raise DataError where the columns are not enough to know a job by."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{file}: heading", f"column {twice[0]} occurs twice", "ask for it once")
    odd = next((name for name in names if not name.isalnum()), None)
    if odd is not None:
        raise DataError(f"{file}: heading", f"{odd!r} is no column", "write JobID,State,Submit,...")
    missing = [name for name in NEEDED if name.lower() not in names]
    if not {"alloctres", "reqtres"} & set(names):
        missing.append("AllocTRES")
    if missing:
        raise DataError(
            f"{file}: heading", f"no column {', '.join(missing)}", f"write it with {COMMAND}"
        )


def _fixed(names: Sequence[str]) -> int:
    """How many columns stand before the first that a user writes; 0 where one follows it."""
    first = next((i for i, name in enumerate(names) if name in FREE), len(names))
    return first if all(name in FREE for name in names[first:]) else 0


def _breaks_off(line: str, names: Sequence[str], delimiter: str) -> bool:
    cells = line.count(delimiter) + 1
    fixed = _fixed(names)
    return bool(fixed) and fixed < cells < len(names) and _JOB.match(line) is not None


def _row(line: str, number: int, names: Sequence[str], delimiter: str, file: str) -> Row | RowError:
    cells = line.split(delimiter)
    if len(cells) == len(names) + 1 and not cells[-1] and names[-1] not in FREE:
        cells.pop()  # --parsable
    fixed = _fixed(names)
    if len(cells) > len(names) and 0 < fixed < len(names):
        # Nobody can tell where one text ends and the next begins: each gets all it may hold.
        tails = [delimiter.join(cells[i:]) for i in range(fixed, len(names))]
        cells = [*cells[:fixed], *tails]
    if len(cells) != len(names):
        return RowError(
            file,
            number,
            "row",
            line,
            f"{len(cells)} cells under {len(names)} columns",
            "ask sacct for AdminComment,JobName,Comment last, or set another --delimiter",
        )
    if _JOB.fullmatch(cells[names.index("jobid")]) is None:
        return RowError(
            file,
            number,
            "JobID",
            cells[names.index("jobid")],
            "not a job id",
            "if a job's name or comment has a line end, leave JobName and Comment out",
        )
    return Row(file, number, dict(zip(names, cells, strict=True)))
