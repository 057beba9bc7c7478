"""Delimited rows from ``squeue -O`` that nobody can forge.

An account, a comment or an admin comment may hold newlines, separators and bytes that are no text.
So every call ends its rows with a fresh random mark that nobody could know when submitting: the
text is cut at the mark, not at newlines. Columns are separated by a control character, and the one
column that may hold anything is the last, so that separators inside it change nothing.
An answer that does not end with a mark was cut off, and is refused as a whole.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_ext.domain.errors import SourceMissingError

SEPARATOR = "\x1f"


def new_mark() -> str:
    """A mark of this call only. Letters and digits: squeue reads some signs as format."""
    return f"end{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Columns of one call, in order, and the mark that ends its rows."""

    columns: tuple[str, ...]
    mark: str

    @property
    def argument(self) -> str:
        """Value of ``squeue -O``: each column in full width, followed by its separator."""
        *front, last = self.columns
        fields = [f"{name}:{SEPARATOR}" for name in front]
        return ",".join([*fields, f"{last}:{SEPARATOR}{self.mark}"])

    def split(self, text: str, source: str) -> list[str]:
        """The rows, without their end. Raises SourceMissingError where the text was cut off."""
        end = f"{SEPARATOR}{self.mark}\n"
        *rows, rest = text.split(end)
        if rest:
            raise SourceMissingError(
                source, f"cut off after {len(rows)} rows: the last one is {rest[:80]!r}"
            )
        return rows

    def fields(self, row: str, source: str) -> Sequence[str]:
        """The columns of one row. Raises SourceMissingError where columns are missing."""
        found = row.split(SEPARATOR, len(self.columns) - 1)
        if len(found) != len(self.columns):
            raise SourceMissingError(
                source,
                f"a row has {len(found)} of {len(self.columns)} columns: {row[:80]!r}",
            )
        return found
