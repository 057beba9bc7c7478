"""``slurm-ext report``: what a site's accounting says about which mechanisms to switch on.

The report on switches between tasks has its own module.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

from slurm_ext.cli import switches
from slurm_ext.cli.sacctopts import add_sacct_options, sacct_options
from slurm_ext.domain.errors import ConfigError
from slurm_ext.domain.spans import about, counted
from slurm_ext.sim.advice import Advice, advise, percent
from slurm_ext.sim.fit import BUSY, CROWDED, MIN_HOUR_JOBS, SHORT_S, Fit, fit
from slurm_ext.sim.readers.sacct import read_sacct
from slurm_ext.sim.readers.sacctfile import COMMAND
from slurm_ext.sim.trace import read_lines

# More bad rows than this are counted, not printed.
ERRORS_SHOWN = 20
_WIDTH = 29


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    parser = subparsers.add_parser(
        "report",
        help="what the accounting of Slurm says about a site, and how tasks were switched",
        description="Reports about a site, from files that Slurm's own commands write, and about"
        " jobs that train several tasks.",
    )
    parser.set_defaults(run=run)
    kinds = parser.add_subparsers(dest="kind", metavar="ACTION", required=True)
    one = kinds.add_parser(
        "fit",
        help="which mechanisms suit the site, and what to leave off",
        description="Read the output of sacct and tell which mechanisms suit the site: how often"
        " models are reused, how many jobs are short, how much of the job time is waiting in which"
        " hour of the day, and whether free GPUs lie in pieces. Nothing is asked of Slurm.",
        epilog=f"Write FILE as an operator, with TZ=UTC where clocks were changed:\n"
        f"  {COMMAND.replace(' --format', chr(10) + '    --format')}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one.add_argument(
        "--from-sacct", metavar="FILE", required=True, help="what sacct wrote, - for stdin"
    )
    one.add_argument("--strict", action="store_true", help="one bad row refuses the file")
    one.add_argument(
        "--gpus-per-node",
        metavar="N",
        type=int,
        help="GPUs of every node (default: as many as were ever in use on it at once)",
    )
    add_sacct_options(one, "--columns")
    one.add_argument("--json", action="store_true", help="everything as one JSON document")
    switches.register(kinds)


def run(args: argparse.Namespace) -> int:
    """Print the report; bad rows go to stderr."""
    if args.gpus_per_node is not None and args.gpus_per_node < 1:
        raise ConfigError(f"--gpus-per-node={args.gpus_per_node}", "no GPU", "give at least 1")
    options = sacct_options(args)
    log = read_sacct(
        read_lines(args.from_sacct),
        args.from_sacct,
        strict=args.strict,
        columns=options.columns,
        delimiter=options.delimiter,
        model_pattern=options.model_pattern,
    )
    found = fit(log, args.gpus_per_node)
    advice = advise(found)
    for line in log.skipped[:ERRORS_SHOWN]:
        print(line, file=sys.stderr)
    if len(log.skipped) > ERRORS_SHOWN:
        print(f"... and {len(log.skipped) - ERRORS_SHOWN} more bad rows", file=sys.stderr)
    if args.json:
        document = {
            **asdict(found),
            "advice": [asdict(one) for one in advice],
            "bad_rows": len(log.skipped),
        }
        print(json.dumps(document))
        return 0
    for line in _report(found, advice, len(log.skipped)):
        print(line)
    return 0


def _report(found: Fit, advice: tuple[Advice, ...], bad_rows: int) -> Iterator[str]:
    yield from _jobs(found, bad_rows)
    yield ""
    yield from _models(found)
    yield ""
    yield from _waiting(found)
    yield ""
    yield from _pieces(found)
    yield ""
    yield from _advice(advice)


def _line(label: str, value: str) -> str:
    return f"{label:{_WIDTH}}{value}"


def _jobs(found: Fit, bad_rows: int) -> Iterator[str]:
    yield _line(
        "GPU jobs that ended",
        f"{found.jobs} in {about(found.period_s)}, {found.gpu_hours:,.1f} GPU hours",
    )
    if bad_rows:
        yield _line("bad rows skipped", str(bad_rows))
    for note in found.notes:
        yield _line("", note)
    sizes = ", ".join(f"{jobs} x {gpus}" for gpus, jobs in found.sizes)
    yield _line("jobs x GPUs", sizes)
    yield _line("GPU time of multi-GPU jobs", percent(found.multi_gpu_share))
    yield _line(
        f"shorter than {SHORT_S // 60} min",
        f"{percent(found.short_share)} of the jobs that did not break down,"
        f" {percent(found.short_gpu_share)} of all GPU time",
    )
    yield _line("broke down", f"{percent(found.broken_share)} of the jobs")


def _models(found: Fit) -> Iterator[str]:
    reuse = found.reuse
    yield _line("model known", f"{percent(reuse.known_share)} of the jobs")
    if reuse.models:
        top = ", ".join(f"{model} ({jobs})" for model, jobs in reuse.top)
        yield _line("  models", f"{reuse.models}: {top}")
        yield _line("  used before", f"{percent(reuse.repeated_share)} of these jobs")
        yield _line("  waited with another of it", percent(reuse.together_share))
        yield _line("  another ended meanwhile", percent(reuse.successor_share))
    yield _line(
        "name used before by the user", f"{percent(reuse.repeated_names_share)} of the jobs"
    )


def _waiting(found: Fit) -> Iterator[str]:
    yield _line("waiting, of the job time", percent(found.queue_share))
    for bound, share in ((BUSY, found.busy_jobs_share), (CROWDED, found.crowded_jobs_share)):
        yield _line(f"  in hours of {percent(bound)} or more", f"{percent(share)} of the jobs came")
    yield f"  {'HOUR':6}{'JOBS':>8}{'WAITING':>11}"
    for hour in found.hours:
        marks = ""
        if hour.jobs < MIN_HOUR_JOBS:
            marks = "  few jobs"
        elif hour.queue_share >= CROWDED:
            marks = f"  {percent(CROWDED)} or more"
        elif hour.queue_share >= BUSY:
            marks = f"  {percent(BUSY)} or more"
        name = f"{hour.hour:02d}-{(hour.hour + 1) % 24:02d}"
        yield f"  {name:6}{hour.jobs:8}{percent(hour.queue_share):>11}{marks}"


def _pieces(found: Fit) -> Iterator[str]:
    pieces = found.fragments
    if pieces is None:
        yield _line("GPU fragments", "cannot tell: the file has no NodeList")
        return
    yield _line(
        "GPU fragments",
        f"{percent(pieces.stranded_share)} of the time of {counted(pieces.gpus, 'GPU')} on"
        f" {counted(pieces.nodes, 'node')} lay free in pieces too small for a waiting job",
    )
    yield _line("  waiting for whole nodes", f"{percent(pieces.wait_share)} of all waiting")


def _advice(advice: tuple[Advice, ...]) -> Iterator[str]:
    yield f"{'MECHANISM':34}{'ADVICE':13}SETTING"
    for one in advice:
        yield f"{one.mechanism:34}{one.verdict.value:13}{one.setting}"
        yield f"    {one.because}"
    yield "What each would gain: slurm-ext simulate --trace FILE --format sacct ..."
