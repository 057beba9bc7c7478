"""Reads a batch script the way ``sbatch`` does, without submitting it.

For ``slurm-ext explain --script``: the directive, and the few options of sbatch that say how large
the job is. Only what stands in the script counts here; what a user adds on the command line is the
caller's to merge. As in sbatch, ``#SBATCH`` lines end at the first line that is neither empty nor a
comment, a later value replaces an earlier one, and words are split as a shell would. Errors name
file and line. No I/O: the text comes from the caller.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_ext.domain.directive import Directive, parse_comment, parse_options
from slurm_ext.domain.errors import DataError, DirectiveError
from slurm_ext.domain.options import BY_NAME
from slurm_ext.domain.walltime import parse_slurm_limit

# Short options that take a value, and what they are called in full.
_SHORT = {
    "-n": "ntasks",
    "-N": "nodes",
    "-G": "gpus",
    "-c": "cpus-per-task",
    "-t": "time",
    "-p": "partition",
    "-q": "qos",
    "-A": "account",
    "-w": "nodelist",
    "-x": "exclude",
    "-C": "constraint",
    "-a": "array",
    "-b": "begin",
    "-d": "dependency",
    "-L": "licenses",
    "-J": "job-name",
}
# Long options without a value (or with one only after "="): what follows is another option.
_BARE = frozenset(
    {
        "exclusive",
        "requeue",
        "no-requeue",
        "hold",
        "parsable",
        "contiguous",
        "overcommit",
        "oversubscribe",
        "spread-job",
        "use-min-nodes",
        "wait",
        "test-only",
        "verbose",
        "quiet",
        "reboot",
        "nohold",
    }
)
_COUNT = re.compile(r"[0-9]+", re.ASCII)
_TYPED_COUNT = re.compile(
    r"(?:(?P<kind>[A-Za-z][A-Za-z0-9._-]*):)?(?P<count>[0-9]+)|(?P<alone>[A-Za-z][A-Za-z0-9._-]*)",
    re.ASCII,
)
_NODES = re.compile(r"([0-9]+)(?:-([0-9]+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class BatchScript:
    """What a script asks for. ``options`` holds every ``#SBATCH`` option by its long name.

    ``gpus`` is the total that the options give, 0 where none is asked for; ``nodes`` the least
    node count.
    """

    directive: Directive
    options: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    nodes: int = 1
    ntasks: int = 1
    time_limit_s: float | None = None
    partitions: tuple[str, ...] = ()
    gpu_type: str = ""


@dataclass(frozen=True, slots=True)
class _Word:
    text: str
    line: int


def parse_script(text: str, *, now_s: float, place: str = "script") -> BatchScript:
    """The directive and the size of the job that ``text`` describes.

    :class:`DirectiveError` for a bad ``--ft-*`` option, :class:`DataError` for another bad value.
    """
    given: dict[str, str] = {}
    lines: dict[str, int] = {}
    options: dict[str, str] = {}
    for name, value, line in _options(text, place):
        lines[name] = line
        if name.startswith("ft-"):
            given[name.removeprefix("ft-")] = value
        else:
            options[name] = value
    so_far: dict[str, str] = {}
    for name in sorted(given, key=lambda name: lines[f"ft-{name}"]):
        so_far[name] = given[name]  # one by one, so that an error names its line
        parse_options(so_far, now_s=now_s, place=f"{place}:{lines[f'ft-{name}']}")
    if comment := options.get("comment"):
        where = f"{place}:{lines['comment']}"
        said = parse_comment(comment, now_s=now_s, place=where)
        if said is not None and not given:
            return _sized(said, options, lines, place)
    return _sized(parse_options(given, now_s=now_s, place=place), options, lines, place)


def _sized(
    directive: Directive, options: dict[str, str], lines: Mapping[str, int], place: str
) -> BatchScript:
    def number(name: str, default: int) -> int:
        value = options.get(name)
        if value is None:
            return default
        if not _COUNT.fullmatch(value) or int(value) < 1:
            raise DataError(
                f"{place}:{lines[name]}", f"--{name}={value} is no count", "write a whole number"
            )
        return int(value)

    nodes = 1
    if "nodes" in options:
        match = _NODES.fullmatch(options["nodes"])
        if not match:
            raise DataError(
                f"{place}:{lines['nodes']}",
                f"--nodes={options['nodes']} is no node count",
                "write N or MIN-MAX",
            )
        nodes = max(1, int(match[1]))
    per_node = number("ntasks-per-node", 1)
    ntasks = number("ntasks", nodes * per_node)
    gpus, gpu_type = _gpus(options, nodes, ntasks, lines, place)
    limit_s: float | None = None
    if "time" in options:
        try:
            limit_s = parse_slurm_limit(options["time"])
        except ValueError as exc:
            raise DataError(
                f"{place}:{lines['time']}",
                f"--time={options['time']}: {exc}",
                "write minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS",
            ) from exc
    partitions = tuple(name for name in options.get("partition", "").split(",") if name)
    return BatchScript(directive, options, gpus, nodes, ntasks, limit_s, partitions, gpu_type)


def _gpus(
    options: Mapping[str, str], nodes: int, ntasks: int, lines: Mapping[str, int], place: str
) -> tuple[int, str]:
    for name, factor in (("gpus", 1), ("gpus-per-node", nodes), ("gpus-per-task", ntasks)):
        if name in options:
            count, gpu_type = _typed_count(options[name], name, lines[name], place)
            return count * factor, gpu_type
    for item in options.get("gres", "").split(","):
        if item == "gpu" or item.startswith("gpu:"):
            count, gpu_type = _typed_count(
                item.removeprefix("gpu").removeprefix(":") or "1", "gres", lines["gres"], place
            )
            return count * nodes, gpu_type
    return 0, ""


def _typed_count(text: str, name: str, line: int, place: str) -> tuple[int, str]:
    """``4``, ``v100:4`` or ``v100`` as count and type."""
    match = _TYPED_COUNT.fullmatch(text)
    if not match:
        raise DataError(
            f"{place}:{line}", f"--{name}: {text!r} is no GPU count", "write N or TYPE:N"
        )
    return int(match["count"] or 1), match["kind"] or match["alone"] or ""


def _options(text: str, place: str) -> list[tuple[str, str, int]]:
    words = _words(text, place)
    found: list[tuple[str, str, int]] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        name, equals, value = word.text.partition("=")
        if name.startswith("--"):
            name = name[2:]
            takes_next = not equals and name not in _BARE
        elif word.text[:2] in _SHORT:
            name = _SHORT[word.text[:2]]
            value = word.text[2:].removeprefix("=")
            takes_next = not value
        else:
            continue  # an option of sbatch that says nothing about size or work
        if takes_next and at < len(words) and not words[at].text.startswith("-"):
            value = words[at].text
            at += 1
        if takes_next and not value and name.startswith("ft-"):
            option = BY_NAME.get(name.removeprefix("ft-"))
            raise DirectiveError(
                f"--{name}",
                "",
                "the value is missing",
                option.fix if option else "there is no such option",
                f"{place}:{word.line}",
            )
        found.append((name, value, word.line))
    return found


def _words(text: str, place: str) -> list[_Word]:
    words: list[_Word] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#SBATCH"):
            try:
                # A "#" after a blank starts a comment, as in sbatch.
                parts = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError as exc:
                raise DataError(
                    f"{place}:{number}", f"the line cannot be split: {exc}", "close the quotes"
                ) from exc
            words += [_Word(part, number) for part in parts]
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return words
