"""What to replay and how: the command line as one frozen value."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

# The short form shows that everything works; its numbers say little.
DEFAULT_JOBS = 30
DEFAULT_SCALE = 60.0
# Above this, a second of Slurm's own granularity is more than a minute of the workload.
MAX_FULL_SCALE = 60.0
DEFAULT_SEED = 1
DEFAULT_WORKLOAD = "FM-1-vit-large"
DEFAULT_GANTT = Path("demo-out/gantt.png")


class Variant(StrEnum):
    """One way to run the workload; the value is the name on the command line and in the JSON."""

    PLAIN = "plain"
    ORDER = "order"
    FULL = "slurm_ext"

    @property
    def words(self) -> str:
        """What the variant is, for people."""
        return {
            Variant.PLAIN: "plain Slurm",
            Variant.ORDER: "slurm-ext, order only",
            Variant.FULL: "slurm-ext, order and GPU counts",
        }[self]


@dataclass(frozen=True, slots=True)
class Options:
    """A replay. ``jobs`` None: the whole workload. ``scale``: workload seconds per real second."""

    workload: str = DEFAULT_WORKLOAD
    nodes: int = 8
    jobs: int | None = DEFAULT_JOBS
    full: bool = False
    scale: float = DEFAULT_SCALE
    seed: int = DEFAULT_SEED
    variants: tuple[Variant, ...] = tuple(Variant)
    json: Path | None = None
    records: Path | None = None
    gantt: Path = DEFAULT_GANTT
    keep: bool = False


def parse(argv: Sequence[str] | None = None) -> Options:
    """Options from the command line; exits with code 2 and a message when they make no sense."""
    parser = argparse.ArgumentParser(
        prog="ci/demo",
        description="Replay a fine-tuning workload on a containerized Slurm cluster, in compressed "
        "time: plain Slurm against slurm-ext. By default the first jobs only, which is no "
        "benchmark; --full replays the whole workload.",
    )
    parser.add_argument(
        "--workload",
        default=DEFAULT_WORKLOAD,
        metavar="NAME|FILE",
        help=f"a workload of the package or a CSV file (default: {DEFAULT_WORKLOAD})",
    )
    parser.add_argument("--nodes", type=int, default=8, help="nodes of 4 GPUs each (default: 8)")
    parser.add_argument(
        "--jobs", type=int, help=f"replay the first so many (default: {DEFAULT_JOBS})"
    )
    parser.add_argument("--full", action="store_true", help="the benchmark: every job")
    parser.add_argument(
        "--time-scale",
        type=float,
        default=DEFAULT_SCALE,
        metavar="X",
        help=f"workload seconds per real second (default: {DEFAULT_SCALE:g}; "
        f"with --full at most {MAX_FULL_SCALE:g})",
    )
    parser.add_argument(
        "--seed", type=int, default=DEFAULT_SEED, help="of the hidden errors of the run times"
    )
    parser.add_argument(
        "--variants",
        default=",".join(Variant),
        metavar="LIST",
        help="which of plain, order, slurm_ext to run; a comma-separated list",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument(
        "--records",
        type=Path,
        metavar="FILE",
        help="write there when every job was submitted, started and ended, and where",
    )
    parser.add_argument(
        "--gantt",
        type=Path,
        default=DEFAULT_GANTT,
        metavar="FILE",
        help="picture of the schedules, .png or .svg (default: %(default)s)",
    )
    parser.add_argument("--keep", action="store_true", help="leave the clusters up")
    args = parser.parse_args(argv)

    if args.nodes < 1:
        parser.error(f"--nodes={args.nodes}: give at least 1")
    if args.full and args.jobs is not None:
        parser.error("--full replays every job: leave out --jobs")
    if args.jobs is not None and args.jobs < 1:
        parser.error(f"--jobs={args.jobs}: give at least 1")
    if args.time_scale < 1:
        parser.error(f"--time-scale={args.time_scale:g}: give at least 1")
    if args.full and args.time_scale > MAX_FULL_SCALE:
        parser.error(
            f"--time-scale={args.time_scale:g}: with --full give at most {MAX_FULL_SCALE:g}; "
            "above that Slurm's own granularity decides the result"
        )
    if args.gantt.suffix.lower() not in {".png", ".svg"}:
        parser.error(f"--gantt={args.gantt}: give a file that ends in .png or .svg")
    return Options(
        workload=args.workload,
        nodes=args.nodes,
        jobs=None if args.full else args.jobs or DEFAULT_JOBS,
        full=args.full,
        scale=args.time_scale,
        seed=args.seed,
        variants=_variants(parser, args.variants),
        json=args.json,
        records=args.records,
        gantt=args.gantt,
        keep=args.keep,
    )


def _variants(parser: argparse.ArgumentParser, text: str) -> tuple[Variant, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {str(variant) for variant in Variant}
    if not names or set(names) - known:
        parser.error(f"--variants={text}: give some of {', '.join(Variant)}")
    return tuple(variant for variant in Variant if str(variant) in names)
