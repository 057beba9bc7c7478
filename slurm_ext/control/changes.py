"""Which decisions of a plan are new: only those are logged and journalled.

A plan is made every few seconds, and most of it repeats. What counts as new is what a user would
call another decision: the verdict, the GPU count, the nodes, and for a job that is left alone the
reason. Ranks and forecasts move all the time and are in the plan document.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from slurm_ext.domain.codec import plain
from slurm_ext.domain.journal import JournalRow
from slurm_ext.domain.plan import Decision, Verdict

_Key = tuple[str, int, tuple[str, ...], str]


def _key(decision: Decision) -> _Key:
    gpus = decision.configuration.gpus if decision.configuration is not None else 0
    if decision.verdict is Verdict.WAIT:
        gpus = 0  # a guess that changes with every job that comes or goes
    reason = decision.reason if decision.verdict is Verdict.LEAVE else ""
    return decision.verdict.value, gpus, decision.nodes, reason


class DecisionLog:
    """Remembers each job's last decision."""

    def __init__(self) -> None:
        self._last: dict[str, _Key] = {}

    def news(self, decisions: Mapping[str, Decision]) -> list[Decision]:
        """Decisions that differ from the last of their job, in the order of rank.

        Jobs without a decision are forgotten: their next one is new again.
        """
        changed = [d for d in decisions.values() if self._last.get(d.job_id) != _key(d)]
        changed.sort(key=lambda d: (d.rank, d.job_id))
        for decision in changed:
            self._last[decision.job_id] = _key(decision)
        for job_id in list(self._last):
            if job_id not in decisions:
                del self._last[job_id]
        return changed


def decision_rows(changed: Iterable[Decision], cycle: int, now: float) -> list[JournalRow]:
    """The journal rows of new decisions, with the terms that made them."""
    return [
        JournalRow(
            at_s=now,
            cycle=cycle,
            job_id=decision.job_id,
            event=f"decision:{decision.verdict.value}",
            reason=decision.reason,
            fields=_fields(decision),
            terms=json.dumps(plain(decision.terms)) if decision.terms else "",
        )
        for decision in changed
    ]


def _fields(decision: Decision) -> str:
    parts = []
    if decision.configuration is not None:
        parts.append(f"gpus={decision.configuration.gpus}")
        parts.append(f"nodes={decision.configuration.nodes}")
    if decision.nodes:
        parts.append(f"nodelist={','.join(decision.nodes)}")
    if decision.remaining_s is not None:
        left = decision.remaining_s
        parts.append(f"remaining_s={'unlimited' if left.unlimited else f'{left.value:.0f}'}")
        parts.append(f"source={decision.remaining_s.source.value}")
    return " ".join(parts)
