"""``slurm-ext release``: take back everything of ours at once."""

from __future__ import annotations

import argparse
import getpass
import sys
import time

from slurm_ext.cli.backend import open_backend
from slurm_ext.cli.daemon import add_config_options
from slurm_ext.control.config import load_config
from slurm_ext.control.logs import setup_logging
from slurm_ext.control.release import Outcome, release
from slurm_ext.control.released import clear_released


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    parser = subparsers.add_parser(
        "release",
        help="take back everything of ours at once",
        description="Give every pending job its submitted shape, time limit, node list and native"
        " place back, and let it start. A daemon that runs beside it only observes from then on,"
        " until --resume. Run it as the daemon's user or as root.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--if-stale",
        action="store_true",
        help="only when the daemon's heartbeat is older than a lease (for the timer)",
    )
    what.add_argument(
        "--resume", action="store_true", help="let the daemon act again after a release"
    )
    add_config_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Release; 1 where something is left."""
    config = load_config(args.config, overrides=args.overrides)
    setup_logging(config.log_level, sys.stderr)
    if args.resume:
        was = clear_released(config.journal)
        print("the daemon may act again" if was else "nothing was released: the daemon may act")
        return 0
    found = release(
        open_backend(config), config, time.time, if_stale=args.if_stale, who=getpass.getuser()
    )
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(found.writes.items()))
    print(f"{found.outcome.value}{f' ({counts})' if counts else ''}")
    if found.marked:
        print("the daemon runs: it only observes until slurm-ext release --resume")
    for action in found.left:
        fields = " ".join(f"{key}={value}" for key, value in action.fields)
        print(f"job {action.job_id}: Slurm does not take {fields}", file=sys.stderr)
    return 1 if found.outcome is Outcome.LEFT else 0
