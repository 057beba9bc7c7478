"""``slurm-ext``: one program, one file per sub-command.

Each sub-command is a module with ``register(subparsers)``, which sets ``run`` to a function from
the parsed arguments to an exit code. Modules are imported only when their sub-command is asked
for: a login node without the daemon's dependencies can still import tables, and ``slurm-ext -V``
stays fast. Exit codes: 0 fine, 1 failed, 2 usage.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence

from slurm_ext import __version__
from slurm_ext.domain.errors import SlurmExtError

# A minus and a digit, but no number: argparse takes it for an option.
_LIKE_A_NUMBER = re.compile(r"-\d(?!\d*(\.\d*)?$)")
# Sub-command to its module and the line that --help shows.
COMMANDS: dict[str, tuple[str, str]] = {
    "explain": ("slurm_ext.cli.explain", "why a job got that GPU count, place and nodes"),
    "queue": ("slurm_ext.cli.queue", "plan and reason of every job"),
    "pin": ("slurm_ext.cli.pin", "keep a job's GPU count, or let it be chosen again"),
    "pause": ("slurm_ext.cli.pause", "let a running job hold, and give back memory meanwhile"),
    "resume": ("slurm_ext.cli.resume", "let a paused job go on"),
    "chain": ("slurm_ext.cli.chain", "append tasks to a job that trains a chain of them"),
    "checkpoint": ("slurm_ext.cli.checkpoint", "list, verify and clean up checkpoints"),
    "table": ("slurm_ext.cli.table", "import, list, show and export measured throughputs"),
    "report": ("slurm_ext.cli.report", "what the accounting of Slurm says about a site"),
    "simulate": ("slurm_ext.cli.simulate", "replay a recorded workload through the policies"),
    "check": ("slurm_ext.cli.check", "is everything set up? each line ok or how to mend it"),
    "daemon": ("slurm_ext.cli.daemon", "observe the queue and act on it"),
    "release": ("slurm_ext.cli.release", "take back everything of ours at once"),
}


def build_parser(wanted: str | None = None) -> argparse.ArgumentParser:
    """The parser; only the sub-command ``wanted`` is filled in, ``None`` fills all."""
    return _parsers(wanted)[0]


def _parsers(
    wanted: str | None,
) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and those of the sub-commands by name."""
    parser = argparse.ArgumentParser(
        prog="slurm-ext",
        description="Makes an ordinary Slurm cluster good at fine-tuning foundation models.",
        epilog="Exit codes: 0 fine, 1 failed, 2 usage. See slurm-ext(1).",
    )
    parser.add_argument("-V", "--version", action="version", version=f"slurm-ext {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, words) in COMMANDS.items():
        if wanted in (None, name):
            importlib.import_module(module).register(subparsers)
        else:
            subparsers.add_parser(name, help=words, add_help=False)
    return parser, subparsers.choices


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; an error of ours is one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    wanted = next((word for word in arguments if not word.startswith("-")), "")
    try:
        parser, commands = _parsers(wanted)
        if wanted in commands:
            _check_spelling(parser, commands[wanted], arguments)
        parsed, unknown = parser.parse_known_args(arguments)
        if unknown:
            # Of the usage lines that of the sub-command helps.
            commands.get(wanted, parser).error(f"unrecognized arguments: {' '.join(unknown)}")
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except SlurmExtError as exc:
        print(f"slurm-ext: error: {exc}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] == "slurm_ext":
            raise
        print(
            f"slurm-ext: error: {wanted or 'this command'} needs the Python module {exc.name},"
            " which comes along with slurm-ext unless pip was told --no-deps, as for jobs: call the"
            " administrator's slurm-ext by its path, or install slurm-ext again without --no-deps",
            file=sys.stderr,
        )
        return 1
    except BrokenPipeError:
        _discard_output()  # the reader (head, less) has enough
        return 1
    except OSError as exc:
        # The last resort: whoever opens a file knows better what it was for, and says so.
        where = exc.filename or "reading or writing failed"
        print(
            f"slurm-ext: error: {where}: {exc.strerror or exc};"
            " mend the rights or the space there, or run as another user",
            file=sys.stderr,
        )
        _discard_output()
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _check_spelling(
    parser: argparse.ArgumentParser, command: argparse.ArgumentParser, arguments: Sequence[str]
) -> None:
    """Name a misspelt option. argparse by itself takes the word behind it for something else, and
    complains about that."""
    options = dict(parser._option_string_actions)
    todo = [command]
    while todo:
        one = todo.pop()
        options |= one._option_string_actions
        for action in one._actions:
            if isinstance(action, argparse._SubParsersAction):
                todo += action.choices.values()
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == "--":
            return
        name, equals, _ = word.partition("=")
        if not name.startswith("--"):
            continue
        if not any(option.startswith(name) for option in options):
            near = difflib.get_close_matches(name, options, n=1)
            hint = f"; do you mean {near[0]}?" if near else ""
            command.error(f"unrecognized arguments: {name}{hint}")
        known = options.get(name)
        takes_one = known is not None and known.nargs is None
        if takes_one and not equals and _LIKE_A_NUMBER.match(following):
            command.error(
                f"argument {name}: {following} looks like an option; write {name}={following}"
            )


def _discard_output() -> None:
    """Whatever stdout still buffers: Python would complain again when it closes it."""
    with contextlib.suppress(OSError, ValueError):  # a stdout that is no file of the system
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
