"""The one table of every ``--ft-*`` option: name, grammar, bounds, default, environment, text.

The C plugin (``spank/ft_options.h``), the Lua module (``site/lua/ft_options.lua``) and the page
``docs/directives.md`` are written from this table by ``python -m slurm_ext.domain.options --emit
c|lua|markdown``; a test compares the committed files with that output. Nothing here parses: the
grammars live in :mod:`slurm_ext.domain.grammar`, in ``spank/grammar.c`` and in
``site/lua/ft_grammar.lua``, and a property test holds the three to the same answers.

Why the environment twin of ``--ft-model`` is ``SLURM_FT_MODEL`` while the job sees ``FT_MODEL``:
as with Slurm's own ``SBATCH_*`` and ``SLURM_*``, what a job is told must not become the input of
an ``sbatch`` that runs inside that job.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from enum import StrEnum

# AdminComment is carried in every job record and in every answer of squeue: keep it small.
MAX_DIRECTIVE_BYTES = 1024
# Twin (input) and job-side (output) variables; the name follows in capitals, "-" as "_".
TWIN_PREFIX = "SLURM_FT_"
JOB_ENV_PREFIX = "FT_"

MAX_GPUS = 4096
MAX_GPU_RANGES = 16
YEAR_S = 365 * 86400


class Grammar(StrEnum):
    """Form of an option's value. One parser per member and language."""

    MODEL = "model"  # NAME[@REVISION]
    PATH = "path"
    COUNT = "count"  # whole number in [low, high]
    DECIMAL = "decimal"  # above 0, at most `high`, four digits after the point
    BATCH = "batch"  # N or N-M
    GPUS = "gpus"  # requested, auto or a list of counts and ranges
    SHAPE = "shape"  # one to four whole numbers joined by "x"
    LAYERS = "layers"  # one of `choices`, or a whole number
    CHOICE = "choice"
    SWITCH = "switch"  # yes or no
    DEADLINE = "deadline"
    QUALITY = "quality"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Option:
    """One ``--ft-*`` option. ``low`` and ``high`` bound the value in the grammar's own unit.

    ``default`` is the canonical text of the value that holds when the option is absent; the empty
    string means that there is none. ``keys`` are the keys of the directive's JSON document.
    ``usage`` is the line of ``sbatch --help``; ``fix`` ends every refusal.
    """

    name: str
    grammar: Grammar
    metavar: str
    keys: tuple[str, ...]
    usage: str
    fix: str
    doc: str
    default: str = ""
    low: int = 1
    high: int = 1
    choices: tuple[str, ...] = ()
    excludes: str = ""

    @property
    def flag(self) -> str:
        """The option as a user types it."""
        return f"--ft-{self.name}"

    @property
    def twin(self) -> str:
        """Environment variable that fills the option where it was not given."""
        return TWIN_PREFIX + self.name.upper().replace("-", "_")

    @property
    def job_env(self) -> str:
        """Environment variable in which the job finds the value."""
        return JOB_ENV_PREFIX + self.name.upper().replace("-", "_")


OPTIONS: tuple[Option, ...] = (
    Option(
        name="model",
        grammar=Grammar.MODEL,
        metavar="NAME[@REVISION]",
        keys=("model", "revision"),
        high=96,
        usage="foundation model to fine-tune, as the throughput table names it",
        fix="write a name such as vit-large or org/model@revision (letters, digits and ._/+:-)",
        doc="The model decides which rows of the throughput table describe the job. Without it, or "
        "with a model that the table does not know, the job is planned from its time limit. Model "
        "names may have up to 96 characters, revisions up to 64.",
    ),
    Option(
        name="dataset",
        grammar=Grammar.PATH,
        metavar="PATH",
        keys=("dataset",),
        high=255,
        usage="dataset card of the training data",
        fix="write a path of letters, digits and ._/+:@%,=#~-, up to 255 characters, without ~ "
        "or - in front",
        doc="A relative path is taken from the job's working directory. The path is not opened at "
        "submission. A leading `~` is refused, since no shell expands it in an `#SBATCH` line.",
    ),
    Option(
        name="samples",
        grammar=Grammar.COUNT,
        metavar="N",
        keys=("samples",),
        high=10**12,
        usage="training samples in one epoch",
        fix="write a whole number from 1 to 1000000000000, without separators or suffixes",
        doc="With `--ft-epochs` it gives the amount of work.",
    ),
    Option(
        name="epochs",
        grammar=Grammar.DECIMAL,
        metavar="X",
        keys=("epochs",),
        high=10**6,
        excludes="steps",
        usage="passes over the training data, e.g. 3 or 0.5",
        fix="write a number above 0 and up to 1000000 with at most four digits after the point, "
        "such as 3 or 0.5",
        doc="May be a fraction.",
    ),
    Option(
        name="steps",
        grammar=Grammar.COUNT,
        metavar="N",
        keys=("steps",),
        high=10**9,
        excludes="epochs",
        usage="optimizer steps, instead of --ft-epochs",
        fix="write a whole number from 1 to 1000000000",
        doc="An optimizer step is one update of the weights with one global batch.",
    ),
    Option(
        name="batch",
        grammar=Grammar.BATCH,
        metavar="N[-M]",
        keys=("batch_min", "batch_max"),
        high=2**24,
        usage="global batch in samples, or the range it may take",
        fix="write a whole number such as 256, or a range such as 256-1024, up to 16777216",
        doc="Samples per optimizer step over all GPUs. One number is kept constant whatever GPU "
        "count the job gets (local batch x GPUs x accumulation); a GPU count that cannot keep it "
        "is not used. A range lets the planner move it; the learning rate is never touched.",
    ),
    Option(
        name="gpus",
        grammar=Grammar.GPUS,
        metavar="requested|auto|LIST",
        keys=("gpus",),
        default="requested",
        high=MAX_GPUS,
        usage="GPU counts the job may run on, e.g. 1,2,4-8; auto: 1, 2 and multiples of 4",
        fix="write requested, auto, or a list of counts and ranges such as 1,2,4-8 (up to 4096, "
        "at most 16 separate ranges)",
        doc="`requested` means exactly what the script asked for. With anything else you promise "
        "that the script reads its counts from its environment (`SLURM_NTASKS`, "
        "`SLURM_GPUS_ON_NODE`, ...), and that it was asked for in a form that can be resized; see "
        "below. A list must hold the requested count; `auto` always holds it, also where it is "
        "none of those, such as 3.",
    ),
    Option(
        name="input",
        grammar=Grammar.SHAPE,
        metavar="SHAPE",
        keys=("input_shape",),
        high=10**7,
        usage="input size: resolution (224) or sequence length (2048)",
        fix="write one to four whole numbers joined by x, such as 224, 224x224 or 2048",
        doc="Part of the key under which the throughput table keeps measurements.",
    ),
    Option(
        name="frozen",
        grammar=Grammar.LAYERS,
        metavar="none|backbone|N",
        keys=("frozen",),
        default="none",
        high=10**5,
        choices=("none", "backbone"),
        usage="layers that are not trained",
        fix="write none, backbone, or how many layers are frozen (1 to 100000)",
        doc="`backbone` freezes all but the head; a number freezes that many layers from the "
        "input side.",
    ),
    Option(
        name="precision",
        grammar=Grammar.CHOICE,
        metavar="fp32|tf32|fp16|bf16|fp8",
        keys=("precision",),
        choices=("fp32", "tf32", "fp16", "bf16", "fp8"),
        usage="number format of the arithmetic",
        fix="write fp32, tf32, fp16, bf16 or fp8",
        doc="Where absent, any precision of the throughput table may describe the job.",
    ),
    Option(
        name="grad-checkpointing",
        grammar=Grammar.SWITCH,
        metavar="yes|no",
        keys=("grad_checkpointing",),
        default="no",
        choices=("yes", "no"),
        usage="whether activations are recomputed to save memory",
        fix="write yes or no",
        doc="Part of the key of the throughput table.",
    ),
    Option(
        name="class",
        grammar=Grammar.CHOICE,
        metavar="guaranteed|preemptible",
        keys=("job_class",),
        default="guaranteed",
        choices=("guaranteed", "preemptible"),
        usage="whether the job may be stopped and requeued for others",
        fix="write guaranteed or preemptible",
        doc="A guaranteed job is never preempted by slurm-ext. What Slurm's own preemption does "
        "is decided by the partition and QOS.",
    ),
    Option(
        name="deadline",
        grammar=Grammar.DEADLINE,
        metavar="TIME|now+TIME",
        keys=("deadline_s",),
        usage="when the result is needed, e.g. 2030-05-01T08:00 or now+1-12",
        fix="write YYYY-MM-DD[THH:MM[:SS][Z|+HH:MM]], or now+ and a time with a colon, dash or "
        "unit, such as now+2:00:00, now+1-12 or now+90minutes",
        doc="A wish that raises the job's weight, not a limit: Slurm's own `--deadline` kills. "
        "Times without a zone are local to the machine that submits. A bare number after `now+` "
        "is refused because Slurm reads it as seconds in `--begin` and as minutes in `--time`.",
    ),
    Option(
        name="merge",
        grammar=Grammar.CHOICE,
        metavar="no|account|any",
        keys=("merge",),
        default="no",
        choices=("no", "account", "any"),
        usage="consent to train together with jobs of the same account or of anybody",
        fix="write no, account or any",
        doc="Consent on both sides is needed before two jobs share an allocation.",
    ),
    Option(
        name="switch",
        grammar=Grammar.SWITCH,
        metavar="yes|no",
        keys=("switch",),
        default="no",
        choices=("yes", "no"),
        usage="consent to follow another job in its allocation",
        fix="write yes or no",
        doc="Lets the job take over the allocation of a finished job of the same kind.",
    ),
    Option(
        name="quality",
        grammar=Grammar.QUALITY,
        metavar="METRIC>=X|METRIC<=X",
        keys=("quality",),
        high=10**9,
        usage="result that makes the job a success, e.g. top1>=0.81 (quote it in a shell)",
        fix="write a metric, >= or <=, and a number, such as top1>=0.81 or loss<=0.35, quoted "
        "where a shell reads it",
        doc="Used to validate a result that another job produced for this one. At most six digits "
        "after the point.",
    ),
    Option(
        name="max-pause",
        grammar=Grammar.TIME,
        metavar="TIME",
        keys=("max_pause_s",),
        high=30 * 86400,
        usage="longest pause the job tolerates",
        fix="write minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS, from one second to 30 "
        "days",
        doc="Consent to be moved: the daemon may let the job save and be requeued where that seats "
        "a waiting job and the job is expected to train again within this time. In Slurm's time "
        "grammar: a bare number is minutes.",
    ),
    Option(
        name="max-gpu-hours",
        grammar=Grammar.DECIMAL,
        metavar="X",
        keys=("max_gpu_hours",),
        high=10**7,
        usage="most GPU hours that a chosen GPU count may cost",
        fix="write a number above 0 and up to 10000000 with at most four digits after the point",
        doc="A GPU count whose estimated cost is above the cap is not chosen. It never stops a "
        "running job.",
    ),
)

BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}


def main(argv: list[str] | None = None) -> int:
    """Write one of the generated files to stdout."""
    from slurm_ext.domain.options_emit import WRITERS

    parser = argparse.ArgumentParser(prog="python -m slurm_ext.domain.options")
    parser.add_argument("--emit", choices=sorted(WRITERS), required=True)
    sys.stdout.write(WRITERS[parser.parse_args(argv).emit]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
