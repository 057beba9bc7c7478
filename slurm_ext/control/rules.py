"""The numbers and switches by which acting is bounded, as plain data.

The pure half of the daemon takes these instead of the whole configuration, so that it needs no
pydantic and a test names only what it is about. Durations are seconds. Nothing here has a default
of its own that an administrator would see: the daemon fills every field from its configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slurm_ext.control.config import Config

ORDER = "order"
RESIZE = "resize"
LEASE = "lease"
PIN = "pin"
MOVE = "move"

# Slurm keeps a requeued job back for cred_expire + 1 s, 120 + 1 by default (seen on 24.11.5).
REQUEUE_HOLD_S = 121.0
# A size field is written only while this many cycles of the lease are left.
SAFE_CYCLES = 2


@dataclass(frozen=True, slots=True)
class ResumeRules:
    """Bounds of resuming. Durations are seconds.

    ``free_orderly`` and ``free_failures`` are requeues of one cause within ``window_s`` that cost
    no cool-down; the next one costs ``cooldown_s``, each further one twice as much, at most
    ``cooldown_max_s``. ``at_once`` jobs of a partition may be resuming together; one that does
    not report counts as resuming for ``settle_s`` after its start.
    """

    window_s: float = 3600.0
    free_orderly: int = 10
    free_failures: int = 2
    cooldown_s: float = 60.0
    cooldown_max_s: float = 1800.0
    at_once: int = 16
    settle_s: float = 60.0


@dataclass(frozen=True, slots=True)
class MoveRules:
    """Bounds of moving a running job out of another one's way.

    ``margin`` is the share by which the gain must exceed the cost, ``cooldown_s`` for how long a
    job is left alone after it was asked or requeued.
    """

    margin: float = 0.5
    cooldown_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class ActingRules:
    """Bounds of acting.

    ``acts`` maps a partition to what may be done there (``order``, ``lease``, ``resize``,
    ``pin``, ``move``); a partition that is not named is observed only.
    """

    cycle_s: float = 5.0
    lease_s: float = 300.0
    renew_at: float = 0.5
    grace_s: float = 5.0
    requeue_hold_s: float = REQUEUE_HOLD_S
    waiting_limit_s: float = 86_400.0
    head: int = 200
    max_writes_per_cycle: int = 500
    acts: Mapping[str, frozenset[str]] = field(default_factory=dict)
    resume: ResumeRules = ResumeRules()
    move: MoveRules = MoveRules()

    def may(self, partition: str, act: str) -> bool:
        """Whether ``act`` is switched on for the partition."""
        return act in self.acts.get(partition, frozenset())

    @property
    def safe_s(self) -> float:
        """How much of a lease has to be left when a size field is written."""
        return SAFE_CYCLES * self.cycle_s


def rules_from(config: Config) -> ActingRules:
    """The part of the daemon's configuration that acting needs."""
    return ActingRules(
        cycle_s=config.cycle_s,
        lease_s=config.lease_s,
        renew_at=config.renew_at,
        grace_s=config.grace_s,
        waiting_limit_s=config.waiting_limit_s,
        head=config.head,
        max_writes_per_cycle=config.max_writes_per_cycle,
        acts={
            name: frozenset(str(act.value) for act in settings.act)
            for name, settings in config.partitions.items()
        },
        resume=ResumeRules(
            window_s=config.resume_window_s,
            free_orderly=config.resume_free_orderly,
            free_failures=config.resume_free_failures,
            cooldown_s=config.resume_cooldown_s,
            cooldown_max_s=config.resume_cooldown_max_s,
            at_once=config.resume_at_once,
            settle_s=config.resume_settle_s,
        ),
        move=MoveRules(config.move_margin, config.move_cooldown_s),
    )
