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
from slurm_ext.cli.outcomes import FORMAT, LETTERS, Row, as_document
from slurm_ext.cli.outcomes import table as outcomes
from slurm_ext.cli.sacctopts import add_sacct_options, sacct_options
from slurm_ext.cli.simulate_notes import by_age, limits, remedies, tell, tell_left_out
from slurm_ext.cli.tabular import letters_help, parse_format
from slurm_ext.domain.duration import FORMS, parse_duration
from slurm_ext.domain.errors import DataError
from slurm_ext.domain.policy import Policy
from slurm_ext.sim.build import Built, Terms, build, truths_for
from slurm_ext.sim.costs import Costs, read_costs
from slurm_ext.sim.engine import replay
from slurm_ext.sim.hardware import Hardware, parse_cluster
from slurm_ext.sim.jobs import AUTO_COUNTS
from slurm_ext.sim.library import COSTS, THROUGHPUT, find_workload, workload_names
from slurm_ext.sim.merging import Merging
from slurm_ext.sim.model import Schedule, SimulationError
from slurm_ext.sim.outages import Outage, read_outages
from slurm_ext.sim.policies import LIMITED, POLICIES, policy_named
from slurm_ext.sim.setting import setting_of
from slurm_ext.sim.summary import summarise
from slurm_ext.sim.trace import FORMATS, Trace, read_trace
from slurm_ext.sim.truth import Table, read_table

DEFAULT_POLICIES = "fifo,backfill,srtf,titan"
# The machine where none is named; with a table of one's own, of that table's first GPU type.
DEFAULT_CLUSTER = "8x4xV100"
_DEFAULT_UNTYPED = "8x4"
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
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse a workload or a throughput table with a bad row",
    )
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
        metavar="NODESxGPUS[xTYPE][,...]",
        help="the machine, groups of nodes joined by commas; without TYPE the first one of --table"
        f" is meant (default: {DEFAULT_CLUSTER}, with --table {_DEFAULT_UNTYPED})",
    )
    parser.add_argument("--pooled", action="store_true", help="ignore node borders: any free GPUs")
    parser.add_argument(
        "--policy",
        default=DEFAULT_POLICIES,
        metavar="NAME,...",
        help=f"policies to replay (default: {DEFAULT_POLICIES})",
    )
    parser.add_argument(
        "--waiting-limit",
        type=_limit,
        metavar="TIME",
        help="jobs that have waited for longer go first, in order of submission, as the daemon's"
        f" waiting_limit_s does it; for {', '.join(LIMITED)}; e.g. 12h or 1d"
        " (default: none, as in published results)",
    )
    parser.add_argument(
        "--interval",
        action="append",
        default=[],
        metavar="[POLICY=]TIME,...",
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
    policies = _policies(args.policy, args.waiting_limit)
    intervals = _intervals(args.interval, policies)
    cluster = args.cluster or (DEFAULT_CLUSTER if args.table == THROUGHPUT else _DEFAULT_UNTYPED)
    hardware = parse_cluster(cluster, pooled=args.pooled)
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
    table = read_table(args.table, hardware.gpu_types, strict=args.strict)
    untyped = not all(hardware.gpu_types)
    if untyped:
        hardware = hardware.of_type(next(iter(table.curves)))
    trace, terms = _trace(args), _terms(args)
    if not args.quiet:
        tell(trace.skipped)
        tell(trace.notes)
        tell(table.skipped)
        if untyped:
            given = f"--cluster {cluster} names no GPU type"
            tell([f"{given if args.cluster else 'no --cluster'}: taken for {hardware.text}"])
    built = _jobs(args, trace, hardware, table, costs, terms)
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
        bad_table_rows=len(table.skipped),
        waiting_limit_s=args.waiting_limit,
    )
    if built.no_limit and "backfill" in policies and not args.quiet:
        tell([limits(built)])
    schedules, failed = _replay(args, built, hardware, policies, costs, intervals, outages, merging)
    rows = [Row(name, summarise(s, schedules.get("srtf"))) for name, s in schedules.items()]
    if rows and not to_stdout:
        for line in outcomes(rows, args.columns, setting, heading=not args.noheader):
            print(line)
    if not args.quiet:
        tell(by_age(schedules, LIMITED, args.waiting_limit))
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
            tell(missing)
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
    table: Table,
    costs: Costs,
    terms: Terms,
) -> Built:
    truths = truths_for(table.curves, hardware, costs)
    built = build(trace.jobs, hardware, truths, costs, terms, table_types=table.types)
    if built.left_out and args.strict:
        raise DataError(args.trace, built.left_out[0], "leave --strict out to go on without it")
    remedy = remedies(built, hardware, table.types, trace.fmt)
    # Of an error the remedy is told there, for its first reason.
    tell_left_out(built, next(iter(remedy.values()), "") if built.jobs else "")
    if not built.jobs:
        reason = built.reasons[0][0] if built.reasons else "it has no usable row"
        fix = remedy.get(reason, "see --table and --cluster")
        raise DataError(args.trace, f"no job to replay: {reason}", fix)
    return built


def _policies(text: str, waiting_limit_s: float | None) -> dict[str, Policy]:
    names = [name.strip() for name in text.split(",")]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"--policy {text}", f"{twice} is there twice", "name each policy once")
    limit_s = math.inf if waiting_limit_s is None else waiting_limit_s
    return {name: policy_named(name, limit_s) for name in names}


def _intervals(words: Iterable[str], policies: Mapping[str, Policy]) -> dict[str, float]:
    """Policy -> seconds; a number without a policy holds for all that are not named."""
    everyone, own = 0.0, dict[str, float]()
    for word in ",".join(words).split(","):
        if not word.strip():
            continue
        name, equals, number = word.rpartition("=")
        try:
            seconds = parse_duration(number)
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


def _limit(text: str) -> float | None:
    if text == "none":
        return None
    try:
        return parse_duration(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r}: {exc}; write none, {FORMS}") from exc


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
