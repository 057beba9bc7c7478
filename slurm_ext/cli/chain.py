"""``slurm-ext chain``: what a job that trains tasks one after the other has done and will do."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from slurm_ext.domain.errors import ConfigError, DataError
from slurm_ft.switch.chain import ChainState, remaining, running_chain
from slurm_ft.train.task import Task
from slurm_ft.variables import STATE_DIR

_STATES = Path(".slurm-ext") / "state"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    parser = subparsers.add_parser(
        "chain",
        help="append tasks to a job that trains a chain of them",
        description="A job started with `ft-run --chain FILE` trains the tasks of a file one after"
        " the other on the same ranks. Tasks can be appended while it runs; they are taken up"
        " when the one before begins or ends.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add = actions.add_parser("add", help="append the task of a YAML file")
    _add_place(add)
    add.add_argument("file", metavar="FILE", type=Path, help="one task, with a name of its own")
    add.set_defaults(run=run_add)
    listing = actions.add_parser("ls", help="list the tasks and how far they are")
    _add_place(listing)
    listing.add_argument("--json", action="store_true", help="as a JSON list")
    listing.set_defaults(run=run_ls)


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "place",
        metavar="JOBID|DIR",
        help=f"the job, or its state directory where {STATE_DIR} or --state-dir was given",
    )


def run_add(args: argparse.Namespace) -> int:
    """Append one task."""
    chain = find(args.place)
    task = chain.append(args.file)
    left = [each.name for each in _left(chain)]
    print(f"{task.name} is task {left.index(task.name) + 1} of {len(left)} that are not done")
    return 0


def run_ls(args: argparse.Namespace) -> int:
    """List the chain."""
    chain = find(args.place)
    done = chain.done()
    tasks, wrong = chain.look(chain.given())
    waiting = {task.name for task in _left(chain)}
    if args.json:
        rows = [
            {
                "name": task.name,
                "steps": task.steps,
                "done": task.name not in waiting,
                "metrics": dict(done[task.name].metrics) if task.name in done else None,
            }
            for task in tasks
        ]
        print(json.dumps(rows))
        return _complain(wrong)
    width = max(4, *(len(task.name) for task in tasks))
    print(f"{'TASK':{width}} {'STEPS':>8} STATE   RESULT")
    for task in tasks:
        record = done.get(task.name)
        state = "waits" if task.name in waiting else "done"
        said = "" if record is None else " ".join(f"{k}={v:.4g}" for k, v in record.metrics.items())
        print(f"{task.name:{width}} {task.steps:8} {state:7} {said}".rstrip())
    return _complain(wrong)


def _complain(wrong: Sequence[ConfigError]) -> int:
    """Name what cannot be trained; 1 if there is any."""
    for problem in wrong:
        print(f"slurm-ext: left out: {problem}", file=sys.stderr)
    return 1 if wrong else 0


def _left(chain: ChainState) -> list[Task]:
    return remaining(chain.look(chain.given())[0], chain.done())


def find(word: str) -> ChainState:
    """The chain of a job or of a state directory."""
    if Path(word).is_dir():
        return running_chain(Path(word))
    if "/" in word:
        raise DataError(word, "is no directory", "give the job's state directory")
    found = sorted((Path.home() / _STATES).glob(f"*-{word}"))
    if not found:
        raise DataError(
            f"job {word}",
            f"has no state in {Path.home() / _STATES}",
            f"is it yours, and has it started? Where {STATE_DIR} was set, give that directory",
        )
    if len(found) > 1:
        raise ConfigError(
            f"job {word}",
            f"is known in {len(found)} clusters: {', '.join(path.name for path in found)}",
            "give the state directory itself",
        )
    return running_chain(found[0])
