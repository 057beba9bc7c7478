"""What slurm-ext(1) says of replays and no parser can know: columns of files, and examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from slurm_ext.cli.roff import bold, marked, tagged, text, verbatim
from slurm_ext.estimate.csvtext import TEMPLATE
from slurm_ext.sim.costs import KINDS
from slurm_ext.sim.outages import COLUMNS
from slurm_ext.sim.readers.csvtrace import STANDARD_COLUMNS

_EXAMPLES = (
    (
        "A workload that comes along, on two GPU types, with pictures and all numbers:",
        "slurm-ext simulate --trace FM-2-vit --cluster 8x4xV100,4x4xA100 \\",
        "    --policy fifo,srtf,titan --plots out --json before.json",
    ),
    (
        "What the accounting of last month would have become; the model is the job's name up to a"
        " dash. `slurm-ext report fit --help` prints the command of sacct:",
        "slurm-ext simulate --trace last-month.txt --format sacct --cluster 16x4xA100 \\",
        "    --model-pattern '^[a-z]+(?=-)' --policy backfill,titan",
    ),
    (
        "The same with estimates that are off by up to half, decided every minute, and beside the"
        " first run:",
        "slurm-ext simulate --trace FM-2-vit --cluster 8x4xV100,4x4xA100 \\",
        "    --estimate-error 50 --interval 60 --policy fifo,srtf,titan --json after.json",
        "slurm-ext simulate compare before.json after.json",
    ),
    (
        "With throughputs of one's own, of which the daemon's table is made too:",
        "slurm-ext table template > mine.csv",
        "slurm-ext simulate --trace jobs.csv --table mine.csv --cluster 4x8xH100",
    ),
)


def replay_files() -> Iterator[str]:
    """Columns of the CSV files that `slurm-ext simulate` reads."""
    yield ".SH FILES OF A REPLAY"
    yield marked(
        "All are CSV with a heading and may be gzipped but for the outages. docs/traces.md tells"
        " more about workloads, docs/simulator.md about the rest."
    )
    yield from tagged(
        bold("--trace"),
        marked(
            f"{_named(STANDARD_COLUMNS)}; needed are `job_id`, `submit_s` and `gpus`, and of each"
            " job either `duration_s` or `model`, `batch_size` and `total_samples`. `limit_s` and"
            " `gpu_type` are understood. Other formats, among them the output of sacct and SWF, are"
            " recognised by the first line."
        ),
    )
    yield from tagged(
        bold("--table"),
        marked(
            f"What `slurm-ext table template` prints: {_named(TEMPLATE)}."
            " Needed are `model`, `gpu_type`, `local_batch`, `placement` or `gpus` and `nodes`, and"
            " `step_time_s` or `throughput`."
        ),
    )
    yield from tagged(
        bold("--costs"),
        marked(
            "`kind`, `model`, `gpu_type`, `seconds`; an empty model or GPU type means any. Kinds:"
            f" {_named(KINDS)}."
        ),
    )
    yield from tagged(
        bold("--outages"),
        marked(
            f"{_named(COLUMNS)}; nodes are n1, n2, ... in the order of"
            " the groups, with leading zeros. Without `up_s` a node never comes back."
        ),
    )


def examples() -> Iterator[str]:
    """Section EXAMPLES."""
    yield ".SH EXAMPLES"
    for number, (words, *commands) in enumerate(_EXAMPLES):
        if number:
            yield ".PP"
        yield marked(words) if "`" in words else text(words)
        yield from verbatim(commands)


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
