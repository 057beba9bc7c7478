"""Merge candidates in the knapsack: what two jobs may do together is decided as one item.

A candidate with two job ids is offered to both of its jobs: to the carrier, whose GPUs are used,
and to the rider, which is served by the same GPUs. It is taken by both or by neither. So the two
jobs become one item, whose options are everything that the pair can do: one of them alone, each on
its own, or both merged. The values of both jobs count, the GPUs of a merged run once. Pairs do not
overlap, so that an item stays small and the knapsack exact.

The choice a reader would question: a merge candidate is worth what both jobs progress by it, and
nothing for the GPU time that it spares. That time is worth something only through the jobs that
then start sooner, which the next decision sees by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from slurm_ext.domain.configuration import Candidate
from slurm_ext.optimize.problem import Item, Option

Offers = Mapping[str, Sequence[Candidate]]


def rides(key: str, candidate: Candidate) -> bool:
    """Whether the job would be carried by another one."""
    return candidate.carrier != key


def alone(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that need no other job."""
    return [candidate for candidate in candidates if len(candidate.job_ids) == 1]


def worthwhile(offers: Offers, waiting: int, gpus: int) -> dict[str, list[Candidate]]:
    """Candidates without the merges that do not pay; only jobs that had one are in the answer.

    What a merge competes with is the same two jobs one after the other on the same GPUs, the
    shorter one first: ends at ``a`` and ``a + b``, the merged run at ``m``. So the pair itself
    gains ``2 a + b - 2 m`` seconds, mostly less than none. But the GPUs are free ``a + b - m``
    sooner, which every job that comes behind on them gains: of ``waiting`` jobs those that these
    GPUs' share of the field's ``gpus`` would serve.
    """
    found: dict[str, list[Candidate]] = {}
    for key, candidates in offers.items():
        partner = _partner(key, offers)
        if partner is None:
            continue
        both = {_shape(c): c.remaining_s.value for c in alone(offers.get(partner, ()))}
        mine = {_shape(c): c.remaining_s.value for c in alone(candidates)}
        found[key] = []
        for candidate in candidates:
            if len(candidate.job_ids) > 1:
                a, b = sorted((mine[_shape(candidate)], both.get(_shape(candidate), math.inf)))
                sooner = a + b - candidate.remaining_s.value
                pair = 2 * a + b - 2 * candidate.remaining_s.value
                behind = max(0, waiting - 2) * candidate.gpus / gpus
                if not pair + behind * sooner > 0:
                    continue
            found[key].append(candidate)
    return found


def _shape(candidate: Candidate) -> tuple[int, ...]:
    return candidate.configuration.placement


def bind(items: Sequence[Item], offers: Offers, capacity: int) -> tuple[Item, ...]:
    """Pairs as one item each, in the place of the first. ``offers`` are the candidates behind the
    options of each job that has a merge candidate; the items of the others stay as they are."""
    by_key = {item.key: item for item in items}
    bound: list[Item] = []
    done: set[str] = set()
    for item in items:
        if item.key in done:
            continue
        partner = _partner(item.key, offers)
        if partner is None:
            bound.append(item)
        elif partner not in by_key or partner not in offers:
            bound.append(_single(item, offers, capacity))
        else:
            bound.append(_both(item, by_key[partner], offers, capacity))
            done.add(partner)
    return tuple(bound)


def unbind(items: Sequence[Item], chosen: Mapping[str, int]) -> dict[str, int]:
    """Job -> index of its own option, from what was chosen of bound items."""
    found: dict[str, int] = {}
    for item in items:
        index = chosen.get(item.key)
        if index is None:
            continue
        tag = item.options[index].tag
        if isinstance(tag, _Tag):
            found.update(tag)
        else:
            found[item.key] = index
    return found


class _Tag(tuple[tuple[str, int], ...]):
    """What an option of a bound item means: (job, index of its own option), one for each."""


def _partner(key: str, offers: Offers) -> str | None:
    for candidate in offers.get(key, ()):
        if len(candidate.job_ids) > 1:
            return next(other for other in candidate.job_ids if other != key)
    return None


def _own(item: Item, offers: Offers) -> list[tuple[int, Option]]:
    return [
        (index, option)
        for index, (option, candidate) in enumerate(
            zip(item.options, offers[item.key], strict=True)
        )
        if len(candidate.job_ids) == 1
    ]


def _single(item: Item, offers: Offers, capacity: int) -> Item:
    """A job whose partner is not there: what it can do by itself."""
    return Item(
        item.key,
        tuple(
            _option(option.gpus, option.value, option.pool, (item.key, index))
            for index, option in _own(item, offers)
            if option.gpus <= capacity
        ),
    )


def _both(first: Item, second: Item, offers: Offers, capacity: int) -> Item:
    one, two = _own(first, offers), _own(second, offers)
    options = list(_single(first, offers, capacity).options)
    options += _single(second, offers, capacity).options
    for i, a in one:
        for j, b in two:
            if a.gpus + b.gpus <= capacity and a.pool == b.pool:
                tags = (first.key, i), (second.key, j)
                options.append(_option(a.gpus + b.gpus, a.value + b.value, a.pool, *tags))
    places = {candidate: j for j, candidate in enumerate(offers[second.key])}
    for i, candidate in enumerate(offers[first.key]):
        at = places.get(candidate) if len(candidate.job_ids) > 1 else None
        if at is not None and candidate.gpus <= capacity:
            a, b = first.options[i], second.options[at]
            tags = (first.key, i), (second.key, at)
            options.append(_option(a.gpus, a.value + b.value, a.pool, *tags))
    return Item(first.key, tuple(options))


def _option(gpus: int, value: float, pool: str, *tags: tuple[str, int]) -> Option:
    return Option(gpus, value, _Tag(tags), pool)
