"""``slurm-ext simulate``: replay a recorded workload through the policies, without a cluster.

stdout carries the table, stderr the rows that were left out and the progress. Nothing is written
but what ``--json`` and ``--plots`` name.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from slurm_ext.cli.compare import compare
from slurm_ext.cli.tabular import Column, letters_help, parse_format, render
from slurm_ext.domain.errors import DataError
from slurm_ext.domain.policy import Policy
from slurm_ext.sim import curves, gantt
from slurm_ext.sim.build import Built, Terms, build, truths_for
from slurm_ext.sim.costs import Costs, read_costs
from slurm_ext.sim.engine import replay
from slurm_ext.sim.hardware import Hardware, parse_cluster
from slurm_ext.sim.jobs import AUTO_COUNTS
from slurm_ext.sim.library import COSTS, THROUGHPUT, find_workload
from slurm_ext.sim.merging import Merging
from slurm_ext.sim.model import Schedule
from slurm_ext.sim.outages import read_outages
from slurm_ext.sim.policies import POLICIES, policy_named
from slurm_ext.sim.summary import Summary, job_rows, summarise
from slurm_ext.sim.trace import FORMATS, read_trace

FORMAT = "%16P %.8a %.8m %.8q %.8n %.8w %.8W %.9M %.6u %.9S %.6s %.6b %.6h %.9L"
DEFAULT_POLICIES = "fifo,backfill,srtf,titan"
# More lines than this about rows that were left out are counted, not printed.
TOLD = 10
# A Gantt chart of more jobs than this is a grey block.
GANTT_JOBS = 2000
# A bar for a replay that is over at once only flickers.
_BAR_AFTER_S = 1.0
_BAR_EVERY_S = 0.2
_BAR_WIDTH = 30


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    found: Summary


def _hours(pick: Callable[[Summary], float]) -> Callable[[_Row], str]:
    return lambda row: f"{pick(row.found) / 3600:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


LETTERS: dict[str, Column[_Row]] = {
    "P": Column("POLICY", lambda r: r.name, "policy"),
    "a": Column("AVG_JCT", _hours(lambda s: s.avg_jct_s), "average job completion time, hours"),
    "m": Column("MEDIAN", _hours(lambda s: s.median_jct_s), "median of it, hours"),
    "q": Column("P95", _hours(lambda s: s.p95_jct_s), "95th percentile, hours"),
    "n": Column("P99", _hours(lambda s: s.p99_jct_s), "99th percentile, hours"),
    "w": Column("AVG_WAIT", _hours(lambda s: s.avg_wait_s), "average time without GPUs, hours"),
    "W": Column("P99_WAIT", _hours(lambda s: s.p99_wait_s), "99th percentile of it, hours"),
    "M": Column("MAKESPAN", _hours(lambda s: s.makespan_s), "first submission to last end, hours"),
    "u": Column("UTIL", lambda r: _percent(r.found.gpu_utilisation), "GPU time in use"),
    "S": Column(
        "SLOWDOWN", lambda r: f"{r.found.worst_slowdown:.1f}", "worst JCT over run without queue"
    ),
    "s": Column("STARTS", lambda r: f"{r.found.starts_per_job:.2f}", "starts per job"),
    "b": Column(
        "BETTER",
        lambda r: _percent(r.found.share_better_than_srtf),
        "jobs at least 10 percent faster than under srtf",
    ),
    "h": Column(
        "WORSE",
        lambda r: _percent(r.found.share_worse_than_srtf),
        "jobs at least 10 percent slower than under srtf",
    ),
    "L": Column(
        "LOST_GPUH",
        lambda r: f"{r.found.gpu_s_lost / 3600:.1f}",
        "GPU hours of starts, switches and lost steps",
    ),
    "Q": Column("QUEUE", lambda r: _percent(r.found.queue_share_of_jct), "waits over JCTs"),
    "j": Column("JOBS", lambda r: str(r.found.jobs), "jobs"),
    "d": Column("DECIDED", lambda r: str(r.found.decisions), "times the policy was asked"),
}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    names = "\n".join(f"  {name:16} {words}" for name, (_, words) in POLICIES.items())
    parser = subparsers.add_parser(
        "simulate",
        help="replay a recorded workload through the policies",
        description="Replay a recorded workload through the policies, without a cluster.",
        epilog=f"Policies:\n{names}\n\nFields of --columns:\n{letters_help(LETTERS)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_input(parser)
    _add_terms(parser)
    _add_output(parser)
    parser.set_defaults(run=lambda args: _run(args, parser))
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    beside = actions.add_parser(
        "compare",
        help="show two runs side by side",
        description="Show two runs that --json has written side by side.",
    )
    beside.add_argument("first", type=Path, metavar="A.json", help="the run to compare with")
    beside.add_argument("second", type=Path, metavar="B.json", help="the run that is compared")
    beside.set_defaults(run=lambda args: compare(args.first, args.second))


def _add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", metavar="FILE", help="the workload: a file, or the name of one that comes along"
    )
    parser.add_argument(
        "--format", choices=FORMATS, default="auto", help="format of the workload (default: auto)"
    )
    parser.add_argument("--strict", action="store_true", help="refuse a workload with a bad row")
    parser.add_argument("--limit", type=_whole, metavar="N", help="replay the first N jobs only")
    parser.add_argument(
        "--table",
        type=Path,
        default=THROUGHPUT,
        metavar="FILE",
        help="measured throughputs, CSV, may be gzipped (default: the table that comes along)",
    )
    parser.add_argument(
        "--costs",
        type=Path,
        default=COSTS,
        metavar="FILE",
        help="what starts, stops and switches cost, CSV (default: the costs that come along)",
    )
    parser.add_argument(
        "--outages", type=Path, metavar="FILE", help="node outages, CSV: node,down_s,up_s"
    )


def _add_terms(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster",
        default="8x4xV100",
        metavar="NODESxGPUS[xTYPE][,...]",
        help="the machine, groups of nodes joined by commas (default: 8x4xV100)",
    )
    parser.add_argument("--pooled", action="store_true", help="ignore node borders: any free GPUs")
    parser.add_argument(
        "--policy",
        default=DEFAULT_POLICIES,
        metavar="NAME,...",
        help=f"policies to replay (default: {DEFAULT_POLICIES})",
    )
    parser.add_argument(
        "--interval",
        action="append",
        default=[],
        metavar="[POLICY=]SECONDS,...",
        help="time between decisions, of one policy or of all; 0 = on events (default: 0)",
    )
    parser.add_argument(
        "--estimate-error",
        type=float,
        default=0.0,
        metavar="PCT",
        help="how far estimates are off at most, in percent (default: 0)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="draws the errors (0)")
    parser.add_argument(
        "--density",
        type=float,
        default=1.0,
        metavar="X",
        help="let jobs arrive X times as fast (default: 1)",
    )
    parser.add_argument(
        "--counts",
        type=_counts,
        default=AUTO_COUNTS,
        metavar="N,...",
        help="GPU counts offered beside the requested one (default: 1,2,4,8,12,16)",
    )
    parser.add_argument(
        "--merge",
        type=_merging,
        metavar="SAVED[,FAILED]",
        help="offer pairs of waiting jobs of one model as one run that spares the share SAVED of"
        " the smaller job's work; in a share FAILED of them the second job is not done then"
        " (default: nothing is merged)",
    )
    parser.add_argument(
        "--no-merge", action="store_true", help="merge no jobs, also where --merge says so"
    )
    parser.add_argument(
        "--no-switch", action="store_true", help="no pipeline switches, also where --costs has them"
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write numbers and jobs here")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw curves and a Gantt chart")
    parser.add_argument(
        "-o",
        "--columns",
        default=FORMAT,
        metavar="FORMAT",
        help="fields of the table, as for squeue",
    )
    parser.add_argument("--noheader", action="store_true", help="no heading")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress, no notes")


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if args.trace is None:
        parser.error("--trace is needed")
    pieces = parse_format(args.columns, LETTERS)
    policies = _policies(args.policy)
    intervals = _intervals(args.interval, policies)
    hardware = parse_cluster(args.cluster, pooled=args.pooled)
    costs = read_costs(args.costs)
    if args.no_switch:
        costs = costs.without_switch()
    nodes = {node.name for node in hardware.inventory()}
    outages = read_outages(args.outages, nodes) if args.outages else ()
    built = _jobs(args, hardware, costs)
    merging = None
    if args.merge and not args.no_merge:
        merging = replace(args.merge, seed=args.seed)
    schedules: dict[str, Schedule] = {}
    for name, policy in policies.items():
        bar = Bar(name, sys.stderr) if not args.quiet and sys.stderr.isatty() else None
        schedules[name] = replay(
            built.jobs, hardware, policy, costs, intervals[name], outages, bar, merging=merging
        )
        if bar is not None:
            bar.close()
    rows = [_Row(name, summarise(s, schedules.get("srtf"))) for name, s in schedules.items()]
    for line in render(rows, pieces, LETTERS, not args.noheader):
        print(line)
    if args.json is not None:
        _write(args.json, json.dumps(as_document(rows, schedules)) + "\n")
    if args.plots is not None:
        _draw(args.plots, schedules, hardware, args.quiet)
    return 0


def as_document(rows: Iterable[_Row], schedules: Mapping[str, Schedule]) -> dict[str, object]:
    """What ``--json`` writes."""
    return {
        "policies": {row.name: row.found.as_dict() for row in rows},
        "jobs": {name: job_rows(schedule.runs) for name, schedule in schedules.items()},
    }


class Bar:
    """A progress bar on a terminal, once a replay takes longer than a moment."""

    def __init__(
        self, label: str, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._label = label
        self._stream = stream
        self._clock = clock
        self._begun = clock()
        self._next = self._begun + _BAR_AFTER_S
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if now < self._next:
            return
        self._next = now + _BAR_EVERY_S
        self._shown = True
        filled = _BAR_WIDTH * done // total
        left = (now - self._begun) / done * (total - done)
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        self._stream.write(f"\r{self._label:16} [{bar}] {done}/{total} jobs, {left:.0f} s left  ")
        self._stream.flush()

    def close(self) -> None:
        """Leave an empty line behind."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _jobs(args: argparse.Namespace, hardware: Hardware, costs: Costs) -> Built:
    file, mark, selection = args.trace.partition("#")
    found = (
        args.trace
        if Path(args.trace).exists() or file == "-"
        else (f"{find_workload(file)}{mark}{selection}")
    )
    trace = read_trace(found, args.format, args.strict, args.limit)
    terms = Terms(
        counts=args.counts,
        density=args.density,
        estimate_error=args.estimate_error / 100,
        seed=args.seed,
    )
    built = build(trace.jobs, hardware, truths_for(args.table, hardware, costs), costs, terms)
    if not args.quiet:
        _tell(trace.skipped)
        _tell(trace.notes)
        _tell(built.left_out)
    if built.left_out and args.strict:
        raise DataError(args.trace, built.left_out[0], "leave --strict out to go on without it")
    if not built.jobs:
        reason = built.left_out[0] if built.left_out else "it has no usable row"
        raise DataError(args.trace, f"no job to replay: {reason}", "see --table and --cluster")
    return built


def _tell(lines: Sequence[str]) -> None:
    for line in lines[:TOLD]:
        print(f"slurm-ext: {line}", file=sys.stderr)
    if len(lines) > TOLD:
        print(f"slurm-ext: and {len(lines) - TOLD} more like these", file=sys.stderr)


def _policies(text: str) -> dict[str, Policy]:
    names = [name.strip() for name in text.split(",")]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"--policy {text}", f"{twice} is there twice", "name each policy once")
    return {name: policy_named(name) for name in names}


def _intervals(words: Iterable[str], policies: Mapping[str, Policy]) -> dict[str, float]:
    """Policy -> seconds; a number without a policy holds for all that are not named."""
    everyone, own = 0.0, dict[str, float]()
    for word in ",".join(words).split(","):
        if not word.strip():
            continue
        name, equals, number = word.rpartition("=")
        try:
            seconds = float(number)
        except ValueError:
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds >= 0):
            raise DataError(
                f"--interval {word}", f"{number!r} is not 0 or more seconds", "write titan=120"
            )
        if not equals:
            everyone = seconds
        elif name.strip() in policies:
            own[name.strip()] = seconds
        else:
            raise DataError(
                f"--interval {word}",
                f"{name!r} is not replayed",
                f"name one of {', '.join(policies)}",
            )
    return {name: own.get(name, everyone) for name in policies}


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise DataError(str(path), f"cannot be written: {exc.strerror}", "name another") from exc


def _draw(folder: Path, schedules: Mapping[str, Schedule], hardware: Hardware, quiet: bool) -> None:
    runs = {name: schedule.runs for name, schedule in schedules.items()}
    try:
        curves.draw_jct(runs, folder / "jct.png")
        curves.draw_utilisation(runs, hardware.gpus, folder / "utilisation.png")
        few = {name: found for name, found in runs.items() if len(found) <= GANTT_JOBS}
        if few:
            nodes = {node.name: node.gpus for node in hardware.inventory()}
            gantt.draw(few, nodes, folder / "gantt.png")
    except OSError as exc:
        raise DataError(str(folder), f"cannot be written: {exc.strerror}", "name another") from exc
    if len(few) < len(runs) and not quiet:
        _tell([f"no Gantt chart of more than {GANTT_JOBS} runs"])


def _merging(text: str) -> Merging:
    saved, _, failed = text.partition(",")
    try:
        return Merging(float(saved), float(failed or 0))
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text} is not SAVED or SAVED,FAILED") from exc
    except DataError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_whole(word) for word in text.split(",")}))
