"""NCCL in a pause: its settings checked as a pure function, and its own device memory as a part.

A pause holds ranks between steps, with no collective in flight, so NCCL's watchdog has nothing to
time. What can still end a paused process is a limit that counts wall time without work (the
heartbeat monitor of a process that Slurm stopped for long), or a handler that turns the failure of
one collective into the end of the process before a roll-back has had its chance. `judge` says
which settings of a job do that, before it matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from slurm_ft.pause.ladder import LostStateError, PartError

ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
MONITORING = "TORCH_NCCL_ENABLE_MONITORING"
NVLS = "NCCL_NVLS_ENABLE"
# Older releases know these names without TORCH_.
_OLD = {ASYNC_ERRORS: "NCCL_ASYNC_ERROR_HANDLING", BLOCKING: "NCCL_BLOCKING_WAIT"}
# torch's defaults: tear down after clean-up was skipped; watch the watchdog for eight minutes.
_DEFAULT_ASYNC_ERRORS = "3"
_DEFAULT_HEARTBEAT_S = 480.0
# The first NCCL that gives back the memory of a communicator.
LEAST_VERSION = (2, 29, 7)
# Modes in which a collective that timed out ends the process: 1 tears down, 3 without clean-up.
_ENDS_PROCESS = frozenset({"1", "3"})
_OFF = frozenset({"0", "n", "no", "f", "false"})


class Verdict(StrEnum):
    """What a setting means for pauses."""

    FINE = "fine"
    WARN = "warn"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Finding:
    """One setting, what follows from it, and what to do."""

    name: str
    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True)
class Wish:
    """What a pause of this job wants to do.

    ``suspended`` is the longest time for which Slurm may stop the processes (SIGSTOP), 0 where it
    never does; ``checkpointed`` whether the device state itself is dumped (cuda-checkpoint).
    """

    collective_timeout_s: float
    suspended_s: float = 0.0
    checkpointed: bool = False
    reserve_s: float = 120.0


def judge(environment: Mapping[str, str], wish: Wish) -> tuple[Finding, ...]:
    """What the NCCL settings of a job mean for its pauses. Only findings that are not fine."""

    def value(name: str) -> str:
        return environment.get(name) or environment.get(_OLD.get(name, ""), "")

    found: list[Finding] = []
    monitored = value(MONITORING).strip().lower() not in _OFF if value(MONITORING) else True
    heartbeat_s = _number(value(HEARTBEAT), _DEFAULT_HEARTBEAT_S)
    if heartbeat_s is None:
        found.append(
            Finding(HEARTBEAT, Verdict.REFUSE, f"{value(HEARTBEAT)!r} is no number of seconds")
        )
    elif monitored:
        if heartbeat_s <= wish.collective_timeout_s:
            found.append(
                Finding(
                    HEARTBEAT,
                    Verdict.REFUSE,
                    f"{heartbeat_s:g} s is not above the collective time-out of "
                    f"{wish.collective_timeout_s:g} s: the monitor ends a rank that only waits; "
                    f"set {wish.collective_timeout_s + wish.reserve_s:g}",
                )
            )
        elif 0 < heartbeat_s <= wish.suspended_s:
            found.append(
                Finding(
                    HEARTBEAT,
                    Verdict.WARN,
                    f"a suspend of {wish.suspended_s:g} s may trip the monitor ({heartbeat_s:g} s) "
                    f"on waking; set {wish.suspended_s + wish.reserve_s:g} or {MONITORING}=0",
                )
            )
    mode = value(ASYNC_ERRORS) or _DEFAULT_ASYNC_ERRORS
    if mode in _ENDS_PROCESS and wish.suspended_s >= wish.collective_timeout_s:
        found.append(
            Finding(
                ASYNC_ERRORS,
                Verdict.WARN,
                f"mode {mode} ends the process when a collective times out: a suspend of "
                f"{wish.suspended_s:g} s that meets one in flight ends the job (it comes back from "
                "its checkpoint); pause before suspending",
            )
        )
    if value(BLOCKING).strip() not in ("", "0"):
        found.append(
            Finding(
                BLOCKING,
                Verdict.WARN,
                "the training thread then waits inside NCCL and comes to a safe point late; unset "
                "it",
            )
        )
    if wish.checkpointed and environment.get(NVLS, "").strip() != "0":
        found.append(
            Finding(
                NVLS,
                Verdict.REFUSE,
                "device state with NVLS mappings is dumped but cannot be restored; set 0 or use "
                "another rung",
            )
        )
    return tuple(found)


def _number(text: str, default: float) -> float | None:
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        return None
    return number if number >= 0 else None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


class NcclBuffers:
    """`slurm_ft.pause.ladder.Part`: the device memory of NCCL's communicators, by its own calls.

    torch offers this for NCCL 2.29.7 and later; other backends and releases raise, and are left
    out by the probe.
    """

    name = "NCCL buffers"

    def __init__(self, groups: Any = None) -> None:
        self._groups = groups
        self._suspended: list[Any] = []

    def missing(self) -> str:
        """Why there is nothing to suspend; empty where there is."""
        backends = self._backends()
        if isinstance(backends, str):
            return backends
        if not backends:
            return "no NCCL communicator"
        if not all(hasattr(backend, "suspend") for backend in backends):
            return "this release of torch cannot suspend a communicator"
        version = self._version()
        if version < LEAST_VERSION:
            return f"NCCL {_dotted(version)} cannot suspend; {_dotted(LEAST_VERSION)} can"
        return ""

    def release(self, deadline_s: float) -> int:
        """Suspend every communicator; one that refuses brings all others back."""
        backends = self._backends()
        if isinstance(backends, str):
            raise PartError(backends)
        for backend in backends:
            try:
                backend.suspend()
            except RuntimeError as exc:
                try:
                    self.restore(deadline_s)
                except PartError as lost:
                    raise LostStateError(f"{exc}; and while that was undone: {lost}") from exc
                raise PartError(f"a communicator cannot be suspended: {exc}") from exc
            self._suspended.append(backend)
        return 0

    def restore(self, deadline_s: float) -> None:
        """Resume every communicator that was suspended."""
        while self._suspended:
            try:
                self._suspended[-1].resume()
            except RuntimeError as exc:
                raise PartError(f"a communicator cannot be resumed: {exc}") from exc
            self._suspended.pop()

    @staticmethod
    def _version() -> tuple[int, ...]:
        import torch

        return tuple(torch.cuda.nccl.version())

    def _backends(self) -> list[Any] | str:
        if self._groups is not None:
            return list(self._groups)
        import torch
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return "torch.distributed is not in use"
        if not torch.cuda.is_available():
            return "no GPU"
        found: list[Any] = []
        for group in dist.distributed_c10d._world.pg_map:
            try:
                backend = group._get_backend(torch.device("cuda"))
            except RuntimeError:
                continue  # a group without a backend for GPUs
            if "nccl" in str(backend.name()).lower():
                found.append(backend)
        return found
