"""What a user asked for with ``--ft-*``, as one immutable document.

Three ways lead here and all give the same value: options (:func:`parse_options`), the text of
``--comment='ft: model=vit-large samples=50000'`` (:func:`parse_comment`), and the JSON that the
Lua module stored in AdminComment (:func:`extract_from_admin_comment`). The JSON holds only what
differs from the defaults, in the order of the fields, and never more than 1 KiB: AdminComment
travels with every job record. No clock and no I/O here; "now" is an argument.

A document of another version is refused, since guessing its meaning could resize a job wrongly;
an unknown key inside the same version is ignored, so that an older daemon works beside a newer
Lua module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, NamedTuple, cast

from slurm_ext.domain.errors import DirectiveError, ProtocolError
from slurm_ext.domain.grammar import canonical, parse_deadline, parse_gpu_ranges
from slurm_ext.domain.job import ShapeKind
from slurm_ext.domain.options import (
    BY_NAME,
    MAX_DIRECTIVE_BYTES,
    MAX_GPUS,
    OPTIONS,
    Grammar,
    Option,
)
from slurm_ext.domain.walltime import parse_walltime

VERSION = 1
MARKER = "ft:"
_STORED = re.compile(r"(?:^|\s)ft:(?=\{)")
_COMMENT = re.compile(r"(?:^|[\s;])ft:([^;\n]*)")


class GpuRequestKind(StrEnum):
    """Whose choice the GPU count is."""

    REQUESTED = "requested"
    AUTO = "auto"
    LIST = "list"


class JobClass(StrEnum):
    """Whether slurm-ext may stop the job for others."""

    GUARANTEED = "guaranteed"
    PREEMPTIBLE = "preemptible"


class MergeConsent(StrEnum):
    """With whose jobs this one may be trained together."""

    NO = "no"
    ACCOUNT = "account"
    ANY = "any"


class Precision(StrEnum):
    """Number format of the arithmetic."""

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"


class Quality(NamedTuple):
    """The bound that a result must keep, e.g. ``("top1", ">=", 0.81)``."""

    metric: str
    comparison: str
    bound: float


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """The GPU counts a user allows. ``ranges`` is empty unless ``kind`` is ``LIST``."""

    kind: GpuRequestKind = GpuRequestKind.REQUESTED
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """The listed counts, ascending; empty for ``requested`` and ``auto``."""
        return tuple(n for low, high in self.ranges for n in range(low, high + 1))

    @property
    def resizable(self) -> bool:
        """Whether the user lets the planner choose."""
        return self.kind is not GpuRequestKind.REQUESTED

    def allows(self, count: int) -> bool:
        """Whether ``count`` is among the listed counts, or one that ``auto`` stands for."""
        if self.kind is GpuRequestKind.AUTO:
            return count in (1, 2) or (count > 0 and count % 4 == 0)
        return any(low <= count <= high for low, high in self.ranges)

    def __str__(self) -> str:
        if self.kind is not GpuRequestKind.LIST:
            return self.kind.value
        return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in self.ranges)


@dataclass(frozen=True, slots=True)
class RequestedShape:
    """The submitted shape, kept so that it can be given back.

    ``nodes`` is the least node count as submitted, ``nodes_max`` the greatest that the job's form
    can use (0 = any; 1 for a single launcher, which sees the GPUs of one node; the top of a range
    that the user gave). ``gpus_per_node`` is 0 where the job asked per task, ``gpus_per_task``
    where it asked per node. ``cpus_per_task`` is ``-c`` and ``memory_node_mib`` is ``--mem``; 0
    means not given. ``why_fixed`` says in a word what forbids resizing.
    """

    gpus: int
    nodes: int = 1
    ntasks: int = 1
    gpus_per_node: int = 0
    gpus_per_task: int = 0
    nodes_max: int = 0
    cpus_per_task: int = 0
    memory_node_mib: int = 0
    gpu_type: str = ""
    why_fixed: str = ""


# Short keys of the stored document: AdminComment is small.
_REQ_KEYS = {
    "gpus": "gpus",
    "nodes": "nodes",
    "ntasks": "ntasks",
    "gpn": "gpus_per_node",
    "gpt": "gpus_per_task",
    "nmax": "nodes_max",
    "cpt": "cpus_per_task",
    "mem": "memory_node_mib",
    "type": "gpu_type",
    "why": "why_fixed",
}


@dataclass(frozen=True, slots=True)
class Directive:
    """Everything the user said with ``--ft-*``, and the submitted shape that Lua recorded.

    ``deadline_s`` and ``begin_s`` (the user's own ``--begin``) are seconds since the epoch.
    ``shape`` and ``req`` are ``None`` where Lua did not see the submission.
    """

    v: int = VERSION
    model: str | None = None
    revision: str | None = None
    dataset: str | None = None
    samples: int | None = None
    epochs: float | None = None
    steps: int | None = None
    batch_min: int | None = None
    batch_max: int | None = None
    gpus: GpuRequest = GpuRequest()
    input_shape: str | None = None
    frozen: str = "none"
    precision: Precision | None = None
    grad_checkpointing: bool = False
    job_class: JobClass = JobClass.GUARANTEED
    deadline_s: float | None = None
    merge: MergeConsent = MergeConsent.NO
    switch: bool = False
    quality: Quality | None = None
    max_pause_s: int | None = None
    max_gpu_hours: float | None = None
    begin_s: float | None = None
    shape: ShapeKind | None = None
    req: RequestedShape | None = None

    def total_samples(self, global_batch: int | None) -> float | None:
        """Samples the job will process; ``None`` where the user did not say enough.

        With ``--ft-steps`` a step is one global batch, so the answer needs it.
        """
        if self.steps is not None:
            batch = global_batch if global_batch is not None else self.batch_min
            return None if batch is None else float(self.steps * batch)
        if self.samples is None:
            return None
        return self.samples * (self.epochs if self.epochs is not None else 1.0)

    def resolve_gpu_counts(self, requested: int, maximum: int) -> tuple[int, ...]:
        """The GPU counts that the job may take, ascending.

        The requested count always belongs to them: the job runs with it whenever slurm-ext is
        away. ``maximum`` bounds the others (the pool, a limit, the administrator's cap).
        """
        if requested < 1 or not self.gpus.resizable:
            return (requested,)
        if self.gpus.kind is GpuRequestKind.AUTO:
            allowed = {1, 2, *range(4, maximum + 1, 4)}
        else:
            allowed = set(self.gpus.counts)
        return tuple(sorted({n for n in allowed if n <= maximum} | {requested}))

    def to_json(self) -> str:
        """The canonical one-line document. Raises :class:`DirectiveError` past 1 KiB."""
        parts = [f'"v":{self.v}']
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "v" and value != field.default:
                parts.append(f'"{field.name}":{_json_value(value)}')
        text = "{" + ",".join(parts) + "}"
        _check_size(text)
        return text


def parse_options(given: Mapping[str, str], *, now_s: float, place: str = "") -> Directive:
    """The directive for option values as typed. Names may carry the ``ft-`` or ``--ft-`` prefix.

    Two options that exclude each other, an unknown name or a bad value raise
    :class:`DirectiveError`, which names option, value, ``place`` and the way out.
    """
    values: dict[str, str] = {}
    for name, text in given.items():
        option = _lookup(name, text, place)
        try:
            values[option.name] = canonical(option, text, now_s)
        except ValueError as exc:
            raise DirectiveError(option.flag, _shown(text), str(exc), option.fix, place) from exc
        if option.excludes in values:
            other = BY_NAME[option.excludes].flag
            raise DirectiveError(
                option.flag, text, f"{other} is also given", "give only one of them", place
            )
    typed: dict[str, Any] = {}
    for name, text in values.items():
        typed.update(_typed(BY_NAME[name], text))
    directive = Directive(**typed)
    directive.to_json()  # refuses what would not fit
    return directive


def parse_comment(text: str, *, now_s: float, place: str = "--comment") -> Directive | None:
    """The directive in a comment such as ``ft: model=vit-large samples=50000``.

    It runs from ``ft:`` to the next semicolon or the end. ``None`` where there is no ``ft:``.
    """
    match = _COMMENT.search(text)
    if not match:
        return None
    given: dict[str, str] = {}
    for word in match[1].split():
        name, equals, value = word.partition("=")
        if not equals:
            raise DirectiveError(
                "ft:", _shown(word), "not NAME=VALUE", "write ft: model=NAME samples=N ...", place
            )
        given[name] = value
    return parse_options(given, now_s=now_s, place=place)


def from_json(text: str) -> Directive:
    """The directive of a stored document. Raises :class:`ProtocolError` where it is unusable."""
    _check_size(text)
    try:
        document = json.loads(text)
    except ValueError as exc:
        raise ProtocolError(f"the directive is not JSON: {_shown(text)}") from exc
    return from_document(document)


def from_document(document: object) -> Directive:
    """The directive of a decoded document."""
    if not isinstance(document, dict):
        raise ProtocolError(f"the directive is not a JSON object: {_shown(str(document))}")
    version = document.get("v")
    if version != VERSION or isinstance(version, bool):
        raise ProtocolError(
            f"the directive has version {version!r}, this release reads version {VERSION}; "
            "install the Lua module and the daemon of one release"
        )
    typed: dict[str, Any] = {}
    for name, read in _READERS.items():
        if name in document:
            try:
                typed[name] = read(document[name])
            except (ValueError, TypeError, KeyError) as exc:
                raise ProtocolError(
                    f"the directive's key {name!r} is unusable: {_shown(str(document[name]))}"
                ) from exc
    directive = Directive(**typed)
    if directive.epochs is not None and directive.steps is not None:
        raise ProtocolError("the directive has both epochs and steps")
    if (directive.batch_min or 0) > (directive.batch_max or 0):
        raise ProtocolError("the directive's batch range runs backwards")
    return directive


def extract_from_admin_comment(text: str) -> Directive | None:
    """The directive beside whatever a site keeps in AdminComment; ``None`` where there is none.

    The last marker counts: ours is appended, so nothing a site copies in before it (a job name, a
    comment) can stand in its place.
    """
    matches = list(_STORED.finditer(text))
    if not matches:
        return None
    start = matches[-1].end()
    try:
        document, end = json.JSONDecoder().raw_decode(text, start)
    except ValueError as exc:
        raise ProtocolError(
            f"AdminComment holds a damaged directive: {_shown(text[start:])}"
        ) from exc
    _check_size(text[start:end])
    return from_document(document)


def _lookup(name: str, text: str, place: str) -> Option:
    bare = name.removeprefix("--").removeprefix("ft-")
    option = BY_NAME.get(bare)
    if option is None:
        raise DirectiveError(
            f"--ft-{_shown(bare)}",
            _shown(text),
            "there is no such option",
            "the options are " + ", ".join(sorted(BY_NAME)),
            place,
        )
    return option


def _typed(option: Option, text: str) -> dict[str, Any]:
    """Fields of :class:`Directive` for canonical ``text``."""
    key = option.keys[0]
    match option.grammar:
        case Grammar.MODEL:
            name, _, revision = text.partition("@")
            return {"model": name, "revision": revision or None}
        case Grammar.BATCH:
            low, _, top = text.partition("-")
            return {"batch_min": int(low), "batch_max": int(top or low)}
        case Grammar.COUNT:
            return {key: int(text)}
        case Grammar.DECIMAL:
            return {key: float(text)}
        case Grammar.GPUS:
            return {key: _gpu_request(text)}
        case Grammar.SWITCH:
            return {key: text == "yes"}
        case Grammar.DEADLINE:
            return {key: float(parse_deadline(text, 0.0))}
        case Grammar.QUALITY:
            return {key: _quality(text)}
        case Grammar.TIME:
            return {key: parse_walltime(text)}
        case Grammar.CHOICE:
            return {key: _CHOICES[key](text)}
    return {key: text}


_CHOICES: dict[str, type[StrEnum]] = {
    "precision": Precision,
    "job_class": JobClass,
    "merge": MergeConsent,
}


def _gpu_request(text: str) -> GpuRequest:
    if text in (GpuRequestKind.REQUESTED, GpuRequestKind.AUTO):
        return GpuRequest(GpuRequestKind(text))
    return GpuRequest(GpuRequestKind.LIST, parse_gpu_ranges(text, MAX_GPUS))


def _quality(text: str) -> Quality:
    comparison = ">=" if ">=" in text else "<="
    metric, _, bound = text.partition(comparison)
    return Quality(metric, comparison, float(bound))


def _number(value: float) -> str:
    """Shortest plain decimal text, never with an exponent (the three languages must agree)."""
    return f"{value:.6f}".rstrip("0").rstrip(".")


def _json_value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case GpuRequest() | str():
            return json.dumps(str(value))
        case Quality():
            return f'[{json.dumps(value.metric)},"{value.comparison}",{_number(value.bound)}]'
        case RequestedShape():
            parts = []
            for key, name in _REQ_KEYS.items():
                inner = getattr(value, name)
                if inner or key == "gpus":
                    parts.append(f'"{key}":{_json_value(inner)}')
            return "{" + ",".join(parts) + "}"
        case int():
            return str(value)
        case float():
            return _number(value)
    raise TypeError(f"no JSON form for {value!r}")


def _read_by_grammar(option: Option) -> Any:
    """A reader that sends a stored value through the option's own grammar."""

    def read(value: object) -> Any:
        if option.grammar in (Grammar.COUNT, Grammar.TIME, Grammar.BATCH):
            number = _int(value)
            if not 1 <= number <= max(option.high, 1):
                raise ValueError(number)
            return number
        if option.grammar is Grammar.DECIMAL:
            return float(canonical(option, _number(_real(value)), 0.0))
        if option.grammar is Grammar.SWITCH:
            if not isinstance(value, bool):
                raise TypeError(value)
            return value
        return _typed(option, canonical(option, _str(value), 0.0))[option.keys[0]]

    return read


def _int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(value)
    return value


def _real(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(value)
    if not abs(value) < 1e15:  # also refuses NaN and the infinities
        raise ValueError(value)
    return float(value)


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _read_revision(value: object) -> str:
    canonical(BY_NAME["model"], f"m@{_str(value)}", 0.0)
    return cast(str, value)


def _read_epoch(value: object) -> float:
    # As many digits as `_number` writes: what is read must be what is written again.
    number = round(_real(value), 6)
    if number <= 0:
        raise ValueError(number)
    return number


def _read_quality(value: object) -> Quality:
    metric, comparison, bound = cast(list[object], value)
    text = f"{_str(metric)}{_str(comparison)}{_number(_real(bound))}"
    return _quality(canonical(BY_NAME["quality"], text, 0.0))


def _read_req(value: object) -> RequestedShape:
    if not isinstance(value, dict):
        raise TypeError(value)
    typed: dict[str, Any] = {}
    for key, name in _REQ_KEYS.items():
        if key in value:
            text = name in ("gpu_type", "why_fixed")
            typed[name] = _str(value[key]) if text else _int(value[key])
            if not text and not 0 <= typed[name] <= 2**40:
                raise ValueError(typed[name])
    return RequestedShape(**typed)


_READERS: dict[str, Any] = {
    **{key: _read_by_grammar(option) for option in OPTIONS for key in option.keys},
    "revision": _read_revision,
    "deadline_s": _read_epoch,
    "quality": _read_quality,
    "begin_s": _read_epoch,
    "shape": lambda value: ShapeKind(_str(value)),
    "req": _read_req,
}


def _check_size(text: str) -> None:
    size = len(text.encode())
    if size > MAX_DIRECTIVE_BYTES:
        raise DirectiveError(
            "--ft-*",
            _shown(text),
            f"the directive takes {size} bytes and the limit is {MAX_DIRECTIVE_BYTES}",
            "shorten the dataset path, the model name or the GPU list",
        )


def _shown(text: str, limit: int = 80) -> str:
    """``text`` made safe for one line of a message."""
    plain = text.encode("unicode_escape").decode("ascii")
    return plain if len(plain) <= limit else plain[: limit - 3] + "..."
