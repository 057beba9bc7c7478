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

# Slurm keeps a requeued job back for cred_expire + 1 s, 120 + 1 by default (seen on 24.11.5).
REQUEUE_HOLD_S = 121.0
# A size field is written only while this many cycles of the lease are left.
SAFE_CYCLES = 2


@dataclass(frozen=True, slots=True)
class ActingRules:
    """Bounds of acting.

    ``acts`` maps a partition to what may be done there (``order``, ``lease``, ``resize``,
    ``pin``); a partition that is not named is observed only.
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
    )
