"""Merge candidates: both jobs or neither, the GPUs counted once, and only where it pays."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.domain.plan import Verdict
from slurm_ext.optimize.problem import Item, Option, Problem
from slurm_ext.optimize.solve import allocate
from slurm_ext.policy.merged import bind, unbind, worthwhile
from slurm_ext.policy.titan import TitanPolicy
from tests.unit.policy.build import facts, job, nodes, view


def candidate(ids: tuple[str, ...], gpus: int, seconds: float) -> Candidate:
    return Candidate(
        ids, Configuration(gpus, (gpus,)), Estimate(seconds, seconds, seconds, Source.MEASURED)
    )


numbers = st.integers(1, 9).map(float)
counts = st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True).map(sorted)


@st.composite
def queues(draw: st.DrawFn) -> tuple[list[Item], dict[str, list[Candidate]]]:
    """Some jobs, neighbours of which may be merged on some counts."""
    offers: dict[str, list[Candidate]] = {}
    number = draw(st.integers(1, 5))
    for n in range(number):
        offers[f"j{n}"] = [candidate((f"j{n}",), g, 100.0) for g in draw(counts)]
    for n in range(0, number - 1, 2):
        for gpus in draw(st.one_of(st.just([]), counts)):
            both = candidate((f"j{n}", f"j{n + 1}"), gpus, 150.0)
            offers[f"j{n}"].append(both)
            offers[f"j{n + 1}"].append(both)
    items = [
        Item(key, tuple(Option(c.gpus, draw(numbers)) for c in each))
        for key, each in offers.items()
    ]
    return items, offers


def brute(items: list[Item], offers: dict[str, list[Candidate]], gpus: int) -> float:
    best = 0.0
    for pick in product(*(range(-1, len(item.options)) for item in items)):
        chosen = {item.key: index for item, index in zip(items, pick, strict=True) if index >= 0}
        used, value, fair = 0, 0.0, True
        for item in items:
            index = chosen.get(item.key)
            if index is None:
                continue
            taken = offers[item.key][index]
            value += item.options[index].value
            if taken.carrier == item.key:
                used += taken.gpus
            for other in taken.job_ids:
                at = chosen.get(other)
                fair = fair and at is not None and offers[other][at] == taken
        if fair and used <= gpus:
            best = max(best, value)
    return best


@given(queue=queues(), gpus=st.integers(1, 9))
def test_the_best_choice_of_pairs(
    queue: tuple[list[Item], dict[str, list[Candidate]]], gpus: int
) -> None:
    items, offers = queue
    able = {key: each for key, each in offers.items() if len(each[-1].job_ids) > 1}
    bound = bind(items, able, gpus)
    chosen = unbind(bound, allocate(Problem(bound, gpus)).chosen)
    by_key = {item.key: item for item in items}
    value = sum(by_key[key].options[index].value for key, index in chosen.items())
    assert value == brute(items, offers, gpus)
    for key, index in chosen.items():
        taken = offers[key][index]
        assert all(offers[other][chosen[other]] == taken for other in taken.job_ids)


def test_without_its_partner_a_job_is_not_merged() -> None:
    both = candidate(("a", "b"), 1, 150.0)
    item = Item("a", (Option(1, 1.0), Option(1, 9.0)))
    (bound,) = bind([item], {"a": [candidate(("a",), 1, 100.0), both]}, 4)
    assert unbind([bound], {"a": 0}) == {"a": 0}
    assert len(bound.options) == 1


@pytest.mark.parametrize(
    ("merged_s", "waiting", "pays"),
    [
        # One after the other: ends at 100 and 200. Merged in 140 s both are done at 140: 20 s lost
        # together, and the GPU free 60 s sooner for whoever waits.
        (140.0, 2, True),
        (160.0, 2, False),
        (160.0, 3, False),
        # With 8 jobs behind on a quarter of the GPUs, two of them start 40 s sooner.
        (160.0, 10, True),
        (200.0, 100, False),
    ],
)
def test_a_merge_competes_with_one_after_the_other(
    merged_s: float, waiting: int, pays: bool
) -> None:
    both = candidate(("a", "b"), 1, merged_s)
    offers = {key: [candidate((key,), 1, 100.0), both] for key in "ab"}
    kept = worthwhile(offers, waiting, gpus=4)
    assert [both in kept[key] for key in "ab"] == [pays, pays]


def _merge_view(merged_s: float) -> tuple[object, Candidate]:
    both = candidate(("1", "2"), 1, merged_s)
    known = {
        str(n): replace(f, candidates=(*f.candidates, both))
        for n in (1, 2)
        for f in [facts(n, {1: 100.0})]
    }
    return view([job(1), job(2)], known, nodes(1, 1)), both


def test_titan_starts_the_carrier_and_tells_the_rider() -> None:
    seen, both = _merge_view(110.0)
    plan = TitanPolicy()(seen, 0.0)
    assert plan.rides == {"2": "1"}
    carrier, rider = plan.decisions["1"], plan.decisions["2"]
    assert (carrier.verdict, carrier.remaining_s) == (Verdict.START, both.remaining_s)
    assert rider.verdict is Verdict.WAIT
    assert "job 1" in rider.waits_for


def test_titan_leaves_a_bad_merge() -> None:
    seen, _ = _merge_view(195.0)
    plan = TitanPolicy()(seen, 0.0)
    assert plan.rides == {}
    assert [d.verdict for d in plan.decisions.values()].count(Verdict.START) == 1
