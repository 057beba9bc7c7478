"""The manual pages, written from what the program itself knows.

Commands and options come from the argument parsers, ``--ft-*`` options from their table, paths
from the configuration's defaults; only what no parser can say is prose here. The committed pages
under ``site/man/`` are this module's output, and a test compares them. The page of the
configuration is printed by ``python -m slurm_ext.control.config``.

The parsers are read instead of argparse's own help text, whose line breaks and headings differ
between releases of Python.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

from slurm_ext.cli.main import COMMANDS, build_parser
from slurm_ext.cli.manual_launch import TIMES, launch_page
from slurm_ext.cli.manual_simulate import examples, replay_files
from slurm_ext.cli.roff import (
    bold,
    from_markdown,
    italic,
    marked,
    tagged,
    text,
    title,
    verbatim,
)
from slurm_ext.control.config import DEFAULT_PATH, ENVIRONMENT_PREFIX, Config
from slurm_ext.domain.options import OPTIONS, Option
from slurm_ext.domain.options_emit import emit_markdown
from slurm_ext.domain.request import PLANS, PROGRESS_PREFIX, REQUEST_PREFIX, SUFFIX

# Commands that change or look after the daemon or a site; all others are for everybody.
ADMINISTRATOR = ("daemon", "release", "check", "report")
_NOTICE = '.\\" printed by python -m slurm_ext.cli.manual --emit {name}; do not edit'
_ALSO = {
    "slurm-ext": 1,
    "ft-run": 1,
    "slurm-ext-config": 5,
    "slurm-ext-directives": 7,
    "slurm-ext-daemon": 8,
    "sbatch": 1,
    "squeue": 1,
    "slurm.conf": 5,
}


# -- the parsers ---------------------------------------------------------------------------------


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The sub-commands of a parser by name, in order; empty where it has none."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    hidden = (argparse._HelpAction, argparse._SubParsersAction, argparse._VersionAction)
    return [a for a in parser._actions if not isinstance(a, hidden)]


def _value(action: argparse.Action) -> str:
    """The word that stands for the value; empty where the option takes none."""
    if action.option_strings and action.nargs == 0:
        return ""
    if action.metavar is None and action.choices:
        return "|".join(str(choice) for choice in action.choices)
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    return name or ""


def _spelled(option: str, action: argparse.Action) -> str:
    value = _value(action)
    if not value:
        return bold(option)
    return bold(f"{option}=" if option.startswith("--") else f"{option} ") + italic(value)


def _synopsis(parser: argparse.ArgumentParser) -> str:
    """Options in brackets, then arguments; a group of which one is needed in braces."""
    grouped: dict[int, argparse._MutuallyExclusiveGroup] = {
        id(action): group
        for group in parser._mutually_exclusive_groups
        for action in group._group_actions
    }
    words = [bold(parser.prog)]
    told: set[int] = set()
    for action in sorted(_actions(parser), key=lambda a: id(a) in grouped or not a.option_strings):
        group = grouped.get(id(action))
        if group is None:
            words.append(_bracketed(action))
        elif id(group) not in told:
            told.add(id(group))
            inner = " | ".join(_bare(one) for one in group._group_actions)
            words.append(f"{{{inner}}}" if group.required else f"[{inner}]")
    if subcommands(parser):
        words.append(f"{italic('ACTION')} ...")
    return " ".join(words)


def _bare(action: argparse.Action) -> str:
    if action.option_strings:
        return _spelled(action.option_strings[-1], action)
    return italic(_value(action))


def _bracketed(action: argparse.Action) -> str:
    bare = _bare(action)
    if action.option_strings:
        # A repeatable option (--set) says so in its help.
        return bare if action.required else f"[{bare}]"
    if action.nargs in ("*", "?"):
        return f"[{bare}{' ...' if action.nargs == '*' else ''}]"
    return f"{bare} ..." if action.nargs == "+" else bare


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The section of one command, and of its own sub-commands."""
    yield f".SS {text(parser.prog)}"
    yield _synopsis(parser)
    yield ".PP"
    if not parser.description:
        raise ValueError(f"{parser.prog} has no description")
    yield text(parser.description)
    for action in _actions(parser):
        names = ", ".join(_spelled(name, action) for name in action.option_strings)
        words = action.help or ""
        if not words:
            raise ValueError(f"{parser.prog}: {names or _value(action)} has no help text")
        words = words.replace("%(default)s", str(action.default))
        yield from tagged(names or italic(_value(action)), text(words[0].upper() + words[1:]))
    if parser.epilog:
        # argparse fills an epilog unless a parser asks for its lines as they are.
        if parser.formatter_class is argparse.HelpFormatter:
            yield from (".PP", text(parser.epilog))
        else:
            yield from verbatim(parser.epilog.splitlines())
    for inner in subcommands(parser).values():
        yield from _command(inner)


# -- the pages -----------------------------------------------------------------------------------


def _see_also(own: str) -> list[str]:
    others = [f".BR {text(name)} ({section})" for name, section in _ALSO.items() if name != own]
    return [".SH SEE ALSO", *(f"{line}," for line in others[:-1]), others[-1]]


def _default(key: str) -> str:
    return str(Config.model_fields[key].default)


def _exit_status() -> list[str]:
    return [
        ".SH EXIT STATUS",
        *tagged(bold("0"), "Fine."),
        *tagged(bold("1"), text("Failed; one line on standard error says what, and what to do.")),
        *tagged(
            bold("2"),
            text(
                "The command line cannot be read: a command, option or argument that there is not"
                " or that is missing, a number that is none, a word that is not one of a list. A"
                " value that can be read and does not fit (a policy, a cluster, a time, a format"
                " of lines) ends with 1."
            ),
        ),
    ]


def _environment() -> list[str]:
    return [
        ".SH ENVIRONMENT",
        *tagged(
            bold("SLURM_EXT_CONFIG"),
            marked("The configuration to read where `--config` is not given."),
        ),
        *tagged(
            bold(ENVIRONMENT_PREFIX) + italic("KEY"),
            text("A key of the configuration in capitals, its value in YAML."),
        ),
    ]


def _commands(names: Sequence[str]) -> Iterator[str]:
    parsers = subcommands(build_parser())
    for name in names:
        yield from _command(parsers[name])


def users_page() -> list[str]:
    """slurm-ext(1): what everybody may run."""
    names = [name for name in COMMANDS if name not in ADMINISTRATOR]
    return [
        *title("slurm-ext", 1, "look at the plan of the fine-tuning queue, and have a say in it"),
        ".SH SYNOPSIS",
        f"{bold('slurm-ext')} {italic('COMMAND')} ...",
        ".SH DESCRIPTION",
        marked(
            "slurm-ext chooses the order, the GPU counts and the nodes of pending fine-tuning jobs"
            " in an ordinary Slurm cluster. Jobs take part through `--ft-*` options of `sbatch`,"
            " see `slurm-ext-directives(7)`. What the daemon has planned for each job, and why,"
            " lies in a spool directory that these commands read: looking at the plan asks Slurm"
            " nothing and costs slurmctld nothing."
        ),
        ".PP",
        marked(
            "Slurm is asked by these: `slurm-ext explain --script` reads the queue as `squeue`"
            " does and asks `sbatch --test-only`, for which slurmctld uses up one job id each time"
            " (no job comes to be, but the number is gone); `slurm-ext explain` and"
            " `slurm-ext queue -j` ask for the state of a job that has no plan, `slurm-ext explain`"
            " also the accounting (`sacct`) for one that has left the queue; `slurm-ext pause` and"
            " `slurm-ext resume` ask for the job's state and, where needed, its owner and its end,"
            " signal it, and set the start of one that gave its GPUs back; `slurm-ext chain` asks"
            " whether a job that has not told its end is still there; `slurm-ext checkpoint` asks"
            " for the directory that a job was submitted from, where it is given a job;"
            " `slurm-ext table profile` submits a job."
        ),
        ".PP",
        marked(
            "Every command has `--help`. `slurm-ext --version` tells the release. The commands for"
            f" administrators ({', '.join(f'`{name}`' for name in ADMINISTRATOR)}) are described in"
            " `slurm-ext-daemon(8)`."
        ),
        ".SH COMMANDS",
        *_commands(names),
        ".SH TIMES",
        marked(TIMES),
        *_exit_status(),
        *_environment(),
        ".SH FILES",
        *tagged(
            italic(str(DEFAULT_PATH)),
            marked("Configuration, of which these commands need `spool` and `table`."),
        ),
        *tagged(
            italic(f"{_default('spool')}/{PLANS}/JOBID{SUFFIX}"),
            text("What is planned for a job, replaced with every change."),
        ),
        *tagged(
            italic(f"{_default('spool')}/UID/{REQUEST_PREFIX}JOBID{SUFFIX}"),
            marked("What `slurm-ext pin` asks of the daemon."),
        ),
        *replay_files(),
        *examples(),
        *_see_also("slurm-ext"),
    ]


def daemon_page() -> list[str]:
    """slurm-ext-daemon(8): what an administrator runs."""
    return [
        *title("slurm-ext-daemon", 8, "the daemon of slurm-ext, and the commands around it"),
        ".SH SYNOPSIS",
        *(
            line
            for name in ADMINISTRATOR
            for line in (_synopsis(subcommands(build_parser())[name]), ".br")
        ),
        ".SH DESCRIPTION",
        marked(
            "The daemon runs beside slurmctld as a user of its own with the Slurm right"
            " `AdminLevel=Operator`. In each cycle it reads the queue, estimates every job with an"
            " `--ft-*` option under every GPU count that it allows, decides which of them start in"
            " which shape, and carries that out: order by `SiteFactor`, shapes and node lists of"
            " pending jobs under a lease (an earliest start a little ahead that is renewed)."
            " It never touches running jobs, jobs without an `--ft-*` option, holds, priorities"
            " that an operator wrote, or a user's own `--begin`."
        ),
        ".PP",
        marked(
            "Without a configuration it only observes: it plans, logs and changes nothing. The key"
            " `partitions` switches acting on, one partition and one kind of action at a time."
        ),
        ".PP",
        text(
            "Control expires. When the daemon dies, leases end by themselves and Slurm starts the"
            " jobs; the release command, which the unit runs after every stop and a timer of its"
            " own runs when the heartbeat is older than a lease, gives every job its submitted"
            " shape and native place back."
        ),
        ".SH COMMANDS",
        *_commands(ADMINISTRATOR),
        ".SH SIGNALS",
        *tagged(
            bold("SIGHUP"), text("Read the configuration again; a wrong one is not taken over.")
        ),
        *tagged(
            f"{bold('SIGTERM')}, {bold('SIGINT')}",
            text("Stop after the cycle in progress; a second one stops at once."),
        ),
        *_exit_status(),
        *_environment(),
        ".SH FILES",
        *tagged(
            f"{italic(str(DEFAULT_PATH))}, {italic(str(DEFAULT_PATH.parent / 'conf.d'))}",
            text("Configuration."),
        ),
        *tagged(italic(_default("table")), text("Measured throughputs.")),
        *tagged(
            italic(_default("journal")),
            text("Every decision and write with its outcome, and the ledger of what is ours."),
        ),
        *tagged(
            italic(_default("heartbeat")), text("Replaced at the end of every complete cycle.")
        ),
        *tagged(
            italic(f"{_default('spool')}/{PLANS}"), text("Plan documents, readable by everybody.")
        ),
        *tagged(
            italic(f"{_default('spool')}/UID"),
            marked(
                f"Files of one user: `{PROGRESS_PREFIX}JOBID{SUFFIX}` from jobs,"
                f" `{REQUEST_PREFIX}JOBID{SUFFIX}` from `slurm-ext pin`."
            ),
        ),
        *_see_also("slurm-ext-daemon"),
    ]


def _directive(option: Option) -> list[str]:
    facts = [f"Environment: `{option.twin}`; the job sees `{option.job_env}`."]
    if option.default:
        facts.insert(0, f"Default: `{option.default}`.")
    if option.excludes:
        facts.append(f"Not together with `--ft-{option.excludes}`.")
    words = f"{option.usage[0].upper()}{option.usage[1:]}. {option.doc} {' '.join(facts)}"
    return tagged(bold(f"{option.flag}=") + italic(option.metavar), marked(words))


def directives_page() -> list[str]:
    """slurm-ext-directives(7): the options of sbatch, with the words of docs/directives.md."""
    page = emit_markdown()
    head, heading, rest = page.partition("## Options\n")
    _, next_heading, tail = rest.partition("\n## ")
    if not heading or not next_heading:
        raise ValueError("docs/directives.md has no section 'Options' between two others")
    return [
        *title("slurm-ext-directives", 7, "the --ft-* options of sbatch, salloc and srun"),
        ".SH DESCRIPTION",
        *from_markdown(head),
        ".SH OPTIONS",
        *(line for option in OPTIONS for line in _directive(option)),
        *from_markdown(f"## {tail}"),
        *_see_also("slurm-ext-directives"),
    ]


PAGES: dict[str, Callable[[], list[str]]] = {
    "ft-run.1": launch_page,
    "slurm-ext.1": users_page,
    "slurm-ext-directives.7": directives_page,
    "slurm-ext-daemon.8": daemon_page,
}


def page(name: str) -> str:
    """The text of one page."""
    return "\n".join([_NOTICE.format(name=name), *PAGES[name]()]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """``--emit PAGE`` on stdout."""
    parser = argparse.ArgumentParser(prog="python -m slurm_ext.cli.manual")
    parser.add_argument("--emit", choices=sorted(PAGES), required=True)
    sys.stdout.write(page(parser.parse_args(argv).emit))
    return 0


if __name__ == "__main__":
    sys.exit(main())
