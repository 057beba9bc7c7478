"""The manual page of ``ft-run``: options and exit codes from the program, the rest written here.

A module of its own beside `slurm_ext.cli.manual`, because that one reads argparse's parsers and
``ft-run`` has none.
"""

from __future__ import annotations

from slurm_ext.cli.roff import bold, italic, marked, tagged, text, title, verbatim
from slurm_ft import exits, variables
from slurm_ft.launch.errors import NOT_EXECUTABLE, NOT_FOUND, USAGE
from slurm_ft.launch.options import OPTIONS, Option
from slurm_ft.launch.templates import NAMES
from slurm_ft.launch.usage import SUMMARY
from slurm_ft.requeue.limits import DEFAULT_LIMITS
from slurm_ft.requeue.limits import NAMES as CAUSES

_EXAMPLE = (
    "#SBATCH --ntasks=4 --gpus-per-task=1 --time=4:00:00",
    "#SBATCH --requeue --open-mode=append --signal=USR2@300",
    "#SBATCH --ft-model=vit-large --ft-samples=50000 --ft-epochs=3",
    "#SBATCH --ft-batch=256 --ft-gpus=1,2,4,8",
    "srun ft-run --grace=300 --ft-arg=--local-batch={local_batch=64} -- \\",
    "    python train.py",
)


# On the page of each command that has options with a time.
TIMES = (
    "Every option that takes a TIME takes it in one form: a plain number is seconds, `s`, `m`, `h`"
    " and `d` behind a number are its unit (`90s`, `10m`, `1.5h`, `2d`), and `MM:SS`, `HH:MM:SS`,"
    " `D-HH`, `D-HH:MM` and `D-HH:MM:SS` are read as Slurm reads them. Only the `--ft-*` options"
    " of sbatch, which stand beside `--time`, follow Slurm alone: there a plain number is minutes,"
    " and there are no letters."
)


def _option(option: Option) -> list[str]:
    tag = bold(f"--{option.name}")
    if option.metavar:
        tag = bold(f"--{option.name}=") + italic(option.metavar)
    words = option.words
    if option.default:
        words += f" Default: {option.default}."
    if option.environment:
        words += f" Environment: {option.environment}."
    return tagged(tag, text(words))


def _limits() -> str:
    pairs = [
        f"{CAUSES[cause]} {'unlimited' if most is None else most}"
        for cause, most in DEFAULT_LIMITS.items()
    ]
    return f"Without --max-requeues: {', '.join(pairs)}."


def _variables() -> list[str]:
    table = (
        (
            "RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
            "The place of this rank, as torch and others read it. The port lies outside the"
            " kernel's ephemeral range and changes with the attempt. A launcher gets the last two.",
        ),
        (f"{variables.JOB}, {variables.ATTEMPT}", "The job and how often it has come back."),
        (
            f"{variables.CHECKPOINT_DIR}, {variables.STATE_DIR}",
            "Directories that are the same in every attempt.",
        ),
        (
            f"{variables.GPUS}, {variables.NODES}",
            "What Slurm granted, which is the truth about this attempt.",
        ),
        (
            ", ".join((variables.LOCAL_BATCH, variables.ACCUMULATION, variables.GLOBAL_BATCH)),
            "The plan within what was granted: samples per GPU and micro-batch, micro-batches per"
            " optimizer step, samples per optimizer step. Absent without a plan.",
        ),
        (
            ", ".join(
                (
                    variables.STAGES,
                    variables.MICRO_BATCHES,
                    variables.PRECISION,
                    variables.GRAD_CHECKPOINTING,
                    variables.FROZEN,
                )
            ),
            "The rest of the plan's configuration.",
        ),
        (
            f"{variables.COLLECTIVE_TIMEOUT_S}, {variables.INIT_TIMEOUT_S}",
            "Time-outs in seconds, in an order in which a shorter one never fires before a longer"
            " one is due; TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC follows from them.",
        ),
    )
    return [line for names, words in table for line in tagged(bold(names), text(words))]


def launch_page() -> list[str]:
    """ft-run(1)."""
    return [
        *title("ft-run", 1, SUMMARY),
        ".SH SYNOPSIS",
        f"{bold('srun ft-run')} [{italic('OPTION')} ...] [{bold('--')}] {italic('COMMAND')}"
        f" [{italic('ARGUMENT')} ...]",
        ".SH DESCRIPTION",
        marked(
            "`ft-run` stands in front of the program of each rank. It tells the program its place"
            " and the plan's configuration, passes signals on, and ends with the program's own exit"
            " code. On rank 0 it also decides, when the program has ended, whether the job comes"
            " back, and requeues it where Slurm does not do so by itself."
        ),
        ".PP",
        marked(
            "A program takes part with a session (three lines of Python, `slurm_ft.session`):"
            " when a signal comes, all ranks are saved at the same step, and go on from there in"
            " the next attempt. A program that cannot be changed takes part with `--on-preempt` and"
            " `--on-resume`. What the user has set in the environment is left as it is. Outside"
            " Slurm the program runs as one rank."
        ),
        *verbatim(_EXAMPLE),
        ".SH OPTIONS",
        text("An option given on the command line goes before its environment variable."),
        *(line for option in OPTIONS for line in _option(option)),
        ".SH TIMES",
        marked(TIMES),
        ".PP",
        marked(
            "Variables that stand for such an option (`FT_GRACE_S`, `FT_COLLECTIVE_TIMEOUT_S`,"
            " `FT_CHECKPOINT_INTERVAL`), and `FT_INIT_TIMEOUT_S`, `FT_PAUSE_MOVE_S`, `FT_MTBF_S`"
            " and `FT_PROGRESS_INTERVAL_S`, take the same; the program finds them in seconds where"
            " `ft-run` gives them. Bounds as in `--checkpoint-interval=2m-30m` know no days before"
            " a dash."
        ),
        ".SH ARGUMENTS FROM THE PLAN",
        text(
            "In --ft-arg, {NAME} stands for one of: "
            + ", ".join(NAMES)
            + ". {NAME=VALUE} says what"
            " stands in without it; {{ and }} are braces."
        ),
        ".SH ENVIRONMENT OF THE PROGRAM",
        *_variables(),
        ".SH COMING BACK",
        marked(
            "Rank 0 reads the cause from Slurm's record of the job: preempted, time limit, node"
            " failure; a signal from somebody else; a lost peer, which the session tells; an error"
            " of the program. After a preemption with `PreemptMode=REQUEUE` and a node failure"
            " Slurm requeues by itself. A job that was cancelled, or submitted with `--no-requeue`,"
            " does not come back; neither does one that saved nothing new in several attempts. Each"
            " end is told in one line with its reason, and kept."
        ),
        ".PP",
        text(_limits()),
        ".PP",
        marked(
            "Lightning and submitit requeue by themselves; where one of them is seen, it is left to"
            " do so (`--requeue=always` takes over)."
        ),
        ".SH SIGNALS",
        marked(
            "A signal of `--signals` asks the program to save and leave. Slurm gives it to the"
            " program directly; what comes from elsewhere is passed on, once. Other signals are"
            " passed on as they are. A program that is still there shortly before SIGKILL comes is"
            " killed by `ft-run`, and the job comes back from its last checkpoint. When `ft-run`"
            " itself is killed, the kernel kills the program."
        ),
        ".PP",
        marked(
            "`torchrun` kills its ranks 30 s after SIGTERM, whatever Slurm grants, unless it is a"
            " release that reads `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` (torch 2.13 does, 2.6 does not)."
            " One task per GPU, without a launcher, has no such limit; neither has a warning by"
            " `--signal=USR2@SECONDS`."
        ),
        ".SH EXIT STATUS",
        *tagged(italic("N"), text("The program's own, 128+N where it was ended by signal N.")),
        *tagged(
            bold(", ".join(str(code) for code in sorted(exits.ASKS_FOR_REQUEUE))),
            text("The session left the program so that the job comes back."),
        ),
        *tagged(bold(str(USAGE)), text("The command line is wrong; nothing was started.")),
        *tagged(bold(str(NOT_EXECUTABLE)), text("The command cannot be executed.")),
        *tagged(bold(str(NOT_FOUND)), text("The command was not found.")),
        ".SH FILES",
        *tagged(
            italic("~/.slurm-ext/state/CLUSTER-ID"),
            text("Attempts of the job, status of each rank."),
        ),
        *tagged(
            italic("SPOOL/UID/attempts-ID.json, SPOOL/UID/progress-ID.json"),
            marked("What the daemon and `slurm-ext queue` are told."),
        ),
        *tagged(italic("SPOOL/plans/ID.json"), text("The plan of the job.")),
        ".SH SEE ALSO",
        ".BR slurm\\-ext (1),",
        ".BR slurm\\-ext\\-directives (7),",
        ".BR sbatch (1),",
        ".BR srun (1)",
    ]
