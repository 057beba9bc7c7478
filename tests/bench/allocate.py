"""Benchmark of the allocation: the exact knapsack against HiGHS (presolve on, off) and CBC.

    python -m tests.bench.allocate [--quick] [--sizes 320x64,...] [--seeds N] [--limit S] [--json F]

Every solver gets the same problem on one thread.  Times are CPU seconds, so that other work on the
machine does not count; the limit is wall-clock.  For the general solvers only the solve counts:
building the model, writing CBC's file and reading it back are shown apart.  For ours the whole call
counts, from the Python objects to the answer.  All objectives are
compared, ours also with the unpruned recurrence and the LP bound.  Exit code 1 when a target is
missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_ext.optimize.lp import lp_bound
from slurm_ext.optimize.milp import load, read
from slurm_ext.optimize.objective import Choice, Demand, build
from slurm_ext.optimize.problem import Problem, gpus_used, value_of
from slurm_ext.optimize.recurrence import solve_unpruned
from slurm_ext.optimize.solve import allocate

SIZES = ((20, 64), (80, 64), (320, 64), (320, 512), (2000, 512), (10_000, 4096))
QUICK_SIZES = SIZES[:3]
SEEDS, LARGE_SEEDS, QUICK_SEEDS = 20, 3, 3
LARGE_JOBS = 2000  # from here on LARGE_SEEDS
LIMIT_S = 60.0
REPEATS, REPEAT_UNTIL_S = 5, 0.2

TARGET_SIZE = (320, 64)
TARGET_RATIO = 15.0

# Solvers may stop at an answer within their tolerances (HiGHS: 1e-6 absolute on an objective whose
# largest coefficient is scaled to 1e4); two implementations of the exact sum differ by rounding.
SAME_OBJECTIVE = 1e-7
SAME_EXACT = 1e-10

OURS, GENERAL = "knapsack", ("highs", "highs-nopresolve", "cbc")


@dataclass(frozen=True, slots=True)
class Run:
    """One solve.  ``solve_s`` is what the comparison uses, ``build_s`` everything around it."""

    solver: str
    jobs: int
    gpus: int
    seed: int
    finished: bool
    value: float
    solve_s: float
    build_s: float


def make_problem(jobs: int, gpus: int, seed: int) -> Problem:
    """Jobs with throughput curves that rise ever more slowly, 5 min to 10 h of work on one GPU.

    Efficiency falls with communication inside a node and drops once more across nodes of 4; counts
    are 1, 2, 4, 8, ... up to the job's own cap.  Curves carry a few per cent of measuring noise, so
    they are concave only roughly, as real tables are.
    """
    draw = random.Random(f"{jobs}x{gpus}/{seed}")
    demands = []
    for number in range(jobs):
        alone_s = math.exp(draw.uniform(math.log(300.0), math.log(36_000.0)))
        inside, across = draw.uniform(0.01, 0.10), draw.uniform(0.01, 0.15)
        cap = min(gpus, 2 ** draw.randrange(2, 8))
        choices = []
        count = 1
        while count <= cap:
            inside_cost = inside * (min(count, 4) - 1)
            across_cost = across * math.log2(max(count / 4, 1.0))
            speedup = count / (1.0 + inside_cost + across_cost) * draw.uniform(0.97, 1.03)
            choices.append(Choice(count, alone_s / speedup, tag=count))
            count *= 2
        demands.append(Demand(f"{number}", tuple(choices), waited_s=draw.uniform(0.0, 7200.0)))
    return build(demands, gpus).problem


def run_ours(problem: Problem, limit_s: float) -> tuple[bool, float, float, float]:
    begin = time.process_time()
    solution = allocate(problem, limit_s)
    took = time.process_time() - begin
    if gpus_used(problem.items, solution.chosen) > problem.capacity:
        raise AssertionError("the knapsack's answer exceeds the capacity")
    return solution.optimal, solution.value, took, 0.0


def run_highs(presolve: bool) -> Callable[[Problem, float], tuple[bool, float, float, float]]:
    def solve(problem: Problem, limit_s: float) -> tuple[bool, float, float, float]:
        begin = time.process_time()
        model = load(problem, limit_s, presolve=presolve)
        ready = time.process_time()
        model.highs.run()
        ended = time.process_time()
        solution = read(model, begin)
        build_s = ready - begin + time.process_time() - ended
        return solution.optimal, solution.value, ended - ready, build_s

    return solve


def cbc_path() -> str:
    """The CBC that PuLP brings along, or the system's."""
    import pulp

    system = {"Linux": "linux", "Darwin": "osx"}.get(platform.system(), "none")
    machine = {"x86_64": "i64", "aarch64": "arm64", "arm64": "arm64"}.get(
        platform.machine(), "none"
    )
    bundled = Path(pulp.__file__).parent / "solverdir" / "cbc" / system / machine / "cbc"
    if os.access(bundled, os.X_OK):
        return str(bundled)
    if found := shutil.which("cbc"):
        return found
    raise RuntimeError("no CBC: pip install pulp, or install coinor-cbc")


def run_cbc(problem: Problem, limit_s: float) -> tuple[bool, float, float, float]:
    """CBC on the very model that HiGHS gets, through an MPS file."""
    begin = time.perf_counter()
    model = load(problem)
    with tempfile.TemporaryDirectory() as folder:
        mps, answer = Path(folder) / "model.mps", Path(folder) / "answer.txt"
        model.highs.writeModel(str(mps))
        argv = [cbc_path(), str(mps), "-max", "-threads", "1", "-sec", str(limit_s)]
        argv += ["-timeMode", "elapsed", "-ratio", "0", "-allow", "0"]
        argv += ["-solve", "-solution", str(answer)]
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=limit_s * 2 + 60, check=True
        )
        # Stopped while preprocessing CBC writes no answer.
        lines = answer.read_text().splitlines() if answer.exists() else ["No answer"]
    solve_s = _cbc_seconds(done.stdout)
    chosen: dict[str, int] = {}
    for line in lines[1:]:
        name, amount = line.removeprefix("**").split()[1:3]
        if float(amount) > 0.5:
            item, option = model.columns[int(name.removeprefix("c"))]
            chosen[problem.items[item].key] = option
    feasible = gpus_used(problem.items, chosen) <= problem.capacity
    value = value_of(problem.items, chosen) if feasible else 0.0
    finished = feasible and lines[0].startswith("Optimal")
    return finished, value, solve_s, time.perf_counter() - begin - solve_s


def _cbc_seconds(log: str) -> float:
    """CBC's own time, printed with two decimals.  "Total time" includes reading the file, the line
    before it does not, but is missing where CBC was stopped early."""
    for pattern in (r"^Time \(CPU seconds\):\s+", r"^Total time \(CPU seconds\):\s+"):
        if match := re.search(pattern + r"([0-9.]+)", log, re.MULTILINE):
            return float(match[1])
    raise RuntimeError(f"CBC names no time:\n{log[-2000:]}")


SOLVERS: dict[str, Callable[[Problem, float], tuple[bool, float, float, float]]] = {
    OURS: run_ours,
    "highs": run_highs(presolve=True),
    "highs-nopresolve": run_highs(presolve=False),
    "cbc": run_cbc,
}


@dataclass(slots=True)
class Size:
    """All runs of one size and what they show."""

    jobs: int
    gpus: int
    runs: list[Run]
    failures: list[str]
    lp_gap: float = 0.0
    recurrence_s: float = 0.0
    worst_difference: float = 0.0

    def times(self, solver: str) -> list[float]:
        return [run.solve_s for run in self.runs if run.solver == solver]

    def finished(self, solver: str) -> int:
        return sum(run.finished for run in self.runs if run.solver == solver)

    def total_ratio(self) -> float:
        """Time of the fastest general solver of every seed, summed, against ours, summed."""
        ours = sum(self.times(OURS))
        others: dict[int, list[float]] = {}
        for run in self.runs:
            if run.solver != OURS:
                others.setdefault(run.seed, []).append(run.solve_s)
        return sum(min(times) for times in others.values()) / ours

    def ratios(self) -> tuple[list[float], bool]:
        """Per seed: best general solver / ours, and whether one or more are lower bounds because
        no general solver finished."""
        ratios: list[float] = []
        open_ended = False
        for seed in sorted({run.seed for run in self.runs}):
            ours = next(r.solve_s for r in self.runs if r.seed == seed and r.solver == OURS)
            others = [r for r in self.runs if r.seed == seed and r.solver != OURS]
            done = [r.solve_s for r in others if r.finished]
            open_ended |= not done
            ratios.append(min(done or [r.solve_s for r in others]) / ours)
        return ratios, open_ended


def timed(solver: str, problem: Problem, limit_s: float) -> tuple[bool, float, float, float]:
    """One result; a short solve is repeated and its median time counts, for every solver alike:
    a single call of a millisecond measures cold caches too."""
    done, value, solve_s, build_s = SOLVERS[solver](problem, limit_s)
    times = [solve_s]
    while done and len(times) < REPEATS and sum(times) < REPEAT_UNTIL_S:
        again, other, solve_s, _ = SOLVERS[solver](problem, limit_s)
        if not again or other != value:
            raise AssertionError(f"{solver} gave {value!r}, then {other!r} on the same problem")
        times.append(solve_s)
    return done, value, statistics.median(times), build_s


def measure(jobs: int, gpus: int, seeds: int, limit_s: float) -> Size:
    size = Size(jobs, gpus, [], [])
    for seed in range(seeds):
        problem = make_problem(jobs, gpus, seed)
        where = f"{jobs}x{gpus} seed {seed}"
        values: dict[str, float] = {}
        for solver in SOLVERS:
            done, value, solve_s, build_s = timed(solver, problem, limit_s)
            size.runs.append(Run(solver, jobs, gpus, seed, done, value, solve_s, build_s))
            if done:
                values[solver] = value
            print(f"  {where} {solver}: {_milliseconds(solve_s)}{'' if done else ' (limit)'}",
                  file=sys.stderr, flush=True)  # fmt: skip
        if OURS not in values:
            size.failures.append(f"{where}: ours was not solved exactly")
            continue
        ours = values.pop(OURS)
        for solver, value in values.items():
            difference = abs(value - ours) / ours
            size.worst_difference = max(size.worst_difference, difference)
            if difference > SAME_OBJECTIVE:
                size.failures.append(f"{where}: {solver} says {value!r}, ours {ours!r}")
        begin = time.process_time()
        plain = solve_unpruned(problem)
        size.recurrence_s = max(size.recurrence_s, time.process_time() - begin)
        if abs(plain.value - ours) > SAME_EXACT * ours:
            size.failures.append(f"{where}: the recurrence says {plain.value!r}, ours {ours!r}")
        bound = lp_bound(problem)
        size.lp_gap = max(size.lp_gap, (bound - ours) / bound)
        if ours > bound:
            size.failures.append(f"{where}: ours {ours!r} is above the LP bound {bound!r}")
    if (jobs, gpus) == TARGET_SIZE:
        ratio = statistics.median(size.ratios()[0])
        if ratio < TARGET_RATIO:
            size.failures.append(
                f"{jobs}x{gpus}: {ratio:.1f} times faster than the best general solver, "
                f"target {TARGET_RATIO:g}"
            )
    return size


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1.0 else f"{seconds:.2f} s"


def _cell(size: Size, solver: str) -> str:
    times, finished = size.times(solver), size.finished(solver)
    text = _milliseconds(statistics.median(times))
    if finished == len(times):
        return text
    return f"{text} ({len(times) - finished}/{len(times)} stopped by the limit)"


def _builds(size: Size) -> str:
    return ", ".join(
        solver
        + " "
        + _milliseconds(statistics.median(r.build_s for r in size.runs if r.solver == solver))
        for solver in GENERAL
    )


def report(sizes: Sequence[Size], limit_s: float) -> str:
    head = ["jobs x GPUs", "seeds", "ours", *GENERAL, "best/ours median (min, total)",
            "max rel. diff", "LP gap", "recurrence"]  # fmt: skip
    rows = [head]
    for size in sizes:
        ratios, open_ended = size.ratios()
        sign = ">= " if open_ended else ""
        ratio = f"{sign}{statistics.median(ratios):.1f}"
        rows.append(
            [
                f"{size.jobs} x {size.gpus}",
                str(len(ratios)),
                _cell(size, OURS),
                *(_cell(size, solver) for solver in GENERAL),
                f"{ratio} ({min(ratios):.1f}, {size.total_ratio():.1f})",
                f"{size.worst_difference:.1e}",
                f"{size.lp_gap:.1e}",
                _milliseconds(size.recurrence_s),
            ]
        )
    widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
             for row in rows]  # fmt: skip
    lines.insert(1, "  ".join("-" * width for width in widths))
    builds = "; ".join(f"{size.jobs} x {size.gpus}: {_builds(size)}" for size in sizes)
    lines += [
        "",
        f"Median CPU times, one thread, limit {limit_s:g} s wall-clock per solve. Ours: the whole "
        "call on Python objects.",
        "Others: the solve alone (CBC reports it in steps of 10 ms). Short solves: median of "
        f"up to {REPEATS} runs, for all alike.",
        "LP gap and recurrence: the largest over seeds.",
        "best/ours: per seed against the fastest of the three; total = times summed over seeds. "
        "A ratio with >= counts solvers",
        "stopped by the limit.",
        f"Not counted for the others (model building, files), median: {builds}",
    ]
    return "\n".join(lines)


def to_json(sizes: Sequence[Size], limit_s: float) -> dict[str, object]:
    return {
        "machine": {"processor": platform.processor() or platform.machine(),
                    "python": platform.python_version()},
        "limit_s": limit_s,
        "sizes": [
            {
                "jobs": size.jobs,
                "gpus": size.gpus,
                "ratio_median": statistics.median(size.ratios()[0]),
                "ratio_min": min(size.ratios()[0]),
                "ratio_total": size.total_ratio(),
                "ratio_is_lower_bound": size.ratios()[1],
                "max_relative_difference": size.worst_difference,
                "lp_gap": size.lp_gap,
                "recurrence_s": size.recurrence_s,
                "runs": [asdict(run) for run in size.runs],
            }
            for size in sizes
        ],
        "failures": [failure for size in sizes for failure in size.failures],
    }  # fmt: skip


def _sizes(text: str) -> tuple[tuple[int, int], ...]:
    try:
        pairs = [part.split("x") for part in text.split(",")]
        return tuple((int(jobs), int(gpus)) for jobs, gpus in pairs)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 320x64,2000x512") from exc


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.allocate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, few seeds")
    parser.add_argument("--sizes", type=_sizes, help="e.g. 320x64,2000x512 (jobs x GPUs)")
    parser.add_argument("--seeds", type=int, help="seeds per size")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds per solve")
    parser.add_argument("--json", type=Path, help="write all runs to this file")
    args = parser.parse_args(argv)

    for solve in SOLVERS.values():  # imports and first calls are not what is measured
        solve(make_problem(3, 8, 0), args.limit)
    sizes = []
    for jobs, gpus in args.sizes or (QUICK_SIZES if args.quick else SIZES):
        usual = QUICK_SEEDS if args.quick else LARGE_SEEDS if jobs >= LARGE_JOBS else SEEDS
        sizes.append(measure(jobs, gpus, args.seeds or usual, args.limit))
    print(report(sizes, args.limit))
    if args.json:
        args.json.write_text(json.dumps(to_json(sizes, args.limit), indent=1) + "\n")
    failures = [failure for size in sizes for failure in size.failures]
    for failure in failures:
        print(f"MISSED {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
