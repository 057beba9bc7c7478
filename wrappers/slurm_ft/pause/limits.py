"""How long each part of a pause may take, and whether that fits the collective time-out.

Two chains must fit into the time that a rank may spend in a collective waiting for the others:

* After an abort the first rank goes on while the last may still be reading: it has waited at most
  ``ack_s + slack_s`` and then fails to read for ``lost_s``, and its peer is in the next collective
  meanwhile.
* After a go the ranks leave one after the other, at most ``lost_s`` apart.

While ranks are held, no collective is in flight and the time-out does not run, so a pause may be
longer than it. Restoring and coming up are not part of either chain for the same reason.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from slurm_ext.domain.errors import ConfigError
from slurm_ft.pause.protocol import Limit, Request

# Part of the collective time-out that the abort chain may use beside the longest step: the rest is
# for the collective itself and for clocks and schedulers that are late.
_USABLE = 0.8
# What a person waits for gladly; more is of no use to anybody.
_MOST_ACK_S = 30.0
_MOST_LOST_S = 15.0
# Ranks that were stopped are woken one after the other, node by node.
_MOST_WAKE_S = 30.0
# A large state over a slow link: 200 GB at 2 GB/s.
DEFAULT_MOVE_S = 120.0


@dataclass(frozen=True, slots=True)
class Limits:
    """All in seconds.

    ``ack_s``     from the first acknowledgement to the last, as the controller sees it
    ``slack_s``   how much longer a rank waits before it decides in place of a dead controller
    ``lost_s``    the store gives no answer: a bound rank exits, an unbound one goes on
    ``release_s`` giving memory back (or saving, for the last rung) on one rank
    ``restore_s`` taking it back
    ``up_s``      from a rank's being up until all are
    ``poll_s``    between two readings while waiting
    """

    ack_s: float = 20.0
    slack_s: float = 5.0
    lost_s: float = 10.0
    release_s: float = 120.0
    restore_s: float = 120.0
    up_s: float = 180.0
    poll_s: float = 0.05

    def seconds(self, limit: Limit, request: Request | None) -> float:
        """How long an Arm of this kind runs."""
        hold_s = request.hold_s if request else 0.0
        wait_s = request.wait_s if request else 0.0
        return {
            Limit.WAIT: wait_s,
            Limit.ACK: self.ack_s,
            Limit.DECIDE: self.ack_s + self.slack_s,
            Limit.RELEASE: self.release_s,
            Limit.RELEASE_ALL: self.release_s + self.lost_s + self.slack_s,
            Limit.HOLD: hold_s,
            Limit.HOLD_RANK: hold_s + self.slack_s,
            Limit.RESTORE: self.restore_s,
            Limit.UP: self.up_s,
            Limit.UP_ALL: self.restore_s + self.up_s + self.lost_s,
        }[limit]

    @property
    def spread_s(self) -> float:
        """Most time between the first rank's next step and the last one's, or its exit."""
        return self.ack_s + self.slack_s + self.lost_s


def check_limits(limits: Limits, collective_timeout_s: float, longest_step_s: float) -> None:
    """Raise ConfigError where a pause could use up a collective's time-out, or undo itself."""
    for item in fields(limits):
        if not getattr(limits, item.name) > 0:
            raise ConfigError(
                "pause",
                f"{item.name}={getattr(limits, item.name)} is not a positive number of seconds",
                "set it above 0",
            )
    needed = limits.spread_s + longest_step_s
    if needed >= collective_timeout_s:
        raise ConfigError(
            "pause",
            f"ack_s={limits.ack_s:g} + slack_s={limits.slack_s:g} + lost_s={limits.lost_s:g} + "
            f"longest step {longest_step_s:g} s = {needed:g} s does not stay below the collective "
            f"time-out of {collective_timeout_s:g} s",
            "raise the time-out of the process group or lower these limits",
        )
    if limits.slack_s <= limits.poll_s:
        raise ConfigError(
            "pause",
            f"slack_s={limits.slack_s:g} is not above poll_s={limits.poll_s:g}: ranks would decide "
            "before the controller can",
            "raise slack_s",
        )
    least_up_s = limits.restore_s + limits.lost_s + limits.slack_s
    if limits.up_s < least_up_s:
        raise ConfigError(
            "pause",
            f"up_s={limits.up_s:g} is below restore_s + lost_s + slack_s = {least_up_s:g}: a rank "
            "that restores in time would be given up",
            f"set up_s to {least_up_s:g} or more",
        )


def fitting_limits(
    collective_timeout_s: float, longest_step_s: float, move_s: float = DEFAULT_MOVE_S
) -> Limits:
    """Limits for a job about which nothing else is known; check_limits accepts them.

    ``move_s`` is how long giving back, and taking back, may take on one rank. Raises ConfigError
    where the time-out leaves no room beside the longest step.
    """
    room_s = (collective_timeout_s - longest_step_s) * _USABLE
    if room_s <= 0:
        raise ConfigError(
            "pause",
            f"the collective time-out of {collective_timeout_s:g} s is not above the longest step "
            f"of {longest_step_s:g} s",
            "raise the time-out of the process group",
        )
    ack_s = min(_MOST_ACK_S, room_s * 0.5)
    lost_s = min(_MOST_LOST_S, room_s * 0.3)
    slack_s = min(_MOST_LOST_S, room_s * 0.2)
    limits = Limits(
        ack_s=ack_s,
        slack_s=slack_s,
        lost_s=lost_s,
        release_s=move_s,
        restore_s=move_s,
        up_s=move_s + lost_s + max(slack_s, min(_MOST_WAKE_S, move_s)),
        poll_s=min(Limits().poll_s, slack_s / 4),
    )
    check_limits(limits, collective_timeout_s, longest_step_s)
    return limits
