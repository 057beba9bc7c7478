"""Problems for the tests of the optimizer: hypothesis strategies and answers by enumeration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from itertools import product

from hypothesis import strategies as st

from slurm_ext.optimize.problem import (
    Cell,
    Item,
    Limit,
    Option,
    Pool,
    PoolProblem,
    Problem,
    selected,
)

# Few distinct whole numbers make ties common; the floats span what rates in 1/s can be.
tie_values = st.integers(0, 6).map(float)
wide_values = st.one_of(
    st.just(0.0), st.floats(1e-9, 1e3), st.floats(1e-9, 1e-6), st.sampled_from([1e-9, 1.0, 1e3])
)


@st.composite
def items(
    draw: st.DrawFn,
    values: st.SearchStrategy[float],
    most_items: int = 5,
    most_options: int = 4,
    most_gpus: int = 9,
    pools: tuple[str, ...] = ("",),
) -> tuple[Item, ...]:
    option = st.builds(
        Option,
        gpus=st.integers(0, most_gpus),
        value=values,
        tag=st.none(),
        pool=st.sampled_from(pools),
    )
    options = draw(
        st.lists(st.lists(option, max_size=most_options).map(tuple), max_size=most_items)
    )
    return tuple(Item(f"job{i}", own) for i, own in enumerate(options))


@st.composite
def problems(draw: st.DrawFn, values: st.SearchStrategy[float], most_items: int = 5) -> Problem:
    return Problem(draw(items(values, most_items)), draw(st.integers(0, 20)))


@st.composite
def pool_problems(draw: st.DrawFn) -> PoolProblem:
    """Up to three pools over up to three cells, and up to two limits."""
    cells = tuple(Cell(f"c{k}", draw(st.integers(0, 8))) for k in range(draw(st.integers(1, 3))))
    keys = [cell.key for cell in cells]
    pools = tuple(
        Pool(f"p{k}", frozenset(draw(st.sets(st.sampled_from(keys), min_size=1))))
        for k in range(draw(st.integers(1, 3)))
    )
    own = draw(items(tie_values, 4, 3, 8, tuple(pool.key for pool in pools)))
    limits: tuple[Limit, ...] = ()
    if own:
        members = st.sets(st.sampled_from([item.key for item in own]), min_size=1)
        limits = tuple(
            Limit(f"l{k}", frozenset(draw(members)), draw(st.integers(0, 10)))
            for k in range(draw(st.integers(0, 2)))
        )
    return PoolProblem(own, cells, pools, limits)


def choices(own: tuple[Item, ...]) -> Iterator[dict[str, int]]:
    """Every choice there is, with the empty one."""
    ways = [[None, *range(len(item.options))] for item in own]
    for picks in product(*ways):
        yield {item.key: pick for item, pick in zip(own, picks, strict=True) if pick is not None}


def exact_value(own: tuple[Item, ...], chosen: Mapping[str, int]) -> Fraction:
    return sum((Fraction(option.value) for option in selected(own, chosen).values()), Fraction(0))


def by_enumeration(problem: Problem) -> dict[str, int]:
    """The optimum with the documented tie-break, straight from its definition."""

    def rank(chosen: dict[str, int]) -> tuple[Fraction, int, tuple[int, ...]]:
        gpus = sum(option.gpus for option in selected(problem.items, chosen).values())
        places = tuple(chosen.get(item.key, len(item.options)) for item in problem.items)
        return -exact_value(problem.items, chosen), gpus, places

    def allowed(chosen: dict[str, int]) -> bool:
        options = selected(problem.items, chosen).values()
        return sum(option.gpus for option in options) <= problem.capacity and all(
            option.value > 0.0 for option in options
        )

    return min(filter(allowed, choices(problem.items)), key=rank)


def best_pool_value(problem: PoolProblem) -> Fraction:
    """The optimal value of a pool problem, feasibility by Hall's condition on all sets of pools."""
    return max(
        exact_value(problem.items, chosen)
        for chosen in choices(problem.items)
        if pools_allow(problem, chosen)
    )


def pools_allow(problem: PoolProblem, chosen: Mapping[str, int]) -> bool:
    options = selected(problem.items, chosen)
    gpus = {cell.key: cell.gpus for cell in problem.cells}
    for limit in problem.limits:
        if sum(o.gpus for key, o in options.items() if key in limit.members) > limit.gpus:
            return False
    for member in product([False, True], repeat=len(problem.pools)):
        group = [pool for pool, inside in zip(problem.pools, member, strict=True) if inside]
        names = {pool.key for pool in group}
        reach = frozenset[str]().union(*(pool.cells for pool in group))
        if sum(o.gpus for o in options.values() if o.pool in names) > sum(gpus[c] for c in reach):
            return False
    return True


def stopping_after(calls: int) -> Callable[[], float]:
    """A clock that stands still for ``calls`` readings and then is an hour ahead."""
    seen = 0

    def clock() -> float:
        nonlocal seen
        seen += 1
        return 0.0 if seen <= calls else 3600.0

    return clock
