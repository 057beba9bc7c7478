"""Tables the way Slurm prints them: ``-o "%.10i %9P %r"``, ``--noheader``.

A format is text with fields ``%[[.]width]letter``; a leading dot justifies right, a width cuts
longer values off. Each command brings its own letters. No I/O here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from slurm_ext.domain.errors import SlurmExtError

Row = TypeVar("Row")
_FIELD = re.compile(r"%(?:(\.)?(\d{1,4}))?([A-Za-z%])")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """One letter: its heading, its text for a row, and what it means (for ``--help``)."""

    heading: str
    text: Callable[[Row], str]
    meaning: str


@dataclass(frozen=True, slots=True)
class _Piece:
    literal: str
    letter: str = ""
    width: int = 0
    right: bool = False


class FormatError(SlurmExtError):
    """A ``-o`` format names a field that does not exist."""


def parse_format(text: str, letters: Mapping[str, Column[Row]]) -> tuple[_Piece, ...]:
    """Split a format into pieces; raises FormatError naming the field and the ones there are."""
    pieces: list[_Piece] = []
    end = 0
    for match in _FIELD.finditer(text):
        before = text[end : match.start()]
        if "%" in before:
            raise _unknown(text, before[before.index("%") :], letters)
        letter = match.group(3)
        end = match.end()
        if letter == "%":
            pieces.append(_Piece(before + "%"))
            continue
        if letter not in letters:
            raise _unknown(text, match.group(0), letters)
        width = int(match.group(2) or 0)
        pieces.append(_Piece(before, letter, width, match.group(1) is not None))
    rest = text[end:]
    if "%" in rest:
        raise _unknown(text, rest[rest.index("%") :], letters)
    if not pieces:
        raise FormatError(
            f"-o {text!r}: names no field; write e.g. %{next(iter(letters))}, there are"
            f" {_named(letters)}"
        )
    pieces.append(_Piece(rest))
    return tuple(pieces)


def render(
    rows: Iterable[Row],
    pieces: Iterable[_Piece],
    letters: Mapping[str, Column[Row]],
    header: bool = True,
) -> Iterator[str]:
    """Lines of the table, without line ends."""
    parts = tuple(pieces)

    def line(value: Callable[[Column[Row]], str]) -> str:
        text = ""
        for piece in parts:
            text += piece.literal
            if piece.letter:
                text += _fit(value(letters[piece.letter]), piece)
        return text.rstrip()

    if header:
        yield line(lambda column: column.heading)
    for row in rows:
        yield line(lambda column, row=row: column.text(row))  # type: ignore[misc]


def letters_help(letters: Mapping[str, Column[Row]]) -> str:
    """One line per letter, for ``--help``."""
    return "\n".join(f"  %{letter}  {column.meaning}" for letter, column in letters.items())


def _fit(value: str, piece: _Piece) -> str:
    # What a job is called must not be able to draw a line of its own.
    clean = "".join(c if c.isprintable() else "?" for c in value)
    if not piece.width:
        return clean
    cut = clean[: piece.width]
    return cut.rjust(piece.width) if piece.right else cut.ljust(piece.width)


def _unknown(text: str, field: str, letters: Mapping[str, Column[Row]]) -> FormatError:
    return FormatError(f"-o {text!r}: {field!r} is not a field; there are {_named(letters)}")


def _named(letters: Mapping[str, Column[Row]]) -> str:
    return " ".join(f"%{letter}" for letter in letters)
