"""``slurm-ext chain``: what a job that trains tasks one after the other has done and will do.

What is appended is checked here as far as this machine can tell, since the user is still there to
mend it; the chain's own ranks check it again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from slurm_ext.cli.chained import State, gone, standings
from slurm_ext.domain.errors import ConfigError, DataError
from slurm_ft.switch.chain import ChainState, remaining, running_chain
from slurm_ft.switch.standing import read_standing
from slurm_ft.train.output import fault
from slurm_ft.train.task import Task, differs
from slurm_ft.variables import STATE_DIR

_STATES = Path(".slurm-ext") / "state"
_UNCHECKED = "mend it, or add it with --unchecked"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    parser = subparsers.add_parser(
        "chain",
        help="append tasks to a job that trains a chain of them",
        description="A job started with `ft-run --chain FILE` trains the tasks of a file one after"
        " the other on the same ranks. Tasks can be appended while it runs; they are taken up"
        " when the one before begins or ends. Tasks that have not begun can be taken out.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add = actions.add_parser(
        "add",
        help="append the task of a YAML file",
        description="Append the task of a YAML file to those of a job.",
    )
    _add_place(add)
    add.add_argument(
        "file",
        metavar="FILE",
        type=Path,
        help="one task, with a name of its own; the common keys of the chain's file do not apply",
    )
    add.add_argument(
        "--unchecked",
        action="store_true",
        help="append it also where the job's ranks cannot train it as they are now, or where its"
        " result cannot be written from this machine",
    )
    add.set_defaults(run=run_add)
    removal = actions.add_parser(
        "rm",
        help="take a task out that has not begun",
        description="Take a task out that has not begun.",
    )
    _add_place(removal)
    removal.add_argument("name", metavar="NAME", help="the task's name")
    removal.set_defaults(run=run_rm)
    listing = actions.add_parser(
        "ls",
        help="list the tasks and how far they are",
        description="List the tasks of a job and how far they are.",
    )
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
    now = read_standing(chain.folder)
    cold: list[str] = []

    def check(task: Task, before: Sequence[Task]) -> None:
        place = f"{args.file}: {task.name}"
        if not args.unchecked:
            if now is not None and (why := now.unfit(task)):
                raise ConfigError(
                    place, f"the chain's {now.ranks} ranks cannot train it: {why}", _UNCHECKED
                )
            if why := fault(chain.output_of(task)):
                raise ConfigError(place, f"{why} from this machine", _UNCHECKED)
        if before and (why := differs(before[-1], task)):
            cold.append(f"; it will start cold after {before[-1].name}: {why}")

    task = chain.append(args.file, check)
    left = [each.name for each in _left(chain)]
    place = f"is task {left.index(task.name) + 1} of {len(left)} that are not done"
    print(f"{task.name} {place}{''.join(cold)}")
    return 0


def run_rm(args: argparse.Namespace) -> int:
    """Take one task out."""
    chain = find(args.place)
    chain.remove(args.name)
    print(f"{args.name} is taken out; {len(_left(chain))} tasks are not done")
    return 0


def run_ls(args: argparse.Namespace) -> int:
    """List the chain."""
    chain = find(args.place)
    tasks, wrong = chain.look(chain.given())
    rows = standings(chain, tasks, read_standing(chain.folder), gone(chain, args.place))
    if args.json:
        shown = [
            {
                "name": row.task.name,
                "steps": row.task.steps,
                "done": row.state is State.DONE,
                "state": row.state.value,
                "why": row.why,
                "metrics": None if row.done is None else dict(row.done.metrics),
                "quality": None if row.task.quality is None else str(row.task.quality),
                "quality_kept": row.kept,
            }
            for row in rows
        ]
        print(json.dumps(shown))
        return _complain(wrong)
    width = max(4, *(len(task.name) for task in tasks)) if tasks else 4
    print(f"{'TASK':{width}} {'STEPS':>8} {'STATE':11} RESULT")
    for row in rows:
        print(
            f"{row.task.name:{width}} {row.task.steps:8} {row.state.value:11} {row.words}".rstrip()
        )
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
