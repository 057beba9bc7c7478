"""Folded node lists (``n[01-04,07]``) to names and back.

The width of each number is kept (``b04-[09-10]`` is ``b04-09`` and ``b04-10``), several brackets
in one name are understood, and an expansion is bounded so that a typo cannot fill the memory.
Without ``re``: every rank of a job imports this before its program starts.
"""

from __future__ import annotations

from itertools import groupby

from slurm_ext.domain.errors import DataError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_NAMES = 100_000
_EMPTY = frozenset({"", "(null)", "None", "None assigned", "N/A", "n/a"})


def _split_top(text: str) -> Iterator[str]:
    """Split at the commas that stand outside brackets."""
    depth = 0
    start = 0
    for i, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:i]
            start = i + 1
        if depth not in (0, 1):
            raise ValueError("brackets do not match")
    if depth:
        raise ValueError("brackets do not match")
    yield text[start:]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _numbers(body: str) -> Iterator[str]:
    for part in body.split(","):
        low, dash, high = part.strip().partition("-")
        if not _is_number(low) or (dash and not _is_number(high)):
            raise ValueError(f"{part!r} is not a number or range")
        if not dash:
            yield low
            continue
        if int(high) < int(low):
            raise ValueError(f"range {part!r} runs backwards")
        if int(high) - int(low) >= MAX_NAMES:
            raise ValueError(f"range {part!r} is longer than {MAX_NAMES}")
        width = len(low)
        for number in range(int(low), int(high) + 1):
            yield str(number).zfill(width)


def _expand_one(item: str) -> Iterator[str]:
    left = item.find("[")
    if left < 0:
        yield item
        return
    right = item.index("]", left)
    for number in _numbers(item[left + 1 : right]):
        for rest in _expand_one(item[right + 1 :]):
            yield item[:left] + number + rest


def expand(text: str) -> tuple[str, ...]:
    """Names in the order written, without repeats; Slurm's words for "none" give ().

    Raises DataError naming the list when it cannot be read or names more than MAX_NAMES nodes.
    """
    stripped = text.strip()
    if stripped in _EMPTY:
        return ()
    names: dict[str, None] = {}
    try:
        for item in _split_top(stripped):
            if not item:
                raise ValueError("an empty name")
            for name in _expand_one(item):
                names[name] = None
                if len(names) > MAX_NAMES:
                    raise ValueError(f"more than {MAX_NAMES} names")
    except ValueError as exc:
        raise DataError(f"node list {text!r}", str(exc), "write it like n[01-04,07]") from exc
    return tuple(names)


def first_name(text: str) -> str:
    """The first name of a list that is not empty, without expanding the rest.

    Raises DataError as `expand` does.
    """
    try:
        item = next(_split_top(text.strip()))
        name = next(_expand_one(item))
    except (ValueError, StopIteration) as exc:
        raise DataError(f"node list {text!r}", str(exc), "write it like n[01-04,07]") from exc
    if not name or name in _EMPTY:
        raise DataError(f"node list {text!r}", "it names no node", "write it like n[01-04,07]")
    return name


def fold(names: Iterable[str]) -> str:
    """The shortest usual form: names with one prefix and number width share a bracket."""
    plain: list[str] = []
    numbered: list[tuple[str, int, int]] = []
    for name in sorted(set(names)):
        prefix = name.rstrip("0123456789")
        if prefix == name:
            plain.append(name)
        else:
            digits = name[len(prefix) :]
            numbered.append((prefix, len(digits), int(digits)))
    parts = list(plain)
    numbered.sort()
    for (prefix, width), group in groupby(numbered, key=lambda n: (n[0], n[1])):
        runs: list[list[int]] = []
        for _, _, number in group:
            if runs and number == runs[-1][1] + 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        texts = [
            str(low).zfill(width)
            if low == high
            else f"{str(low).zfill(width)}-{str(high).zfill(width)}"
            for low, high in runs
        ]
        if len(texts) == 1 and "-" not in texts[0]:
            parts.append(prefix + texts[0])
        else:
            parts.append(f"{prefix}[{','.join(texts)}]")
    return ",".join(parts)
