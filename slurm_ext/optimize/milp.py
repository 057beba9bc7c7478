"""The allocation problems as mixed integer programs, solved by HiGHS.

    maximise    sum value(i, j) x(i, j)
    subject to  sum over j of x(i, j) <= 1                        for every item i
                sum gpus(i, j) x(i, j) <= capacity                for a `Problem`, or
                sum over options of pool q of gpus x - sum over its cells of y(q, c) <= 0,
                sum over pools of y(q, c) <= gpus(c)              for a `PoolProblem`, and
                sum over members of gpus x <= limit               for every limit
                x binary, y >= 0

y(q, c) is how many GPUs pool q draws from cell c.  It may stay continuous: for whole demands a
transport problem that has a solution has a whole one.

HiGHS is the oracle of the tests and the solver of what is no plain knapsack; single pools have
the faster `knapsack`.  It runs on one thread with a fixed seed, so equal input gives equal output
unless the time limit strikes.  The package is optional and imported inside the functions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from slurm_ext.domain.errors import SolverError
from slurm_ext.optimize.problem import (
    Item,
    PoolProblem,
    Problem,
    Solution,
    relative_gap,
    value_of,
)

if TYPE_CHECKING:
    import highspy

# x counts as chosen above this; HiGHS returns binaries within 1e-6 of 0 or 1.
_CHOSEN = 0.5

# The largest value is scaled to this.  HiGHS's tolerances are absolute (1e-7), and rates in 1/s
# would lie below them.
_TOP_VALUE = 1e4


class MilpUnavailableError(SolverError):
    """highspy is not installed."""


@dataclass(slots=True)
class _Rows:
    """Constraint rows ``sum coefficient * column <= upper`` in compressed form."""

    upper: list[float] = field(default_factory=list)
    start: list[int] = field(default_factory=lambda: [0])
    index: list[int] = field(default_factory=list)
    coefficient: list[float] = field(default_factory=list)

    def add(self, terms: Iterable[tuple[int, float]], upper: float) -> None:
        for column, coefficient in terms:
            self.index.append(column)
            self.coefficient.append(coefficient)
        self.start.append(len(self.index))
        self.upper.append(upper)


@dataclass(frozen=True, slots=True)
class Model:
    """A problem loaded into HiGHS, to be run once, with the limits given at loading."""

    highs: highspy.Highs
    items: tuple[Item, ...]
    columns: tuple[tuple[int, int], ...]  # item index, option index per x
    scale: float


def solve_milp(
    problem: Problem | PoolProblem, time_limit_s: float = math.inf, *, presolve: bool = True
) -> Solution:
    """Best solution found by HiGHS; ``optimal`` tells whether it was proven in time.

    Without any feasible solution in time the empty choice is returned, which is always feasible.
    """
    begin = time.perf_counter()
    model = load(problem, time_limit_s, presolve=presolve)
    return run(model, begin)


def load(
    problem: Problem | PoolProblem, time_limit_s: float = math.inf, *, presolve: bool = True
) -> Model:
    """Build the program and hand it to a fresh HiGHS."""
    highspy = _highspy()
    items = problem.items
    x = tuple((i, j) for i, item in enumerate(items) for j in range(len(item.options)))
    options = [items[i].options[j] for i, j in x]
    rows = _Rows()
    by_item: list[list[int]] = [[] for _ in items]
    for column, (i, _) in enumerate(x):
        by_item[i].append(column)
    for members in by_item:
        rows.add(((column, 1.0) for column in members), 1.0)

    flows = 0
    if isinstance(problem, Problem):
        rows.add(((k, float(option.gpus)) for k, option in enumerate(options)), problem.capacity)
    else:
        flows = _pool_rows(problem, rows, by_item)

    top = max((option.value for option in options), default=0.0)
    scale = _TOP_VALUE / top if top > 0.0 else 1.0
    highs = _silent_highs(highspy)
    for name, setting in {
        "threads": 1,
        "random_seed": 0,
        "presolve": "on" if presolve else "off",
        "mip_rel_gap": 0.0,
        "mip_abs_gap": 0.0,
        "time_limit": time_limit_s,
    }.items():
        highs.setOptionValue(name, setting)
    program = highspy.HighsLp()
    program.num_col_ = len(x) + flows
    program.num_row_ = len(rows.upper)
    program.sense_ = highspy.ObjSense.kMaximize
    program.col_cost_ = np.array([o.value * scale for o in options] + [0.0] * flows)
    program.col_lower_ = np.zeros(program.num_col_)
    program.col_upper_ = np.array([1.0] * len(x) + [math.inf] * flows)
    program.integrality_ = [highspy.HighsVarType.kInteger] * len(x) + [
        highspy.HighsVarType.kContinuous
    ] * flows
    program.row_lower_ = np.full(program.num_row_, -math.inf)
    program.row_upper_ = np.array(rows.upper)
    matrix = program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.array(rows.start, dtype=np.int32)
    matrix.index_ = np.array(rows.index, dtype=np.int32)
    matrix.value_ = np.array(rows.coefficient)
    if highs.passModel(program) == highspy.HighsStatus.kError:
        raise SolverError("HiGHS refused the program; this is a defect of the model builder")
    return Model(highs, items, x, scale)


def run(model: Model, begin: float | None = None) -> Solution:
    """Solve a loaded model.  ``time_s`` counts from ``begin`` (default: now)."""
    begin = time.perf_counter() if begin is None else begin
    model.highs.run()
    return read(model, begin)


def read(model: Model, begin: float) -> Solution:
    """The answer of a model that has been run."""
    highspy = _highspy()
    status = model.highs.getModelStatus()
    proven = status in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kModelEmpty)
    if not proven and status != highspy.HighsModelStatus.kTimeLimit:
        raise SolverError(f"HiGHS ended with {model.highs.modelStatusToString(status)!r}")
    info = model.highs.getInfo()
    feasible = proven or info.primal_solution_status == highspy.kSolutionStatusFeasible
    taken: list[float] = list(model.highs.getSolution().col_value) if feasible else []
    chosen = {
        model.items[i].key: j
        for (i, j), amount in zip(model.columns, taken, strict=False)
        if amount > _CHOSEN and model.items[i].options[j].value > 0.0
    }
    value = value_of(model.items, chosen)
    bound = value if proven else max(value, _bound(model, info))
    return Solution(
        chosen=chosen,
        value=value,
        optimal=proven,
        gap=relative_gap(value, bound),
        bound=bound,
        solver="highs",
        time_s=time.perf_counter() - begin,
        note="" if proven else "time limit",
    )


def _bound(model: Model, info: Any) -> float:
    """HiGHS's dual bound, or the best option of every item where it has none yet."""
    everything = math.fsum(
        max((option.value for option in item.options), default=0.0) for item in model.items
    )
    dual = info.mip_dual_bound / model.scale
    return min(dual, everything) if math.isfinite(dual) else everything


def _pool_rows(problem: PoolProblem, rows: _Rows, by_item: list[list[int]]) -> int:
    """Rows of pools, cells and limits; returns the number of flow columns after the x."""
    gpus: list[int] = []
    by_pool: dict[str, list[int]] = {pool.key: [] for pool in problem.pools}
    for item in problem.items:
        for option in item.options:
            by_pool[option.pool].append(len(gpus))
            gpus.append(option.gpus)
    flows = [(pool.key, cell) for pool in problem.pools for cell in sorted(pool.cells)]
    column = {flow: len(gpus) + k for k, flow in enumerate(flows)}
    for pool in problem.pools:
        demand = [(k, float(gpus[k])) for k in by_pool[pool.key]]
        drawn = [(column[pool.key, cell], -1.0) for cell in sorted(pool.cells)]
        rows.add(demand + drawn, 0.0)
    for cell in problem.cells:
        users = [column[flow] for flow in flows if flow[1] == cell.key]
        rows.add(((k, 1.0) for k in users), cell.gpus)
    for limit in problem.limits:
        members = [
            k
            for i, item in enumerate(problem.items)
            if item.key in limit.members
            for k in by_item[i]
        ]
        rows.add(((k, float(gpus[k])) for k in members), limit.gpus)
    return len(flows)


def _silent_highs(highspy: ModuleType) -> Any:
    """A HiGHS that prints nothing.  Its constructor prints a banner to the process's stdout, past
    Python, when it enables callbacks; the flag that forbids it must be set just before."""

    class SilentHighs(highspy.Highs):  # type: ignore[misc, name-defined]
        def enableCallbacks(self) -> None:  # noqa: N802  (highspy's name)
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    return SilentHighs()


def _highspy() -> ModuleType:
    try:
        import highspy
    except ImportError as exc:
        raise MilpUnavailableError("highspy is not installed: pip install highspy") from exc
    return highspy
