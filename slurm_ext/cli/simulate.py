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
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from slurm_ext.cli import plots
from slurm_ext.cli.compare import compare
from slurm_ext.cli.outcomes import FORMAT, LETTERS, Row, as_document, table
from slurm_ext.cli.sacctopts import add_sacct_options, sacct_options
from slurm_ext.cli.tabular import letters_help, parse_format
from slurm_ext.domain.errors import DataError
from slurm_ext.domain.policy import Policy
from slurm_ext.sim.build import Built, Terms, build, truths_for
from slurm_ext.sim.costs import Costs, read_costs
from slurm_ext.sim.engine import replay
from slurm_ext.sim.hardware import Hardware, parse_cluster
from slurm_ext.sim.jobs import AUTO_COUNTS, LIMIT_FACTOR
from slurm_ext.sim.library import COSTS, THROUGHPUT, find_workload, workload_names
from slurm_ext.sim.merging import Merging
from slurm_ext.sim.model import Schedule, SimulationError
from slurm_ext.sim.outages import Outage, read_outages
from slurm_ext.sim.policies import POLICIES, policy_named
from slurm_ext.sim.setting import setting_of
from slurm_ext.sim.summary import summarise
from slurm_ext.sim.trace import FORMATS, Trace, read_trace
from slurm_ext.sim.truth import Curves, read_types

DEFAULT_POLICIES = "fifo,backfill,srtf,titan"
# More lines than this about rows that were left out are counted, not printed.
TOLD = 10
# A longer interval is a slip; and beyond it seconds get lost in the rounding of the clock.
_MOST_INTERVAL_S = 1e9
# Below a second, a month of waiting jobs is millions of decisions that nothing has called for.
_LEAST_INTERVAL_S = 1.0
# A bar for a replay that is over at once only flickers.
_BAR_AFTER_S = 1.0
_BAR_EVERY_S = 0.2
_BAR_WIDTH = 30


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    names = "\n".join(f"  {name:16} {words}" for name, (_, words) in POLICIES.items())
    parser = subparsers.add_parser(
        "simulate",
        help="replay a recorded workload through the policies",
        description="Replay a recorded workload through the policies, without a cluster.",
        epilog=f"Policies:\n{names}\n\nWorkloads that come along:\n  {_workloads()}\n\n"
        f"Fields of --columns:\n{letters_help(LETTERS)}\nDefault: {FORMAT}",
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
        help="measured throughputs, CSV as slurm-ext table export writes it, may be gzipped"
        " (default: the table that comes along)",
    )
    parser.add_argument(
        "--costs",
        type=Path,
        default=COSTS,
        metavar="FILE",
        help="what starts, stops and switches cost, CSV: kind,model,gpu_type,seconds"
        " (default: the costs that come along)",
    )
    parser.add_argument(
        "--outages",
        type=Path,
        metavar="FILE",
        help="node outages, CSV: node,down_s,up_s; without up_s the node never comes back",
    )
    add_sacct_options(parser)


def _add_terms(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster",
        default="8x4xV100",
        metavar="NODESxGPUS[xTYPE][,...]",
        help="the machine, groups of nodes joined by commas; without TYPE the first one of --table"
        " is meant (default: 8x4xV100)",
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
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write numbers and jobs here; - instead of the table",
    )
    parser.add_argument(
        "--plots",
        type=Path,
        metavar="DIR",
        help="draw jct, utilisation and gantt into this directory; needs matplotlib",
    )
    parser.add_argument(
        "--plot-format",
        choices=plots.FORMATS,
        default="png",
        help="format of the pictures (default: png)",
    )
    parser.add_argument(
        "-o",
        "--columns",
        default=FORMAT,
        metavar="FORMAT",
        help="fields of the table, as for squeue",
    )
    parser.add_argument("--noheader", action="store_true", help="no heading")
    parser.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="no progress and no notes; that jobs are left out is said all the same",
    )


def _workloads() -> str:
    names = workload_names()
    half = -(-len(names) // 2)
    return ", ".join(names[:half]) + ",\n  " + ", ".join(names[half:])


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if args.trace is None:
        parser.error("--trace is needed")
    parse_format(args.columns, LETTERS)
    policies = _policies(args.policy)
    intervals = _intervals(args.interval, policies)
    hardware = parse_cluster(args.cluster, pooled=args.pooled)
    to_stdout = args.json == Path("-")
    if args.json is not None and not to_stdout:
        plots.check_file(args.json)
    if args.plots is not None:
        plots.check_plots(args.plots)
    costs = read_costs(args.costs)
    if args.no_switch:
        costs = costs.without_switch()
    nodes = {node.name for node in hardware.inventory()}
    outages = read_outages(args.outages, nodes) if args.outages else ()
    tables = read_types(args.table, hardware.gpu_types)
    untyped = not all(hardware.gpu_types)
    if untyped:
        hardware = hardware.of_type(next(iter(tables)))
    trace, terms = _trace(args), _terms(args)
    built = _jobs(args, trace, hardware, tables, costs, terms)
    merging = None
    if args.merge and not args.no_merge:
        merging = replace(args.merge, seed=args.seed)
    setting = setting_of(
        args.trace,
        hardware,
        built,
        terms,
        intervals,
        merging,
        len(trace.skipped),
        pipeline_switch=costs.pipeline_switch_s is not None,
        files=(args.table, args.costs, args.outages),
    )
    if not args.quiet:
        _tell(trace.skipped)
        _tell(trace.notes)
        if untyped:
            _tell([f"--cluster {args.cluster} names no GPU type: taken for {hardware.text}"])
        if built.no_limit and "backfill" in policies:
            _tell([_limits(built)])
    _tell_left_out(built)
    schedules, failed = _replay(args, built, hardware, policies, costs, intervals, outages, merging)
    rows = [Row(name, summarise(s, schedules.get("srtf"))) for name, s in schedules.items()]
    if rows and not to_stdout:
        for line in table(rows, args.columns, setting, heading=not args.noheader):
            print(line)
    if args.json is not None and rows:
        types = {node.name: node.gpu_type for node in hardware.inventory()}
        document = as_document(rows, schedules, setting, types)
        text = json.dumps(document) + "\n"
        if to_stdout:
            sys.stdout.write(text)
        else:
            _write(args.json, text)
    if args.plots is not None and rows:
        missing = plots.draw(args.plots, args.plot_format, schedules, hardware, setting.title)
        if not args.quiet:
            _tell(missing)
    if failed:
        raise SimulationError("; ".join(failed))
    return 0


def _replay(
    args: argparse.Namespace,
    built: Built,
    hardware: Hardware,
    policies: Mapping[str, Policy],
    costs: Costs,
    intervals: Mapping[str, float],
    outages: Sequence[Outage],
    merging: Merging | None,
) -> tuple[dict[str, Schedule], list[str]]:
    """The schedule of each policy, and what kept a policy from its end: the others are worth
    having all the same."""
    schedules: dict[str, Schedule] = {}
    failed: list[str] = []
    for name, policy in policies.items():
        bar = Bar(name, sys.stderr) if not args.quiet and sys.stderr.isatty() else None
        try:
            schedules[name] = replay(
                built.jobs, hardware, policy, costs, intervals[name], outages, bar, merging=merging
            )
        except SimulationError as exc:
            failed.append(str(exc))
        finally:
            if bar is not None:
                bar.close()
    return schedules, failed


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


def _trace(args: argparse.Namespace) -> Trace:
    file, mark, selection = args.trace.partition("#")
    found = (
        args.trace
        if Path(args.trace).exists() or file == "-"
        else (f"{find_workload(file)}{mark}{selection}")
    )
    sacct = sacct_options(args)
    return read_trace(
        found,
        args.format,
        args.strict,
        args.limit,
        columns=sacct.columns,
        delimiter=sacct.delimiter,
        model_pattern=sacct.model_pattern,
    )


def _terms(args: argparse.Namespace) -> Terms:
    return Terms(
        counts=args.counts,
        density=args.density,
        estimate_error=args.estimate_error / 100,
        seed=args.seed,
    )


def _jobs(
    args: argparse.Namespace,
    trace: Trace,
    hardware: Hardware,
    tables: Mapping[str, Curves],
    costs: Costs,
    terms: Terms,
) -> Built:
    built = build(trace.jobs, hardware, truths_for(tables, hardware, costs), costs, terms)
    if built.left_out and args.strict:
        raise DataError(args.trace, built.left_out[0], "leave --strict out to go on without it")
    if not built.jobs:
        _tell_left_out(built)
        reason = built.reasons[0][0] if built.reasons else "it has no usable row"
        raise DataError(args.trace, f"no job to replay: {reason}", "see --table and --cluster")
    return built


def _tell_left_out(built: Built) -> None:
    """Also where notes are not wanted: numbers without these jobs look better than they are."""
    if not built.left_out:
        return
    jobs = len(built.jobs) + len(built.left_out)
    lines = [f"{len(built.left_out)} of {jobs} jobs are left out"]
    firsts: dict[str, str] = {}
    for line in built.left_out:
        job, _, reason = line.partition(" is left out: ")
        firsts.setdefault(reason, job)
    lines += [f"  {count}: {why} ({firsts[why]} first)" for why, count in built.reasons]
    _tell(lines)


def _limits(built: Built) -> str:
    return (
        f"{built.no_limit} of {len(built.jobs)} jobs have no time limit in the workload: backfill"
        f" is told {LIMIT_FACTOR:g} times their true run time, whatever --estimate-error says"
    )


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
        if seconds != 0 and not _LEAST_INTERVAL_S <= seconds <= _MOST_INTERVAL_S:  # nor NaN
            raise DataError(
                f"--interval {word}",
                f"{number!r} is neither 0 nor {_LEAST_INTERVAL_S:g} to {_MOST_INTERVAL_S:g} s",
                "write titan=120, or 0 to decide when something happens",
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


def _merging(text: str) -> Merging:
    saved, _, failed = text.partition(",")
    try:
        return Merging(float(saved), float(failed or 0))
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text} is not SAVED or SAVED,FAILED") from exc
    except DataError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return value


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_whole(word) for word in text.split(",")}))
