"""The objective's terms, the hand cases that shaped it, and the explanation of a "no"."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ext.domain.errors import SolverError
from slurm_ext.optimize.explain import why_not
from slurm_ext.optimize.objective import (
    Choice,
    Demand,
    Scored,
    Terms,
    Weights,
    build,
    build_items,
    in_words,
    score,
)
from slurm_ext.optimize.problem import Item, Option, Problem
from slurm_ext.optimize.solve import allocate

WEIGHTS = Weights()
ONLY_PROGRESS = Weights(start=0.0, waiting=0.0, deadline=0.0, lease=0.0)
WITH_START = Weights(start=0.25)


def job(key: str, work: float, speeds: dict[int, float], **more: float) -> Demand:
    """A job of ``work`` samples at ``speeds`` samples/s per GPU count."""
    choices = tuple(Choice(gpus, work / speed, tag=gpus) for gpus, speed in speeds.items())
    return Demand(key, choices, **more)


def gpus_of(scored: Scored) -> dict[str, int]:
    chosen = allocate(scored.problem).chosen
    return {
        item.key: item.options[chosen[item.key]].gpus
        for item in scored.problem.items
        if item.key in chosen
    }


A_SPEEDS, B_SPEEDS = {1: 100.0, 2: 190.0}, {1: 80.0, 2: 100.0}


class TestTwoJobsTwoGpus:
    """A makes 100/190 and B 80/100 samples/s on 1/2 GPUs; two GPUs are free."""

    def test_raw_throughput_starves_b(self) -> None:
        raw = Problem(
            tuple(
                Item(key, tuple(Option(a, speed) for a, speed in speeds.items()))
                for key, speeds in (("A", A_SPEEDS), ("B", B_SPEEDS))
            ),
            2,
        )
        assert allocate(raw).chosen == {"A": 1}

    def test_progress_gives_each_one_and_explain_names_it(self) -> None:
        """Both have an hour left on one GPU; their samples cannot be compared."""
        scored = build([job("A", 360_000, A_SPEEDS), job("B", 288_000, B_SPEEDS)], 2)
        assert gpus_of(scored) == {"A": 1, "B": 1}
        answer = why_not(scored, allocate(scored.problem), "A", 2)
        assert answer.jobs == {"A": (1, 2), "B": (1, 0)}
        assert answer.decisive == "progress"
        assert "decisive term: progress" in answer.words
        assert answer.terms["progress"] == pytest.approx((2.0 - 1.9) / 3600)

    def test_with_equal_samples_left_the_start_term_gives_each_one(self) -> None:
        """Then 1/R is raw throughput in another unit.  A on both and B next is in truth the
        shorter schedule on average; who prefers B running at once says so with ``start``."""
        demands = [job("A", 36_000, A_SPEEDS), job("B", 36_000, B_SPEEDS)]
        assert gpus_of(build(demands, 2)) == {"A": 2}
        scored = build(demands, 2, WITH_START)
        assert gpus_of(scored) == {"A": 1, "B": 1}
        answer = why_not(scored, allocate(scored.problem), "A", 2)
        assert answer.decisive == "start"
        assert answer.terms["progress"] == pytest.approx(-10 / 36_000)
        assert answer.terms["start"] == pytest.approx(0.25 * 80 / 36_000)

    def test_the_unit_of_a_sample_does_not_matter(self) -> None:
        """A's samples counted a thousand times finer change nothing, unlike raw throughput."""
        fine = {gpus: 1000 * speed for gpus, speed in A_SPEEDS.items()}
        coarse = build([job("A", 360_000, A_SPEEDS), job("B", 288_000, B_SPEEDS)], 2)
        scored = build([job("A", 360_000_000, fine), job("B", 288_000, B_SPEEDS)], 2)
        assert gpus_of(scored) == gpus_of(coarse)

    def test_b_waiting_long_enough_is_served_even_against_much_shorter_work(self) -> None:
        short = job("A", 30_000, A_SPEEDS)
        fresh = build([short, job("B", 3_600_000, B_SPEEDS)], 2)
        assert gpus_of(fresh) == {"A": 2}
        waited = build([short, job("B", 3_600_000, B_SPEEDS, waited_s=48 * 3600.0)], 2)
        assert gpus_of(waited) == {"A": 1, "B": 1}
        assert why_not(waited, allocate(waited.problem), "A", 2).decisive == "waiting"


def one(terms: Terms) -> float:
    assert terms.total == pytest.approx(
        terms.progress
        + terms.start
        + terms.waiting
        + terms.deadline
        + terms.lease
        + terms.switch
        + terms.fairness
    )
    return terms.total


def test_progress_is_the_share_of_the_remaining_work_per_second() -> None:
    terms = score(job("a", 36_000, A_SPEEDS), ONLY_PROGRESS)
    assert [one(t) for t in terms] == pytest.approx([100 / 36_000, 190 / 36_000])


def test_the_nearly_finished_job_goes_first() -> None:
    scored = build([job("long", 1e6, {4: 100.0}), job("short", 1e4, {4: 100.0})], 4)
    assert gpus_of(scored) == {"short": 4}


def test_start_is_measured_on_the_smallest_count_whatever_the_order() -> None:
    choices = (Choice(4, 100.0), Choice(1, 300.0), Choice(2, 160.0))
    assert {t.start for t in score(Demand("a", choices), WITH_START)} == {0.25 / 300.0}


def test_waiting_after_patience_equals_a_job_with_patience_left() -> None:
    waited = score(Demand("a", (Choice(1, 1e9),), waited_s=WEIGHTS.patience_s), WEIGHTS)[0]
    assert waited.waiting == pytest.approx(1 / WEIGHTS.patience_s)


def test_deadline_speaks_for_counts_that_keep_it_only() -> None:
    choices = (Choice(1, 4000.0), Choice(2, 2100.0), Choice(4, 1500.0, delay_s=600.0))
    at = {t: score(Demand("a", choices, deadline_in_s=t), WEIGHTS) for t in (2200.0, 1800.0, -5.0)}
    assert [t.deadline > 0 for t in at[2200.0]] == [False, True, True]
    assert at[2200.0][1].deadline == pytest.approx(WEIGHTS.deadline / 2200.0)
    assert [t.deadline for t in at[1800.0]] == [0.0, 0.0, 0.0]  # 1500 s of work, but 600 s to start
    assert [t.deadline for t in at[-5.0]] == [0.0, 0.0, 0.0]


def test_deadline_turns_an_allocation() -> None:
    urgent = job("u", 180_000, {1: 100.0, 2: 190.0})
    other = job("o", 120_000, {1: 100.0, 2: 140.0})
    assert gpus_of(build([urgent, other], 2)) == {"u": 1, "o": 1}
    scored = build([replace(urgent, deadline_in_s=1000.0), other], 2)
    assert gpus_of(scored) == {"u": 2}
    assert why_not(scored, allocate(scored.problem), "u", 1).decisive == "deadline"


def test_lease_keeps_the_planned_count_against_a_small_gain_only() -> None:
    def scored(gain: float) -> Scored:
        choices = (Choice(1, 1000.0, planned=True), Choice(2, 1000.0 / gain))
        return build([Demand("a", choices)], 2)

    assert gpus_of(scored(1.04)) == {"a": 1}
    assert gpus_of(scored(1.06)) == {"a": 2}
    small = scored(1.04)
    assert why_not(small, allocate(small.problem), "a", 2).decisive == "lease"


def test_switch_costs_what_it_delays() -> None:
    terms = score(Demand("a", (Choice(1, 900.0, delay_s=100.0),)), ONLY_PROGRESS)[0]
    assert terms.switch < 0.0
    assert one(terms) == pytest.approx(1 / 1000.0)
    # A running job keeps its count unless the gain pays for the restart.
    stay, grow = Choice(1, 600.0), Choice(2, 320.0, delay_s=300.0)
    assert gpus_of(build([Demand("a", (stay, grow))], 2, ONLY_PROGRESS)) == {"a": 1}
    long = Demand("a", (replace(stay, remaining_s=6000.0), replace(grow, remaining_s=3200.0)))
    assert gpus_of(build([long], 2, ONLY_PROGRESS)) == {"a": 2}


def test_fairness_weight_scales_everything_and_is_one_addend() -> None:
    plain = job("a", 36_000, A_SPEEDS, waited_s=500.0)
    heavy = replace(plain, weight=3.0)
    for light_terms, heavy_terms in zip(score(plain, WEIGHTS), score(heavy, WEIGHTS), strict=True):
        assert one(heavy_terms) == pytest.approx(3.0 * one(light_terms))
        assert light_terms.fairness == 0.0
        assert heavy_terms.progress == light_terms.progress


times = st.floats(0.0, 1e7)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 64), times, times, st.booleans()), max_size=6),
    times,
    st.floats(1e-3, 1e3),
    st.none() | st.floats(-1e6, 1e6),
)
def test_values_are_finite_and_not_negative(
    choices: list[tuple[int, float, float, bool]],
    waited_s: float,
    weight: float,
    deadline_in_s: float | None,
) -> None:
    demand = Demand("a", tuple(Choice(*c) for c in choices), waited_s, weight, deadline_in_s)
    terms = score(demand, WITH_START)
    assert len(terms) == len(choices)
    assert all(0.0 <= t.total < math.inf for t in terms)
    build([demand], 8)  # and make a problem


def test_items_keep_order_tags_and_pools() -> None:
    choices = (Choice(2, 10.0, tag="x", pool="p"), Choice(1, 15.0, tag="y", pool="q"))
    items, terms = build_items([Demand("a", choices), Demand("b", ())], WEIGHTS)
    assert [(o.gpus, o.tag, o.pool) for o in items[0].options] == [(2, "x", "p"), (1, "y", "q")]
    assert [o.value for o in items[0].options] == [t.total for t in terms["a"]]
    assert items[1].options == terms["b"] == ()


def test_in_words_tells_the_terms_that_count() -> None:
    demand = job("a", 36_000, A_SPEEDS, waited_s=500.0)
    told = in_words(demand, 1, score(demand, WITH_START)[1])
    assert [term.name for term in told] == ["progress", "start", "waiting"]
    assert told[0].words == "3 min 9 s of work left on 2 GPUs"
    assert told[2].words == "has waited 8 min 20 s since its first submission"


def test_a_job_without_a_time_limit_is_told_without_a_number() -> None:
    demand = Demand("a", (Choice(1, 31_536_000.0, unlimited=True),))
    assert in_words(demand, 0, score(demand, WEIGHTS)[0])[0].words == (
        "work left on 1 GPU, without a time limit"
    )


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        (Demand("7", (Choice(2, math.nan),)), r"job 7 on 2 GPUs: remaining_s=nan"),
        (Demand("7", (Choice(2, -1.0),)), r"job 7 on 2 GPUs: remaining_s=-1.0"),
        (Demand("7", (Choice(2, 1.0, math.inf),)), r"delay_s=inf"),
        (Demand("7", (), waited_s=-1.0), r"job 7: waited_s=-1.0"),
        (Demand("7", (), weight=0.0), r"job 7: fairness weight 0.0"),
        (Demand("7", (), weight=math.nan), r"job 7: fairness weight nan"),
        (Demand("7", (), deadline_in_s=math.inf), r"job 7: deadline_in_s=inf"),
    ],
)
def test_refuses_what_is_no_time(demand: Demand, message: str) -> None:
    with pytest.raises(SolverError, match=message):
        score(demand, WEIGHTS)


@pytest.mark.parametrize(
    "wrong", [{"start": -1.0}, {"progress": math.nan}, {"patience_s": 0.0}, {"switch": 1.5}]
)
def test_refuses_weights(wrong: dict[str, float]) -> None:
    with pytest.raises(SolverError, match=f"weight {next(iter(wrong))}="):
        Weights(**wrong)


class TestWhyNot:
    scored = build([job("A", 360_000, A_SPEEDS), job("B", 288_000, B_SPEEDS)], 2)
    solution = allocate(scored.problem)

    def test_the_plan_itself(self) -> None:
        answer = why_not(self.scored, self.solution, "A", 1)
        assert answer.jobs == {}
        assert answer.decisive == ""
        assert answer.words == "job A has 1 GPUs in the plan"

    def test_a_count_that_is_not_allowed_or_not_free(self) -> None:
        answer = why_not(self.scored, self.solution, "A", 0)
        assert answer.alternative is not None
        assert answer.jobs["A"] == (1, 0)
        tiny = build([job("A", 36_000, {1: 1.0, 4: 3.0})], 4)
        assert "its allowed counts are [1, 4]" in why_not(tiny, self.solution, "A", 2).words
        assert "only 2 GPUs are free" in why_not(self.scored, self.solution, "A", 8).words
        with pytest.raises(SolverError, match="'C' is not part of this decision"):
            why_not(self.scored, self.solution, "C", 1)

    def test_equally_good_is_said_to_be_the_tie_break(self) -> None:
        twins = build([job("A", 100, {1: 1.0}), job("B", 100, {1: 1.0})], 1)
        answer = why_not(twins, allocate(twins.problem), "B", 1)
        assert answer.jobs == {"A": (1, 0), "B": (0, 1)}
        assert "the tie-break decided" in answer.words
