"""The options of ``ft-run``: one table, read for parsing, for ``--help`` and for the man page.

Not argparse: importing it costs a third of what may pass before the user's program starts, on
every rank. The command line goes before the environment, the environment before the default; the
first word that is no option begins the user's command. Values are checked here as far as their
form goes; what belongs together is checked where it is used.
"""

from __future__ import annotations

from slurm_ext.domain.amount import parse_bytes
from slurm_ext.domain.duration import FORMS, parse_duration, seconds_text
from slurm_ft import variables
from slurm_ft.launch.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT_SPOOL = "/var/spool/slurm-ext"
DEFAULT_SIGNALS = "USR2,TERM"
_LARGEST_CODE = 255


class Option:
    """One option. ``environment`` is the variable that fills it where it was not given.

    ``metavar`` is empty for a switch, ``many`` says that it may be repeated. ``words`` become
    ``--help`` and the man page.
    """

    __slots__ = ("default", "environment", "many", "metavar", "name", "words")

    def __init__(
        self,
        name: str,
        metavar: str,
        words: str,
        environment: str = "",
        default: str = "",
        many: bool = False,
    ) -> None:
        self.name = name
        self.metavar = metavar
        self.words = words
        self.environment = environment
        self.default = default
        self.many = many


OPTIONS = (
    Option(
        "checkpoint-dir",
        "DIR",
        "Directory of the job's checkpoints, the same in every attempt. Default: ft-checkpoints/ID"
        " below the directory of submission.",
        variables.CHECKPOINT_DIR,
    ),
    Option(
        "state-dir",
        "DIR",
        "Directory of the job's small files (attempts, status of each rank), the same in every"
        " attempt and on every node. Default: ~/.slurm-ext/state/CLUSTER-ID.",
        variables.STATE_DIR,
    ),
    Option(
        "block-store",
        "DIR",
        "Content-addressed store that checkpoints of several jobs share. Default: none.",
        variables.BLOCK_STORE,
    ),
    Option(
        "spool",
        "DIR",
        "Spool directory of the helper daemon. Without it the job runs, unplanned and unreported.",
        variables.SPOOL,
        DEFAULT_SPOOL,
    ),
    Option(
        "signals",
        "NAME[,..]",
        "Signals that mean: save and come back. USR1 is warned about, since NCCL may swallow it.",
        variables.SIGNALS,
        DEFAULT_SIGNALS,
    ),
    Option(
        "grace",
        "TIME",
        "Time from such a signal to SIGKILL: the lead of --signal or the partition's GraceTime. A"
        " program that is still there shortly before is killed, so that the job can be requeued."
        " Default: what Slurm's record of the job says.",
        variables.GRACE_S,
    ),
    Option(
        "collective-timeout",
        "TIME",
        "Time-out of one collective. Those that have to be longer follow from it.",
        variables.COLLECTIVE_TIMEOUT_S,
    ),
    Option(
        "checkpoint-interval",
        "auto|LOW-HIGH|TIME",
        "Time between two checkpoints, or the bounds of what is chosen from the measured cost of a"
        " save and the failure rate.",
        variables.CHECKPOINT_INTERVAL,
        "auto",
    ),
    Option(
        "checkpoint-quota",
        "BYTES",
        "What the checkpoints of the job may take together, such as 200G: older ones are deleted"
        " early to make room, the last complete one never. A save that does not fit beside it"
        " fails, and the job goes on. Blocks of --block-store do not count. Default: no bound.",
        variables.CHECKPOINT_QUOTA,
    ),
    Option(
        "ft-arg",
        "TEMPLATE",
        "One more argument for the command, such as --local-batch={local_batch}. {NAME=VALUE} gives"
        " a value for the case that there is no plan; without one such an argument is left out. May"
        " be repeated; the arguments stand in this order behind those of the command.",
        many=True,
    ),
    Option(
        "on-preempt",
        "COMMAND",
        "Shell command for a program without a session: run by rank 0 when a signal to save"
        " arrives; FT_CHILD_PID is the program. When it has ended, the program is stopped and the"
        " job is requeued. The program does not see the signals themselves.",
        variables.ON_PREEMPT,
    ),
    Option("on-preempt-each", "", "Run the command of --on-preempt on every rank."),
    Option(
        "on-resume",
        "COMMAND",
        "Shell command that every rank runs before the program when the job has come back.",
        variables.ON_RESUME,
    ),
    Option(
        "chain",
        "FILE",
        "Tasks that the program trains one after the other on the same ranks, see slurm_ft.train."
        " `slurm-ext chain add` appends to them while the job runs.",
        variables.CHAIN,
    ),
    Option(
        "requeue",
        "auto|always|never",
        "Whether ft-run may requeue the job. auto: where something was saved and no framework in"
        " the program requeues by itself. always: also where nothing says so.",
        variables.REQUEUE,
        "auto",
    ),
    Option("no-requeue", "", "The same as --requeue=never."),
    Option(
        "max-requeues",
        "CAUSE=N[,..]",
        "Most requeues for a cause over the life of the job: preempted, time-limit, node-fail,"
        " daemon, operator, lost-peer, user-error, no-progress, unknown. N may be unlimited.",
        variables.MAX_REQUEUES,
    ),
    Option(
        "launcher",
        "auto|yes|no",
        "Whether the command is a launcher such as torchrun, which starts the ranks of its node and"
        " numbers them itself. auto: it is torchrun, accelerate or deepspeed; or one task stands on"
        " each node with several GPUs that were not asked for by task (with --ntasks-per-node=1:"
        " however they were asked for), and it is not slurm_ft.train. Rank 0 says so, and what the"
        " first attempt of a job found in that way holds for all of them.",
        variables.LAUNCHER,
        "auto",
    ),
    Option(
        "after",
        "CODE",
        "In place of a command, as the last line of a batch script: what srun ft-run ended with."
        " Where no ft-run of the step was left to decide (Slurm had killed the step), the job is"
        " requeued from here if it may be. Ends with CODE. With the options of that ft-run.",
    ),
    Option("verbose", "", "Tell on stderr what was decided and why."),
    Option("version", "", "Tell the release."),
    Option("help", "", "Tell the options."),
)
_BY_NAME = {option.name: option for option in OPTIONS}
_SHORT = {"-h": "help", "-V": "version", "-v": "verbose"}


class Options:
    """What was asked. ``given`` are the names whose value came from the command line or from the
    environment, so that a default can give way to something better. ``places`` says where each
    stands, for messages: as the option, or as the variable that filled it."""

    __slots__ = ("command", "ft_args", "given", "places", "values")

    def __init__(
        self,
        values: dict[str, str],
        given: frozenset[str],
        places: dict[str, str],
        ft_args: tuple[str, ...],
        command: tuple[str, ...],
    ) -> None:
        self.values = values
        self.given = given
        self.places = places
        self.ft_args = ft_args
        self.command = command

    def __getitem__(self, name: str) -> str:
        """The text of an option; empty where there is none."""
        return self.values[name]

    def on(self, name: str) -> bool:
        """Whether a switch was given."""
        return bool(self.values[name])

    def seconds(self, name: str) -> float | None:
        """A time in seconds, ``None`` where it was not given."""
        text = self.values[name]
        return to_seconds(text, self.places[name]) if text else None


def to_seconds(text: str, place: str) -> float:
    """A time above 0 in seconds, or UsageError naming ``place``."""
    try:
        value = parse_duration(text)
    except ValueError:
        value = 0.0
    if not value:
        raise UsageError(f"{place}={text}: not a time above 0; write {FORMS}")
    return value


def parse(argv: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Options and the user's command. Raises UsageError with the fix."""
    values = {option.name: option.default for option in OPTIONS}
    given: set[str] = set()
    places = {option.name: f"--{option.name}" for option in OPTIONS}
    for option in OPTIONS:
        text = environment.get(option.environment, "") if option.environment else ""
        if text:
            values[option.name] = text
            given.add(option.name)
            places[option.name] = option.environment
    ft_args: list[str] = []
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            at -= 1
            break
        name, equals, text = word.partition("=")
        option = _BY_NAME.get(_SHORT.get(name, name[2:] if name.startswith("--") else ""))  # type: ignore[assignment]
        if option is None:
            raise UsageError(f"{name}: no such option; see ft-run --help")
        if not option.metavar:
            if equals:
                raise UsageError(f"{name} takes no value; write {name}")
            text = "yes"
        elif not equals:
            # Templates begin with "--", too; whatever else does was meant to stand for itself.
            if at == len(argv) or argv[at] == "--" or _is_option(argv[at], option):
                raise UsageError(f"{name} wants a value; write {name}={option.metavar}")
            text = argv[at]
            at += 1
        if option.many:
            ft_args.append(text)
            continue
        if option.metavar and not text:
            raise UsageError(f"{name}= is empty; write {name}={option.metavar}")
        values[option.name] = text
        given.add(option.name)
        places[option.name] = f"--{option.name}"
    if values["on-preempt-each"] and not values["on-preempt"]:
        raise UsageError(
            "--on-preempt-each runs the command of --on-preempt on every rank, and there is none;"
            " add --on-preempt=COMMAND"
        )
    if values["no-requeue"]:
        values["requeue"] = "never"
    for name in ("requeue", "launcher"):
        _check_choice(name, values[name], places[name])
    if values["after"]:
        _check_after(values["after"], argv[at:])
    for name in ("grace", "collective-timeout"):
        if values[name]:
            # The program reads a number.
            values[name] = seconds_text(to_seconds(values[name], places[name]))
    if values["checkpoint-quota"]:
        _check_quota(values["checkpoint-quota"], places["checkpoint-quota"])
    interval = values["checkpoint-interval"]
    values["checkpoint-interval"] = _interval(interval, places["checkpoint-interval"])
    return Options(values, frozenset(given), places, tuple(ft_args), tuple(argv[at:]))


def _is_option(word: str, option: Option) -> bool:
    """Whether a word that follows an option without ``=`` is another one, and not its value."""
    return not option.many and word.startswith("--") and word[2:].partition("=")[0] in _BY_NAME


def _check_after(text: str, command: Sequence[str]) -> None:
    if not (text.isascii() and text.isdigit() and int(text) <= _LARGEST_CODE):
        raise UsageError(f"--after={text}: no exit code; write --after=$? behind srun")
    if command:
        raise UsageError(
            f"--after={text} runs no command, and {command[0]!r} is one; write it behind srun"
        )


def _check_choice(name: str, text: str, place: str) -> None:
    choices = _BY_NAME[name].metavar.split("|")
    if text not in choices:
        raise UsageError(f"{place}={text}: not one of {', '.join(choices)}")


def _check_quota(text: str, place: str) -> None:
    try:
        parse_bytes(text)
    except ValueError as exc:
        raise UsageError(f"{place}={text}: {exc}; write a number, or one as in 200G") from exc


def _interval(text: str, place: str) -> str:
    """The same in plain seconds."""
    if text == "auto":
        return text
    low, dash, high = text.partition("-")
    try:
        if "-" in high:
            raise UsageError(f"{place}={text}: more than two bounds")
        bounds = [to_seconds(word, place) for word in ((low, high) if dash else (low,))]
    except UsageError as exc:
        raise UsageError(
            f"{place}={text}: no interval; write auto, bounds such as 2m-30m or 120-1800, or one"
            " time above 0"
        ) from exc
    if bounds[0] > bounds[-1]:
        raise UsageError(f"{place}={text}: the bounds are the wrong way round; write {high}-{low}")
    return "-".join(seconds_text(bound) for bound in bounds)
