"""Reads what documents claim: code spans, commands, paths, links, table cells. No product code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
SITE = REPOSITORY / "site"
READMES = sorted([REPOSITORY / "README.md", *SITE.rglob("README.md")])
DESIGN = REPOSITORY / "docs" / "design.md"
PAGES = [*READMES, DESIGN]

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\(([^)#]+)")
_PATH = re.compile(r"(?<![\w/.-])(?:ci|docs|site|slurm_ext|spank|tests)/[\w./*\[\]-]*")
_OURS = re.compile(r"^(?:\$ )?(?:runuser -u slurm-ext -- )?(slurm-ext [^\n]*)$")
_OPTION = re.compile(r"--ft-([a-z][a-z-]*)")
_FORM = re.compile(r"^\| `([\w-]+\.sbatch)` \| `([\w-]+)` \|", re.MULTILINE)


def name(path: Path) -> str:
    """A page's name for pytest."""
    return str(path.relative_to(REPOSITORY))


def spans(text: str) -> list[str]:
    """Code spans outside of fences and indented blocks, on one line each."""
    prose = "\n".join(
        "" if line.startswith("    ") and not line.lstrip().startswith("`") else line
        for line in _FENCE.sub("", text).splitlines()
    )
    return [" ".join(span.split()) for span in _SPAN.findall(prose)]


def code_lines(text: str) -> list[str]:
    """Lines of fences and indented blocks, without their indentation."""
    fenced = [line for block in _FENCE.findall(text) for line in block.splitlines()[1:-1]]
    indented = [line for line in _FENCE.sub("", text).splitlines() if line.startswith("    ")]
    return [line.strip() for line in [*fenced, *indented]]


def commands(text: str) -> Iterator[list[str]]:
    """Every ``slurm-ext ...`` command as the arguments after the program's name."""
    for line in [*spans(text), *code_lines(text)]:
        match = _OURS.match(line)
        if match:
            yield shlex.split(match[1], comments=True)[1:]


def paths(text: str) -> set[str]:
    """Paths into this repository; they may hold wildcards."""
    found = {path.rstrip(".") for path in _PATH.findall(text)}
    # The bracket behind a path may belong to the text of a link.
    return {path if "[" in path else path.rstrip("]") for path in found}


def links(text: str) -> set[str]:
    """Targets of links that stay in the repository."""
    return {target for target in _LINK.findall(text) if "://" not in target}


def ft_options(text: str) -> set[str]:
    """Names after ``--ft-``."""
    return set(_OPTION.findall(text))


def first_cells(text: str) -> Iterator[str]:
    """Code spans in the first column of the tables."""
    for line in text.splitlines():
        if line.startswith("| `"):
            yield from _SPAN.findall(line.split("|")[1])


def forms() -> dict[str, str]:
    """Example script to the form that the README of the examples gives it."""
    return dict(_FORM.findall((SITE / "examples" / "README.md").read_text()))


def blocks(text: str) -> Iterator[str]:
    """Indented blocks as they would be pasted, e.g. YAML in a step of a list."""
    block: list[str] = []
    for line in [*text.splitlines(), "."]:
        if line.startswith("    ") or (not line and block):
            block.append(line)
        elif block:
            yield "\n".join(block)
            block = []
