"""Text for the pages of ``man``: escaping, tagged paragraphs, and Markdown of the plain kind.

Formatting only; what a page says is written in `slurm_ext.cli.manual`. Every hyphen is written as
``\\-``: a page is mostly options and paths, and what is copied from it has to work in a shell.
The Markdown that is understood is what the generated pages under ``docs/`` use; anything else in
it is an error, so that a page cannot silently lose a paragraph.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

_ESCAPES = str.maketrans(
    {
        "\\": "\\e",
        "-": "\\-",
        "'": "\\(aq",
        "`": "\\(ga",
        "^": "\\(ha",
        "~": "\\(ti",
        '"': "\\(dq",
    }
)
_CELL_END = re.compile(r"(?<!\\)\|")


def text(words: str) -> str:
    """One line of plain prose."""
    escaped = words.translate(_ESCAPES)
    return f"\\&{escaped}" if escaped.startswith(".") else escaped


def bold(words: str) -> str:
    """Words to be typed as they stand."""
    return f"\\fB{words.translate(_ESCAPES)}\\fR"


def italic(words: str) -> str:
    """A word to be replaced."""
    return f"\\fI{words.translate(_ESCAPES)}\\fR"


def marked(words: str) -> str:
    """Prose in which backquotes stand around what is typed as it stands."""
    pieces = words.split("`")
    if len(pieces) % 2 == 0:
        raise ValueError(f"a backquote without its twin in {words!r}")
    line = "".join(
        bold(piece) if index % 2 else piece.translate(_ESCAPES)
        for index, piece in enumerate(pieces)
    )
    return f"\\&{line}" if line.startswith(".") else line


def tagged(tag: str, words: str) -> list[str]:
    """A paragraph under a tag that is roff already."""
    return [".TP", tag, words]


def verbatim(lines: Iterable[str]) -> list[str]:
    """Lines that are shown as they are."""
    return [".PP", ".RS 4", ".nf", *(text(line) if line else ".sp" for line in lines), ".fi", ".RE"]


def title(name: str, section: int, summary: str) -> list[str]:
    """The head of a page. It carries no date: the page has to be the same on every day."""
    return [
        f'.TH {name.upper().translate(_ESCAPES)} {section} "" "slurm\\-ext" "slurm\\-ext"',
        # No hyphenation and no stretched blanks: both spoil options that are to be copied.
        ".nh",
        ".ad l",
        ".SH NAME",
        f"{text(name)} \\- {text(summary)}",
    ]


def from_markdown(page: str) -> list[str]:
    """Sections of a Markdown page; its title and its comments are left out."""
    return [line for block in _blocks(page) for line in _block(block)]


def _blocks(page: str) -> Iterator[list[str]]:
    """Runs of lines between blank ones; a fence holds its blank lines."""
    block: list[str] = []
    fenced = False
    for line in page.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        if line or fenced:
            block.append(line)
        elif block:
            yield block
            block = []
    if fenced:
        raise ValueError("a fence is not closed")
    if block:
        yield block


def _block(lines: Sequence[str]) -> list[str]:
    first = lines[0]
    if first.startswith("## "):
        return [f".SH {text(first.removeprefix('## ').upper())}", *_rest(lines)]
    if first.startswith(("# ", "<!--")):
        return _rest(lines)
    if first.startswith("```"):
        return verbatim(lines[1:-1])
    if first.startswith("|"):
        return _table(lines)
    if first.startswith("* "):
        items = "\n".join(lines).removeprefix("* ").split("\n* ")
        return [line for item in items for line in (".IP \\(bu 2", _joined(item.splitlines()))]
    if first.startswith(("#", ">", "- ", "    ")):
        raise ValueError(f"Markdown that is not understood: {first!r}")
    return [".PP", _joined(lines)]


def _rest(lines: Sequence[str]) -> list[str]:
    return _block(lines[1:]) if len(lines) > 1 else []


def _joined(lines: Iterable[str]) -> str:
    return marked(" ".join(line.strip() for line in lines))


def _table(lines: Sequence[str]) -> list[str]:
    """One tagged paragraph per row: the first cell is the tag, the others say their heading."""
    head, _, *rows = [_cells(line) for line in lines]
    page: list[str] = []
    for tag, *cells in rows:
        said = (f"{name}: {cell}." for name, cell in zip(head[1:], cells, strict=True))
        page += tagged(marked(tag), marked(" ".join(said)))
    return page


def _cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip().replace("\\|", "|") for cell in _CELL_END.split(inner)]
