"""``slurm-ext table stale``: configurations whose measured throughput jobs contradict.

The daemon finds them (`slurm_ext.estimate.calibration`) and writes them into its document in the
spool; here they are only listed, with the models that are corrected as a whole.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from slurm_ext.cli.tabular import Column, letters_help, parse_format, render
from slurm_ext.control.config import load_config
from slurm_ext.control.spool import read_cluster
from slurm_ext.domain.codec import plain
from slurm_ext.domain.document import StaleRow
from slurm_ext.domain.errors import DataError, SourceMissingError
from slurm_ext.estimate.csvtext import placement_text

FORMAT = "%20m %8g %.5G %.12P %.6b %.4k %.7f %.5j"

LETTERS: dict[str, Column[StaleRow]] = {
    "m": Column("MODEL", lambda r: r.model, "model"),
    "g": Column("GPU_TYPE", lambda r: r.gpu_type, "GPU type"),
    "G": Column("GPUS", lambda r: str(sum(r.placement)), "GPUs"),
    "P": Column("PLACEMENT", lambda r: placement_text(r.placement) or "-", "GPUs per node"),
    "b": Column("LOCAL", lambda r: str(r.local_batch), "samples per GPU and micro-batch"),
    "k": Column("ACC", lambda r: str(r.accumulation), "micro-batches per step"),
    "f": Column(
        "FACTOR",
        lambda r: f"{r.factor:.2f}",
        "speed of the jobs over the table's, after its model's correction",
    ),
    "j": Column("JOBS", lambda r: str(r.jobs), "jobs that told so"),
}


def register(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the action to ``slurm-ext table``."""
    text = "configurations that running jobs contradict, to be measured again"
    parser = actions.add_parser(
        "stale",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. The daemon finds them from progress reports,"
        " after it has corrected what a whole model is off by; --json tells those corrections too.",
        epilog=f"Format fields:\n{letters_help(LETTERS)}\nDefault: {FORMAT}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,  # -h is --noheader, as in squeue
    )
    parser.add_argument("--help", action="help", help="show this help and exit")
    parser.add_argument(
        "-o", "--format", metavar="FORMAT", default=FORMAT, help="fields of a line, see below"
    )
    parser.add_argument("-h", "--noheader", action="store_true", help="no heading line")
    parser.add_argument("--json", action="store_true", help="corrections and list as JSON")
    parser.add_argument("--config", metavar="FILE", type=Path, help="configuration to read")


def run(args: argparse.Namespace) -> int:
    """List them; nothing to list is fine."""
    pieces = parse_format(args.format, LETTERS)
    spool = load_config(args.config).spool
    try:
        whole = read_cluster(spool)
    except SourceMissingError as exc:
        raise DataError(
            str(spool),
            f"cannot be read ({exc.reason})",
            "the daemon writes the list: is it set up? see slurm-ext check",
        ) from exc
    if args.json:
        print(json.dumps({"corrections": plain(whole.corrections), "stale": plain(whole.stale)}))
        return 0
    for line in render(whole.stale, pieces, LETTERS, header=not args.noheader):
        print(line)
    return 0
