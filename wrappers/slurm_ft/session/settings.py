"""What a session reads from its environment, checked once. Pure: the mapping is an argument.

Everything has a default, because a session also works without ft-run and without Slurm.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slurm_ext.domain.amount import parse_bytes
from slurm_ext.domain.duration import FORMS, parse_duration
from slurm_ext.domain.errors import ConfigError
from slurm_ft import variables
from slurm_ft.session.interval import Bounds, parse_bounds
from slurm_ft.session.signals import DEFAULT_SIGNALS, parse_signals

# torch's own default for gloo; NCCL's is shorter, and ft-run sets this variable for both.
DEFAULT_COLLECTIVE_TIMEOUT_S = 1800.0
# The daemon reads once in a cycle of some seconds.
DEFAULT_PROGRESS_INTERVAL_S = 5.0
_JOB = re.compile(r"[0-9A-Za-z_.+-]{1,64}\Z")
# Parts of the configuration that a checkpoint records.
_PLAN = (
    variables.GPUS,
    variables.NODES,
    variables.LOCAL_BATCH,
    variables.ACCUMULATION,
    variables.GLOBAL_BATCH,
    variables.STAGES,
    variables.MICRO_BATCHES,
    variables.PRECISION,
    variables.GRAD_CHECKPOINTING,
    variables.FROZEN,
)


@dataclass(frozen=True, slots=True)
class Settings:
    """One rank's view; paths are ``None`` where nobody asked for the file."""

    job_id: str = "local"
    attempt: int = 0
    status: Path | None = None
    progress: Path | None = None
    state_dir: Path | None = None
    checkpoint_dir: Path = Path("ft-checkpoints/local")
    block_store: Path | None = None
    signals: tuple[int, ...] = DEFAULT_SIGNALS
    grace_s: float | None = None
    collective_timeout_s: float = DEFAULT_COLLECTIVE_TIMEOUT_S
    bounds: Bounds = field(default_factory=Bounds)
    quota_bytes: int | None = None
    mtbf_s: float | None = None
    progress_interval_s: float = DEFAULT_PROGRESS_INTERVAL_S
    gpus: int | None = None
    nodes: int = 1
    plan_digest: str = ""
    plan: Mapping[str, str] = field(default_factory=dict)

    @property
    def under_ft_run(self) -> bool:
        """Whether an ft-run waits for this rank's status and exit code."""
        return self.status is not None


def read_settings(environ: Mapping[str, str]) -> Settings:
    """The session's part of the environment, or a ConfigError naming the variable."""
    job_id = environ.get(variables.JOB) or _slurm_job(environ) or "local"
    if not _JOB.match(job_id):
        raise ConfigError(variables.JOB, f"{job_id!r} is no job id", "leave it to ft-run")
    attempt = _number(environ, variables.ATTEMPT, low=0.0)
    if attempt is None:
        attempt = _number(environ, "SLURM_RESTART_COUNT", low=0.0) or 0.0
    nodes = _number(environ, variables.NODES, low=1.0)
    if nodes is None:
        nodes = _number(environ, "SLURM_JOB_NUM_NODES", low=1.0) or 1.0
    gpus = _number(environ, variables.GPUS, low=0.0)
    signals = environ.get(variables.SIGNALS)
    bounds = environ.get(variables.CHECKPOINT_INTERVAL)
    timeout_s = _time(environ, variables.COLLECTIVE_TIMEOUT_S, above=0.0)
    progress_s = _time(environ, variables.PROGRESS_INTERVAL_S, above=0.0)
    return Settings(
        job_id=job_id,
        attempt=int(attempt),
        status=_path(environ, variables.STATUS),
        progress=_path(environ, variables.PROGRESS),
        state_dir=_path(environ, variables.STATE_DIR),
        checkpoint_dir=_path(environ, variables.CHECKPOINT_DIR)
        or Path(environ.get("SLURM_SUBMIT_DIR") or os.curdir) / "ft-checkpoints" / job_id,
        block_store=_path(environ, variables.BLOCK_STORE),
        signals=DEFAULT_SIGNALS if signals is None else parse_signals(signals),
        grace_s=_time(environ, variables.GRACE_S, low=0.0),
        collective_timeout_s=timeout_s or DEFAULT_COLLECTIVE_TIMEOUT_S,
        bounds=parse_bounds(bounds) if bounds else Bounds(),
        quota_bytes=_bytes(environ, variables.CHECKPOINT_QUOTA),
        mtbf_s=_time(environ, variables.MTBF_S, above=0.0),
        progress_interval_s=progress_s or DEFAULT_PROGRESS_INTERVAL_S,
        gpus=None if gpus is None else int(gpus),
        nodes=int(nodes),
        plan_digest=environ.get(variables.PLAN_DIGEST, ""),
        plan={name: environ[name] for name in _PLAN if environ.get(name)},
    )


def _slurm_job(environ: Mapping[str, str]) -> str | None:
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID")


def _path(environ: Mapping[str, str], name: str) -> Path | None:
    text = environ.get(name)
    return Path(text) if text else None


def _bytes(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    try:
        return parse_bytes(text) if text else None
    except ValueError as exc:
        raise ConfigError(name, str(exc), "unset it or write a number, or one as in 200G") from exc


def _time(
    environ: Mapping[str, str], name: str, *, low: float | None = None, above: float | None = None
) -> float | None:
    """A variable as a time in seconds; unset and empty are ``None``."""
    return _bounded(environ, name, parse_duration, ("time", " s", FORMS), low, above)


def _number(
    environ: Mapping[str, str], name: str, *, low: float | None = None, above: float | None = None
) -> float | None:
    """A variable as a number; unset and empty are ``None``."""
    return _bounded(environ, name, float, ("number", "", "a number"), low, above)


def _bounded(
    environ: Mapping[str, str],
    name: str,
    read: Callable[[str], float],
    words: tuple[str, str, str],
    low: float | None,
    above: float | None,
) -> float | None:
    """``words``: what it is called, its unit, and what to write instead."""
    text = environ.get(name)
    if not text:
        return None
    try:
        value = read(text)
    except ValueError:
        value = math.nan
    what, unit, forms = words
    wanted = f"from {low:g}" if low is not None else f"above {above or 0:g}"
    inside = value >= low if low is not None else value > (above or 0.0)
    if not inside or value == math.inf:
        raise ConfigError(
            name, f"{text!r} is no {what} {wanted}{unit}", f"unset it or write {forms}"
        )
    return value
