"""Policy titan holds out: a start that ends much later than waiting for more GPUs is declined."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.domain.job import Job, JobState
from slurm_ext.domain.node import Node
from slurm_ext.domain.plan import Plan, Verdict
from slurm_ext.domain.policy import JobFacts, View
from slurm_ext.policy.holdout import Openings, worth_taking
from slurm_ext.policy.placement import Request, seat
from slurm_ext.policy.queue import fields
from slurm_ext.policy.titan import TitanConfig, TitanPolicy
from tests.unit.policy.build import facts, job, nodes, view
from tests.unit.policy.runs import verdicts

HOUR = 3600.0
# 40 h on one GPU, nearly as much less on more.
LONG = {1: 40 * HOUR, 2: 21 * HOUR, 4: 11 * HOUR, 8: 6 * HOUR}
WAITS = {"1": "wait"}


def runs(number: int, on: Mapping[str, int], end_s: float | None = None) -> Job:
    """A running job, by GPUs on each node."""
    gpus = sum(on.values())
    return replace(
        job(number, gpus), state=JobState.RUNNING, node_names=tuple(on), start_s=0.0, end_s=end_s
    )


def machine(running: Sequence[Job], count: int = 2) -> tuple[Node, ...]:
    used = [0] * count
    for item in running:
        left = item.gpus
        for name in item.node_names:
            share = min(4, left)
            used[int(name[1:])] += share
            left -= share
    return nodes(count, 4, used)


def seen(
    running: Sequence[Job],
    known: Mapping[str, JobFacts],
    free_at: Mapping[str, float],
    count: int = 2,
) -> View:
    waiting = [job(int(key), fact.candidates[-1].gpus) for key, fact in known.items()]
    return view([*waiting, *running], known, machine(running, count), free_at=free_at)


def nearly_free(ends_in_s: float, waited_s: float = 0.0, at: float = 0.0) -> View:
    """Seven of eight GPUs are held by jobs that end; a long job waits."""
    held = [runs(8, {"n00": 4}), runs(9, {"n01": 3})]
    known = {"1": facts(1, LONG, since=at - waited_s)}
    return seen(held, known, {"8": at + ends_in_s, "9": at + ends_in_s})


def decide(v: View, now: float = 0.0, hold_out: float | None = 2.5) -> Plan:
    return TitanPolicy(TitanConfig(hold_out=hold_out))(v, now)


def test_a_job_of_days_does_not_take_the_one_free_gpu_minutes_before_eight_are() -> None:
    v = nearly_free(300)
    decision = decide(v).decisions["1"]
    assert decision.verdict is Verdict.WAIT
    assert decision.waits_for == (
        "8 GPUs, expected in 5 min: so it is done in 6 h 5 min, and on the 1 GPU that is free only "
        "in 40 h"
    )
    assert verdicts(decide(v, hold_out=None)) == {"1": "start 1"}


def test_it_takes_it_where_waiting_would_not_bring_it_much_further() -> None:
    # 10 h of wait and 6 h on eight GPUs: 2.5 times that is what one GPU takes.
    assert verdicts(decide(nearly_free(9.9 * HOUR))) == WAITS
    assert verdicts(decide(nearly_free(10.1 * HOUR))) == {"1": "start 1"}


def test_it_does_not_wait_for_longer_than_the_start_that_it_declines_takes() -> None:
    now = 100 * HOUR
    assert verdicts(decide(nearly_free(300, 39 * HOUR, at=now), now)) == WAITS
    assert verdicts(decide(nearly_free(300, 41 * HOUR, at=now), now)) == {"1": "start 1"}


def test_past_the_waiting_limit_it_takes_what_there_is() -> None:
    now = 100 * HOUR
    policy = TitanPolicy(TitanConfig(waiting_limit_s=2 * HOUR))
    assert verdicts(policy(nearly_free(300, 3 * HOUR, at=now), now)) == {"1": "start 1"}


def test_a_start_that_slurm_is_about_to_carry_out_is_not_taken_back() -> None:
    first = decide(nearly_free(30 * HOUR))
    assert verdicts(first) == {"1": "start 1"}
    again = replace(nearly_free(300), previous=first)
    assert verdicts(decide(again, 10.0)) == {"1": "start 1"}


def test_a_deadline_that_the_small_start_keeps_is_not_put_at_risk() -> None:
    v = nearly_free(300)
    for deadline_s, started in ((41 * HOUR, {"1": "start 1"}), (39 * HOUR, WAITS)):
        known = {"1": replace(v.facts["1"], deadline_s=deadline_s)}
        assert verdicts(decide(replace(v, facts=known))) == started


def test_a_job_with_one_count_takes_it() -> None:
    held = [runs(8, {"n00": 4}), runs(9, {"n01": 3})]
    v = seen(held, {"1": facts(1, {1: 40 * HOUR})}, {"8": 1.0, "9": 1.0})
    assert verdicts(decide(v)) == {"1": "start 1"}


def test_gpus_that_nobody_gives_back_are_not_waited_for() -> None:
    held = [runs(8, {"n00": 4}), runs(9, {"n01": 3})]
    v = seen(held, {"1": facts(1, LONG)}, {})
    assert verdicts(decide(v)) == {"1": "start 1"}


def test_a_limit_is_when_a_job_without_estimate_ends() -> None:
    held = [runs(8, {"n00": 4}, end_s=60.0), runs(9, {"n01": 3}, end_s=60.0)]
    assert verdicts(decide(seen(held, {"1": facts(1, LONG)}, {}))) == WAITS


def test_a_job_that_outlives_its_end_is_waited_for_less_and_less() -> None:
    """It should have ended an hour ago, and is taken to need another one; after twelve, twelve."""
    now = 50 * HOUR
    for late_s, started in ((HOUR, WAITS), (12 * HOUR, {"1": "start 1"})):
        v = nearly_free(-late_s, at=now)
        assert verdicts(decide(v, now)) == started


def test_what_is_free_in_pieces_is_no_room_for_a_placement() -> None:
    """Four GPUs are free, one on each node: as a count they would be four at once, as a placement
    they are not to be had before the end of the others."""
    held = [runs(5 + n, {f"n{n:02d}": 3}) for n in range(4)]
    four = {1: 10 * HOUR, 4: 2.6 * HOUR}
    v = seen(held, {"1": facts(1, four)}, {str(5 + n): 30 * HOUR for n in range(4)}, count=4)
    assert verdicts(decide(v)) == {"1": "start 1"}
    (part,) = fields(v)
    waits = Openings(v, part, 0.0).of("main")
    assert (waits[(1,)], waits[(4,)], waits[(4, 4)]) == (0.0, 30 * HOUR, 30 * HOUR)
    assert waits[(8,)] == math.inf


def test_a_node_that_is_away_gives_nothing() -> None:
    v = nearly_free(300)
    down = tuple(replace(n, available=n.name != "n00") for n in v.snapshot.nodes)
    v = replace(v, snapshot=replace(v.snapshot, nodes=down))
    (part,) = fields(v)
    waits = Openings(v, part, 0.0).of("main")
    assert (waits[(4,)], waits[(4, 4)]) == (300.0, math.inf)


def test_an_idle_machine_never_holds_out() -> None:
    v = seen([], {str(n): facts(n, LONG) for n in range(1, 12)}, {})
    started = [d for d in decide(v).decisions.values() if d.verdict is Verdict.START]
    assert sum(d.configuration.gpus for d in started if d.configuration) == 8


def test_both_jobs_of_a_pair_come_to_the_same_answer() -> None:
    """Or the solver would be offered half of a merge."""

    def pair(job_id: str, alone: Mapping[int, float], since_s: float) -> JobFacts:
        own = facts(int(job_id), alone, since=since_s)
        together = tuple(
            Candidate(
                ("1", "2"),
                Configuration(g, (g,)),
                Estimate(s, s, s, Source.MEASURED),
            )
            for g, s in ((1, 60 * HOUR), (4, 16 * HOUR))
        )
        return replace(own, candidates=(*own.candidates, *together))

    v = nearly_free(300)
    (part,) = fields(v)
    openings = Openings(v, part, 0.0)
    kept = [
        [c for c in worth_taking(list(f.candidates), f, openings, 2.5, 0.0)[0] if c.job_ids[1:]]
        for f in (pair("1", LONG, 0.0), pair("2", {1: 20 * HOUR, 4: 19 * HOUR}, -1000 * HOUR))
    ]
    assert [c.gpus for c in kept[0]] == [4]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("factor", [1.0, 2.5])
@given(
    used=st.lists(st.integers(0, 4), min_size=2, max_size=4),
    ends=st.lists(st.integers(-50, 500), min_size=4, max_size=4),
    placements=st.lists(
        st.lists(st.integers(1, 4), min_size=1, max_size=3).map(
            lambda shares: tuple(sorted(shares, reverse=True))
        ),
        min_size=1,
        max_size=4,
    ),
    seconds=st.lists(st.integers(1, 500), min_size=4, max_size=4),
    waited=st.integers(0, 300),
)
def test_every_answer_follows_from_the_rule(
    factor: float,
    used: list[int],
    ends: list[int],
    placements: list[tuple[int, ...]],
    seconds: list[int],
    waited: int,
) -> None:
    """Waits against a search that seats placements for real, one end after the other."""
    held = [runs(50 + n, {f"n{n:02d}": gpus}) for n, gpus in enumerate(used) if gpus]
    free_at = {item.job_id: float(ends[int(item.job_id) - 50]) for item in held}
    v = view(held, {}, nodes(len(used), 4, used), free_at=free_at)
    (part,) = fields(v)
    waits = Openings(v, part, 0.0).of("main")
    releases = sorted((max(end, 0.0, -end), int(key) - 50) for key, end in free_at.items())
    for placement in placements:
        have = list(used)
        expected = math.inf
        for at, gone in [(0.0, -1), *releases]:
            if gone >= 0:
                have[gone] = 0
            request = Request("x", placement)
            if seat((request,), nodes(len(used), 4, have)).seats:
                expected = at
                break
        assert waits[placement] == expected
    options = [
        Candidate(("1",), Configuration(sum(p), p), Estimate(s, s, s, Source.MEASURED))
        for p, s in zip(placements, map(float, seconds), strict=False)
    ]
    fact = replace(facts(1, {}), candidates=tuple(options), waiting_since_s=-float(waited))
    kept, declined = worth_taking(list(options), fact, Openings(v, part, 0.0), factor, 0.0)
    best = min(waits[c.configuration.placement] + c.remaining_s.value for c in options)
    for option in options:
        run_s = option.remaining_s.value
        assert (option in kept) is (run_s <= factor * best or run_s <= waited)
    now = [c for c in options if not waits[c.configuration.placement]]
    assert (declined is not None) is bool(now and not any(c in kept for c in now))
