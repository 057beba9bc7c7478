"""``slurm-ext daemon``: observe the queue, and act where the configuration allows it."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from slurm_ext.cli.backend import open_backend
from slurm_ext.control.asks import Munge
from slurm_ext.control.config import Config, load_config
from slurm_ext.control.cycle import Engine
from slurm_ext.control.logs import setup_logging
from slurm_ext.control.loop import Loop
from slurm_ext.control.notify import Notifier
from slurm_ext.control.tenure import Tenure
from slurm_ft.pause.requests import vouch, vouched_by

_log = logging.getLogger(__name__)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    parser = subparsers.add_parser(
        "daemon",
        help="observe the queue and act on it",
        description="Plan the queue in cycles and act where the configuration has switched acting"
        " on. Logs are JSON lines on stdout. SIGHUP reads the configuration again, SIGTERM stops"
        " after the cycle in progress.",
    )
    parser.add_argument(
        "--observe",
        action="store_true",
        help="plan and log, change nothing, whatever the configuration says",
    )
    parser.add_argument(
        "--once", action="store_true", help="run one cycle; exit 1 if a source was missing"
    )
    add_config_options(parser)
    parser.set_defaults(run=run)


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """``--config`` and ``--set``, which daemon, release and check share."""
    parser.add_argument("--config", metavar="FILE", type=Path, help="configuration to read")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override a key, the value in YAML, dots for nested keys; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Run the daemon in the foreground."""

    tenure = Tenure()

    def read() -> Config:
        config = load_config(args.config, overrides=args.overrides)
        tenure.claim(config)
        return config

    def applied(config: Config) -> None:
        tenure.keep_only(config)
        setup_logging(config.log_level)

    try:
        config = load_config(args.config, overrides=args.overrides)
        setup_logging(config.log_level)
        tenure.claim(config)
        engine = Engine(
            config,
            open_backend(config),
            observe_only=args.observe,
            prepare_spool=tenure.prepare,
            munge=Munge(vouch, vouched_by),
        )
        return serve(engine, read, applied, args)
    finally:
        tenure.release()


def serve(
    engine: Engine,
    read: Callable[[], Config],
    applied: Callable[[Config], None],
    args: argparse.Namespace,
) -> int:
    """Run an engine once or for ever."""
    try:
        if args.once:
            report = engine.cycle()
            _log.info("%s", report.in_words())
            return 1 if report.skipped else 0
        mode = "observes" if args.observe or not engine.config.acting else "acts"
        _log.info("slurm-ext %s every %g s", mode, engine.config.cycle_s)
        asyncio.run(_forever(engine, read, applied))
    finally:
        engine.close()
    return 0


async def _forever(
    engine: Engine, read: Callable[[], Config], applied: Callable[[Config], None]
) -> None:
    await Loop(engine, Notifier(), read, applied=applied).run()
