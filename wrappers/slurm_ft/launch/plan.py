"""The plan's configuration inside the job: read, weighed against what was granted, told in FT_*.

Granted beats planned. Where Slurm granted another GPU count than the plan says, accumulation is
computed again so that the global batch stays; where that cannot be, plain variables are used and
it is said why. Every rank does this for itself from one small file, and sessions compare the
digest of the outcome, so that no two ranks train in different configurations.

The document is read by hand, with bounds: the full parser costs ten times what may pass before
the user's program starts. A test holds both to the same answers.
"""

from __future__ import annotations

import errno
import os

from slurm_ft import variables
from slurm_ft.launch.limited import LateError, within

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# A network file system that hangs must not keep the job from starting.
READ_LIMIT_S = 5.0
MAX_PLAN_BYTES = 1 << 20
# Of slurm_ext.domain.document; a test compares them.
DOCUMENT_VERSION = 1
# The digest of a rank that uses plain variables.
PLAIN = "plain"
_MOST = 10**9
_PRECISIONS_LONGEST = 32


class Planned:
    """What a plan says, as far as a rank needs it. ``words`` are variables told as they stand."""

    __slots__ = ("accumulation", "gpus", "local_batch", "micro_batches", "stages", "words")

    def __init__(
        self,
        gpus: int,
        local_batch: int,
        accumulation: int,
        stages: int,
        micro_batches: int,
        words: dict[str, str],
    ) -> None:
        self.gpus = gpus
        self.local_batch = local_batch
        self.accumulation = accumulation
        self.stages = stages
        self.micro_batches = micro_batches
        self.words = words

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all GPUs."""
        return self.gpus * self.local_batch * self.accumulation


class Settled:
    """The outcome: ``values`` for the program, ``note`` for the user, empty where all is plain."""

    __slots__ = ("note", "planned", "values")

    def __init__(self, values: dict[str, str], planned: bool, note: str = "") -> None:
        self.values = values
        self.planned = planned
        self.note = note


class PlanUnusable(Exception):
    """A plan that is there and cannot be used; the message says why. Never leaves this module."""


def read_within(path: str, limit_s: float = READ_LIMIT_S) -> str | None:
    """The document, ``None`` where there is none. Raises PlanUnusable past the limit.

    Where a spool lets all users make files, somebody else could have made this one: it is believed
    of the spool's owner, of root and of the user.
    """
    spool = os.path.dirname(os.path.dirname(path))

    def read() -> bytes:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags), "rb") as file:
            owner = os.fstat(file.fileno()).st_uid
            if owner not in (0, os.getuid(), os.stat(spool).st_uid):
                raise PermissionError(errno.EPERM, f"it belongs to user {owner}")
            return file.read(MAX_PLAN_BYTES + 1)

    try:
        found = within(limit_s, read)
    except LateError as exc:
        raise PlanUnusable(f"{path} could not be read within {limit_s:g} s") from exc
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise PlanUnusable(f"{path} could not be read: {exc.strerror}") from exc
    if len(found) > MAX_PLAN_BYTES:
        raise PlanUnusable(f"{path} is longer than {MAX_PLAN_BYTES} bytes")
    return found.decode(errors="replace")


def parse_planned(text: str, base_id: int, attempt: int) -> Planned | None:
    """The configuration in a plan document, ``None`` where the plan says none for this attempt.

    Raises PlanUnusable for a document of another form or job.
    """
    import json

    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise PlanUnusable(f"it is not JSON ({exc})") from exc
    if not isinstance(document, dict):
        raise PlanUnusable("it is not a JSON object")
    if document.get("version") != DOCUMENT_VERSION:
        raise PlanUnusable(
            f"it has version {document.get('version')!r}, this side knows {DOCUMENT_VERSION}:"
            " install the same release of slurm-ext on both sides"
        )
    if document.get("base_id") != base_id:
        raise PlanUnusable(f"it is about job {document.get('base_id')!r}")
    if _whole(document, "attempt", 0) != attempt:
        return None
    decision = document.get("decision")
    configuration = decision.get("configuration") if isinstance(decision, dict) else None
    if configuration is None:
        return None
    if not isinstance(configuration, dict):
        raise PlanUnusable("its configuration is not an object")
    words = {
        variables.PRECISION: _word(configuration, "precision"),
        variables.GRAD_CHECKPOINTING: _switch(configuration, "grad_checkpointing"),
        variables.FROZEN: _word(configuration, "frozen"),
    }
    return Planned(
        gpus=_whole(configuration, "gpus", 1),
        local_batch=_whole(configuration, "local_batch", 0),
        accumulation=_whole(configuration, "accumulation", 1),
        stages=_whole(configuration, "stages", 1),
        micro_batches=_whole(configuration, "micro_batches", 1),
        words=words,
    )


def settle(granted: int, nodes: int, planned: Planned | None) -> Settled:
    """What holds within the granted allocation. ``granted`` of 0 means: not known."""
    plain = {variables.NODES: str(nodes), variables.PLAN_DIGEST: PLAIN}
    if granted:
        plain[variables.GPUS] = str(granted)
    if planned is None:
        return Settled(plain, planned=False)
    if not granted:
        return Settled(plain, False, "Slurm does not say how many GPUs were granted")
    local, accumulation, note = planned.local_batch, planned.accumulation, ""
    if granted != planned.gpus:
        note = f"the plan is for {planned.gpus} GPUs, Slurm granted {granted}"
        if granted % planned.stages:
            why = f"{granted} GPUs cannot hold pipelines of {planned.stages} stages"
            return Settled(plain, False, f"{note}: {why}")
        if local:
            shared = _share(planned.global_batch, granted, local, planned.micro_batches)
            if shared is None:
                why = f"they cannot share a batch of {planned.global_batch} evenly"
                return Settled(plain, False, f"{note}: {why}")
            local, accumulation = shared
            note = f"{note}: {local} samples x {accumulation} keep the batch"
    values = {
        **plain,
        **planned.words,
        variables.STAGES: str(planned.stages),
        variables.MICRO_BATCHES: str(planned.micro_batches),
    }
    if local:
        values[variables.LOCAL_BATCH] = str(local)
        values[variables.ACCUMULATION] = str(accumulation)
        values[variables.GLOBAL_BATCH] = str(local * granted * accumulation)
    values[variables.PLAN_DIGEST] = _digest(values)
    return Settled(values, True, note)


def settle_from_spool(
    spool: str,
    base_id: int,
    attempt: int,
    granted: int,
    nodes: int,
    read: Callable[[str], str | None] = read_within,
) -> Settled:
    """Read and weigh. Never fails: a plan is advice."""
    path = os.path.join(spool, "plans", f"{base_id}.json")
    try:
        text = read(path)
        planned = None if text is None else parse_planned(text, base_id, attempt)
    except PlanUnusable as exc:
        plain = settle(granted, nodes, None)
        return Settled(plain.values, False, f"the plan {path} is not used: {exc}")
    return settle(granted, nodes, planned)


def _share(global_batch: int, gpus: int, most: int, micro_batches: int) -> tuple[int, int] | None:
    """The fewest accumulation steps that fit the memory known to suffice (``most`` samples)."""
    if global_batch % gpus:
        return None
    each = global_batch // gpus
    fewest = -(-each // most)
    for accumulation in range(fewest, each + 1):
        if each % accumulation == 0 and (each // accumulation) % micro_batches == 0:
            return each // accumulation, accumulation
    return None


def _digest(values: dict[str, str]) -> str:
    """The outcome in one word. Written out, not hashed: where two ranks differ, their digests then
    tell in what, and a hash function would have to be imported."""
    return ";".join(
        f"{name.removeprefix('FT_').lower()}={values[name]}"
        for name in sorted(values)
        if name != variables.PLAN_DIGEST
    )


def _whole(raw: dict[str, Any], key: str, low: int) -> int:
    value = raw.get(key, low)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _MOST:
        raise PlanUnusable(f"{key}={value!r} is not a whole number from {low} to {_MOST}")
    return value


def _word(raw: dict[str, Any], key: str) -> str:
    value = raw.get(key, "")
    if not isinstance(value, str) or len(value) > _PRECISIONS_LONGEST or not value.isprintable():
        raise PlanUnusable(f"{key}={value!r} is not a short word")
    return value


def _switch(raw: dict[str, Any], key: str) -> str:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise PlanUnusable(f"{key}={value!r} is neither true nor false")
    return "yes" if value else "no"
