"""Slurm-like formats."""

from __future__ import annotations

import pytest

from slurm_ext.cli.tabular import Column, FormatError, letters_help, parse_format, render

LETTERS: dict[str, Column[tuple[str, str]]] = {
    "i": Column("JOBID", lambda r: r[0], "id"),
    "j": Column("NAME", lambda r: r[1], "name"),
}
ROWS = [("1", "a"), ("123456789", "longname")]


def table(text: str, header: bool = True) -> list[str]:
    return list(render(ROWS, parse_format(text, LETTERS), LETTERS, header))


def test_widths_cut_and_justify() -> None:
    assert table("%.4i|%6j|") == [
        "JOBI|NAME  |",
        "   1|a     |",
        "1234|longna|",
    ]


def test_no_width_no_header_and_a_literal_percent() -> None:
    assert table("%i=%j 100%%", header=False) == ["1=a 100%", "123456789=longname 100%"]


@pytest.mark.parametrize("text", ["%x", "%", "%i %99", "%.i%?"])
def test_unknown_fields_are_named(text: str) -> None:
    with pytest.raises(FormatError, match="%i %j"):
        parse_format(text, LETTERS)


def test_a_name_cannot_forge_a_row() -> None:
    rows = [("1", "x\n2 PD forged\x1b[2J")]
    lines = list(render(rows, parse_format("%i %j", LETTERS), LETTERS))
    assert len(lines) == 2
    assert "\x1b" not in lines[1]


def test_help_names_every_letter() -> None:
    text = letters_help(LETTERS)
    assert "%i" in text
    assert "name" in text
