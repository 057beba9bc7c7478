"""The chain of time-outs, computed once so that a shorter one never fires before a longer one.

    collective  <  heartbeat of NCCL's watchdog       else the monitor kills a rank that could tell
    collective  <= joining (rendezvous, first use)    else nobody survives a slow first step
    collective  <  a day                              else a lost rank is noticed far too late

Whatever the user set wins, and values of the user that contradict each other are an error before
anything starts. Pure functions of the environment.
"""

from __future__ import annotations

from slurm_ext.domain.duration import seconds_text
from slurm_ft import variables
from slurm_ft.launch.errors import UsageError
from slurm_ft.launch.options import to_seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# What torch takes for NCCL where nobody says otherwise.
DEFAULT_COLLECTIVE_S = 600.0
# From the time-out of a collective to the end of the watchdog: it dumps and tells the others.
HEARTBEAT_MARGIN_S = 120.0
# What a first step may take longer than any other: compilation, page cache, NCCL's set-up.
JOIN_MARGIN_S = 300.0
LONGEST_COLLECTIVE_S = 86_400.0
# Beyond it a lost rank costs more than an hour of all the others.
SLOW_RECOVERY_S = 3600.0
# What torchrun's agent leaves its workers by itself, see `for_launcher`.
AGENT_GRACE_S = 30.0

HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
MONITORING = "TORCH_NCCL_ENABLE_MONITORING"
AGENT_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


class Timeouts:
    """Seconds. ``warnings`` are for the user."""

    __slots__ = ("collective_s", "heartbeat_s", "join_s", "warnings")

    def __init__(
        self, collective_s: float, heartbeat_s: float, join_s: float, warnings: tuple[str, ...]
    ) -> None:
        self.collective_s = collective_s
        self.heartbeat_s = heartbeat_s
        self.join_s = join_s
        self.warnings = warnings

    def variables(self) -> dict[str, str]:
        """What the program is told."""
        return {
            variables.COLLECTIVE_TIMEOUT_S: seconds_text(self.collective_s),
            variables.INIT_TIMEOUT_S: seconds_text(self.join_s),
            # NCCL reads a whole number.
            HEARTBEAT: str(-int(-self.heartbeat_s // 1)),
        }


def order_timeouts(
    collective_s: float | None,
    environment: Mapping[str, str],
    place: str = "--collective-timeout",
) -> Timeouts:
    """The chain; ``place`` is where the first value stands.

    Raises UsageError where two values of the user contradict each other.
    """
    heartbeat_s = _plain(environment, HEARTBEAT)
    join = environment.get(variables.INIT_TIMEOUT_S, "")
    join_s = to_seconds(join, variables.INIT_TIMEOUT_S) if join else None
    chosen = collective_s
    if chosen is None:
        chosen = DEFAULT_COLLECTIVE_S
        for bound_s in (heartbeat_s and heartbeat_s * 0.8, join_s):
            if bound_s:
                chosen = min(chosen, bound_s)
    if chosen > LONGEST_COLLECTIVE_S:
        raise UsageError(
            f"{place}={chosen:g}: a lost rank would be noticed after more than a day;"
            f" write at most {LONGEST_COLLECTIVE_S:g}, and 600 where nothing speaks for more"
        )
    watched = environment.get(MONITORING, "1").strip().lower() not in {"0", "n", "no", "false"}
    if heartbeat_s is not None and heartbeat_s <= chosen and watched:
        raise UsageError(
            f"{HEARTBEAT}={heartbeat_s:g} is not above {place}={chosen:g}: NCCL's"
            " monitor would kill a rank that only waits for a late one; raise it to"
            f" {chosen + HEARTBEAT_MARGIN_S:g} or lower the collective's"
        )
    if join_s is not None and join_s < chosen:
        raise UsageError(
            f"{variables.INIT_TIMEOUT_S}={join_s:g} is below {place}={chosen:g}:"
            f" joining takes longer than any step; raise it to {chosen + JOIN_MARGIN_S:g} or lower"
            " the collective's"
        )
    warnings: tuple[str, ...] = ()
    if chosen > SLOW_RECOVERY_S:
        warnings = (
            f"{place}={chosen:g}: after the loss of a rank all others stand still for"
            f" {chosen / 3600:.1f} hours before the job comes back",
        )
    return Timeouts(
        chosen,
        heartbeat_s if heartbeat_s is not None else chosen + HEARTBEAT_MARGIN_S,
        join_s if join_s is not None else chosen + JOIN_MARGIN_S,
        warnings,
    )


def for_launcher(grace_s: float | None, environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun's agent has to be told.

    On SIGTERM it kills its workers after 30 seconds, however long Slurm would have waited. Agents
    before torch 2.9 do not know the variable; there only a signal other than TERM leaves a save
    more time.
    """
    if environment.get(AGENT_SHUTDOWN):
        return {}
    wanted_s = LONGEST_COLLECTIVE_S if grace_s is None else max(grace_s, AGENT_GRACE_S)
    return {AGENT_SHUTDOWN: str(int(wanted_s))}


def _plain(environment: Mapping[str, str], name: str) -> float | None:
    """A variable of somebody else, who knows no units."""
    text = environment.get(name, "")
    if text and not text.strip().replace(".", "", 1).isdecimal():
        raise UsageError(f"{name}={text}: torch knows no units; write a number of seconds")
    return to_seconds(text, name) if text else None
