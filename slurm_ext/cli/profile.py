"""``slurm-ext table profile``: real short trials of a model, written as rows of the table.

By itself it submits one Slurm job, which takes its allocation once and runs the trials in it one
after another, as steps of 1, 2, ... of its GPUs. One at a time: two trials side by side would share
links and memory bandwidth, and the table would hold what neither of them does alone. After each
trial the file is written anew, and what is in it is not run again, so a job that ends early has
lost one trial.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slurm_ext.cli.measure import (
    Launcher,
    LocalLauncher,
    Seen,
    StepLauncher,
    Work,
    run_trial,
    split_command,
)
from slurm_ext.domain.duration import FORMS, parse_duration
from slurm_ext.domain.errors import ConfigError, DataError, SlurmCommandError
from slurm_ext.domain.spans import counted
from slurm_ext.domain.walltime import format_walltime
from slurm_ext.estimate.csvtext import (
    COST_TEMPLATE,
    TEMPLATE,
    format_costs,
    format_measurements,
    parse,
    placement_text,
)
from slurm_ext.estimate.measurement import Key, Measurement
from slurm_ext.estimate.trials import (
    MEASURED_STEPS,
    WARMUP_STEPS,
    Grid,
    Outcome,
    Trial,
    Worth,
    cold_starts,
    hopeless,
    measurement,
    median_step,
    trials,
    worth,
)
from slurm_ft.train.options import PRESETS
from slurm_ft.train.options import parse as parse_trainer

# 50,000 samples three times: the example of the documentation.
JOB_SAMPLES = 150_000
# What a published table of fine-tuning throughputs took: 64 GPUs for 37 hours.
PUBLISHED_GPU_H = 64 * 37
_SBATCH_LIMIT_S = 60


def register(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the action to ``slurm-ext table``."""
    parser = actions.add_parser(
        "profile",
        help="measure a model by short trials in a Slurm job",
        description="Run short trials of a model and write what they measure as rows that"
        " slurm-ext table import reads. Submits one job for it, unless told otherwise.",
        epilog="Lists are separated by commas. All combinations that exist are run. In --command,"
        " {local_batch}, {accumulation}, {global_batch}, {gpus}, {nodes}, {stages},"
        " {micro_batches}, {precision}, {frozen}, {grad_checkpointing} and {steps} are replaced;"
        " the command must report by slurm_ft.session.",
    )
    what = parser.add_argument_group("what is run")
    what.add_argument(
        "-m",
        "--model",
        metavar="NAME",
        help="model name to write into the rows (default: the preset)",
    )
    what.add_argument(
        "--preset",
        metavar="NAME",
        choices=sorted(PRESETS),
        help=f"sizes of the reference trainer: {', '.join(sorted(PRESETS))}",
    )
    what.add_argument(
        "--command",
        metavar="COMMAND",
        dest="program",  # "command" is the sub-command of slurm-ext
        help="measure a program of your own instead of the reference trainer",
    )
    what.add_argument(
        "--revision",
        metavar="NAME",
        default="",
        help="model revision to write into the rows (default: none)",
    )
    what.add_argument(
        "--input",
        metavar="SHAPE",
        help="input shape to write into the rows (default: the trainer's; none with --command)",
    )
    what.add_argument(
        "--environment",
        metavar="WORD",
        help="software environment to write into the rows (default: what the program reports)",
    )
    what.add_argument(
        "--gpu-type",
        metavar="TYPE",
        help="GPU type to write into the rows (default: what the program reports)",
    )
    what.add_argument(
        "--trainer",
        metavar="OPTIONS",
        default="",
        help="more options of the reference trainer, in quotes (default: none)",
    )
    grid = parser.add_argument_group("configurations")
    grid.add_argument("-G", "--gpus", metavar="LIST", default="1", help="GPU counts (default: 1)")
    grid.add_argument(
        "-b",
        "--local-batch",
        metavar="LIST",
        default="8",
        dest="local_batches",
        help="samples per GPU and micro-batch (default: 8)",
    )
    grid.add_argument(
        "--accumulation",
        metavar="LIST",
        default="1",
        dest="accumulations",
        help="micro-batches that are added up to one optimizer step (default: 1)",
    )
    grid.add_argument(
        "--precision",
        metavar="LIST",
        default="fp32",
        dest="precisions",
        help="number formats, as for --ft-precision (default: fp32)",
    )
    grid.add_argument(
        "--frozen",
        metavar="LIST",
        default="none",
        help="layers not trained: none, backbone or how many from the input (default: none)",
    )
    grid.add_argument(
        "--stages",
        metavar="LIST",
        default="1",
        help="pipeline stages, of one GPU each (default: 1, no pipeline)",
    )
    grid.add_argument(
        "--micro-batches",
        metavar="LIST",
        default="",
        help="parts into which a pipeline cuts its batch (default: as many as stages)",
    )
    grid.add_argument(
        "--grad-checkpointing", metavar="LIST", default="no", help="no, yes or both (default: no)"
    )
    grid.add_argument(
        "--gpus-per-node",
        metavar="N",
        type=int,
        help="GPUs taken on each node (default: all on one node)",
    )
    size = parser.add_argument_group("size of a trial")
    size.add_argument(
        "--steps",
        metavar="N",
        type=int,
        default=MEASURED_STEPS,
        help=f"timed steps (default: {MEASURED_STEPS})",
    )
    size.add_argument(
        "--warmup",
        metavar="N",
        type=int,
        default=WARMUP_STEPS,
        help=f"steps before them that are not timed (default: {WARMUP_STEPS})",
    )
    size.add_argument(
        "--repeat",
        metavar="N",
        type=int,
        default=1,
        help="runs of each trial (default: 1)",
    )
    size.add_argument(
        "--limit",
        metavar="TIME",
        type=_time,
        default=600.0,
        help="most that one run may take, e.g. 90s or 10m (default: 600)",
    )
    out = parser.add_argument_group("result")
    out.add_argument(
        "-O",
        "--output",
        metavar="FILE",
        type=Path,
        help="file of the rows (default: profile-MODEL.csv)",
    )
    out.add_argument("--again", action="store_true", help="run what is in the file once more")
    out.add_argument(
        "--job-samples",
        metavar="N",
        type=int,
        default=JOB_SAMPLES,
        help=f"samples of a usual job, to tell how many pay the cost back (default: {JOB_SAMPLES})",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--script", action="store_true", help="print the job's script, submit nothing")
    how.add_argument("--local", action="store_true", help="run here, without Slurm")
    how.add_argument("--here", action="store_true", help="run in the allocation at hand")
    parser.add_argument(
        "--sbatch",
        metavar="OPTION",
        action="append",
        default=[],
        help="one more line of #SBATCH for the job; may be given several times",
    )
    parser.add_argument("--no-gpus", action="store_true", help="ask Slurm for CPUs only")
    parser.set_defaults(run=run)


def _time(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r}: {exc}; write {FORMS}") from exc


def run(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> int:
    """Submit, print, or measure."""
    environ = os.environ if environ is None else environ
    grid = read_grid(args)
    per_node = args.gpus_per_node or max(grid.gpus)
    if per_node < 1 or args.steps < 3 or args.warmup < 0 or args.repeat < 1 or args.limit <= 0:
        raise ConfigError(
            "table profile",
            "--gpus-per-node and --repeat start at 1, --steps at 3, --limit above 0",
            "write larger numbers",
        )
    planned = trials(grid, per_node)
    model = args.model or args.preset
    if not model:
        raise ConfigError("table profile", "the rows have no model", "give --model=NAME")
    if args.program and args.preset:
        raise ConfigError("--preset", "is for the reference trainer", "give --command without it")
    output = args.output or Path(f"profile-{_file_word(model)}.csv")
    if args.local or args.here:
        if args.here and "SLURM_JOB_ID" not in environ:
            raise ConfigError("--here", "there is no allocation", "give --local, or neither")
        launcher: Launcher = LocalLauncher() if args.local else StepLauncher(not args.no_gpus)
        return _measure(args, environ, planned, launcher, model, output)
    script = job_script(args, planned, per_node, model, output)
    if args.script:
        print(script, end="")
        return 0
    return _submit(script)


def read_grid(args: argparse.Namespace) -> Grid:
    """The grid of the options. Raises ConfigError for a value that is none."""
    recompute = {"no": (False,), "yes": (True,), "both": (False, True)}
    if args.grad_checkpointing not in recompute:
        raise ConfigError(
            f"--grad-checkpointing={args.grad_checkpointing}", "unknown", "write no, yes or both"
        )
    return Grid(
        gpus=_numbers("--gpus", args.gpus),
        local_batches=_numbers("--local-batch", args.local_batches),
        accumulations=_numbers("--accumulation", args.accumulations),
        precisions=tuple(args.precisions.split(",")),
        grad_checkpointing=recompute[args.grad_checkpointing],
        frozen=tuple(args.frozen.split(",")),
        stages=_numbers("--stages", args.stages),
        micro_batches=_numbers("--micro-batches", args.micro_batches) if args.micro_batches else (),
    )


def job_script(
    args: argparse.Namespace, planned: Sequence[Trial], per_node: int, model: str, output: Path
) -> str:
    """The batch script: the largest trial's allocation, and this command inside it."""
    gpus = max(trial.gpus for trial in planned)
    nodes = math.ceil(gpus / per_node)
    # Each run may take its limit; few do. Slurm gets back what is left over.
    longest_s = 120 + len(planned) * args.repeat * (args.limit + 30)
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name=profile-{_file_word(model)}",
        f"#SBATCH --nodes={nodes} --ntasks={nodes * per_node} --ntasks-per-node={per_node}",
        f"#SBATCH --time={format_walltime(math.ceil(longest_s / 60) * 60)}",
        "#SBATCH --output=%x-%j.out --open-mode=append",
    ]
    if not args.no_gpus:
        lines.append("#SBATCH --gpus-per-task=1")
    lines += [f"#SBATCH {option}" for option in args.sbatch]
    words = [sys.executable, "-m", "slurm_ext.cli.main", "table", "profile", "--here"]
    words += _words(args, per_node, model, output)
    lines += ["set -euo pipefail", "exec " + shlex.join(words)]
    return "\n".join(lines) + "\n"


def _words(args: argparse.Namespace, per_node: int, model: str, output: Path) -> list[str]:
    """The options again, as the job will read them."""
    words = [f"--model={model}", f"--output={output.resolve()}", f"--gpus-per-node={per_node}"]
    for name, value in (
        ("preset", args.preset),
        ("command", args.program),
        ("revision", args.revision),
        ("input", args.input),
        ("environment", args.environment),
        ("gpu-type", args.gpu_type),
        ("trainer", args.trainer),
        ("gpus", args.gpus),
        ("local-batch", args.local_batches),
        ("accumulation", args.accumulations),
        ("precision", args.precisions),
        ("frozen", args.frozen),
        ("stages", args.stages),
        ("micro-batches", args.micro_batches),
        ("grad-checkpointing", args.grad_checkpointing),
        ("steps", args.steps),
        ("warmup", args.warmup),
        ("repeat", args.repeat),
        ("limit", args.limit),
        ("job-samples", args.job_samples),
    ):
        if value not in (None, ""):
            words.append(f"--{name}={value}")
    words += [f"--{name}" for name in ("again", "no-gpus") if getattr(args, name.replace("-", "_"))]
    return words


def _submit(script: str) -> int:
    argv = ["sbatch", "--parsable"]
    try:
        done = subprocess.run(
            argv, input=script, capture_output=True, text=True, timeout=_SBATCH_LIMIT_S, check=False
        )
    except FileNotFoundError as exc:
        raise SlurmCommandError(argv, 127, "there is no sbatch here; --local needs none") from exc
    except subprocess.TimeoutExpired as exc:
        raise SlurmCommandError(argv, None, f"no answer in {_SBATCH_LIMIT_S} s") from exc
    if done.returncode:
        raise SlurmCommandError(argv, done.returncode, done.stderr)
    print(f"job {done.stdout.strip()}")
    return 0


def _measure(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    planned: Sequence[Trial],
    launcher: Launcher,
    model: str,
    output: Path,
) -> int:
    options = shlex.split(args.trainer) + ([f"--preset={args.preset}"] if args.preset else [])
    work = Work(
        command=split_command(args.program) if args.program else (),
        options=tuple(options),
        warmup=args.warmup,
        steps=args.steps,
        limit_s=args.limit,
    )
    shape = args.input
    if shape is None:
        shape = "" if args.program else parse_trainer(options, {}).task.input_shape
    rows = _earlier(output)
    known = set() if args.again else {_bare(row.key) for row in rows}
    allocated = _allocated(environ, max(trial.gpus for trial in planned))
    began = time.monotonic()
    outcomes: list[Outcome] = []
    seen = Seen()
    print(_HEADING, flush=True)
    for trial in planned:
        bare = _bare(trial.key(model, "", "", revision=args.revision, input_shape=shape))
        if bare in known:
            print(_line(trial, "in the file already"), flush=True)
            continue
        for _ in range(args.repeat):
            if hopeless(trial, outcomes):
                print(_line(trial, "left out: a smaller batch ran out of memory"), flush=True)
                break
            outcome = run_trial(trial, work, launcher, seen, environ)
            outcomes.append(outcome)
            key = trial.key(
                model,
                args.gpu_type or gpu_type_of(seen.device),
                args.environment or seen.environment,
                revision=args.revision,
                input_shape=shape,
            )
            if not key.gpu_type and not outcome.failure:
                raise ConfigError("--gpu-type", "the program does not tell it", "give --gpu-type")
            row = measurement(outcome, key, measured_s=time.time(), source="slurm-ext profile")
            print(_line(trial, _said(outcome, row)), flush=True)
            if row is not None:
                rows = _with(rows, row)
                write_rows(output, rows)
    spent_gpu_h = allocated * (time.monotonic() - began) / 3600.0
    _conclude(args, outcomes, rows, spent_gpu_h, allocated, output, model, seen)
    return 1 if any(outcome.failure for outcome in outcomes) else 0


def _conclude(
    args: argparse.Namespace,
    outcomes: Sequence[Outcome],
    rows: Sequence[Measurement],
    spent_gpu_h: float,
    allocated: int,
    output: Path,
    model: str,
    seen: Seen,
) -> None:
    gpu_type = args.gpu_type or gpu_type_of(seen.device)
    costs = cold_starts(outcomes, model, gpu_type, "slurm-ext profile")
    if costs:
        path = output.with_name(f"{output.stem}-costs{output.suffix}")
        _replace(path, _csv(COST_TEMPLATE, format_costs(costs)))
        starts = ", ".join(f"{cost.gpus} GPUs {cost.seconds:.1f} s" for cost in costs)
        print(f"cold starts ({starts}) are in {path}")
    used_h = sum(outcome.seconds * outcome.trial.gpus for outcome in outcomes) / 3600.0
    print(
        f"spent {spent_gpu_h:.4f} GPU hours ({allocated} allocated, {used_h:.4f} of them in use);"
        f" a published table took {PUBLISHED_GPU_H}"
    )
    ours = [row for row in rows if row.key.model == model]
    print(worth_text(worth(ours, spent_gpu_h, args.job_samples)))
    if rows:
        print(f"rows are in {output}: slurm-ext table import {shlex.quote(str(output))}")
    else:
        print(f"there is no row to import; {output} is not written")


def worth_text(found: Worth) -> str:
    """One sentence about what the rows are worth."""
    if found.best is None:
        return "nothing was measured, so nothing is gained"
    if found.jobs is None:
        return "one configuration per GPU count leaves nothing to choose, so nothing is gained"
    best = found.best
    return (
        f"with {found.gpus} GPUs a thousand samples cost {found.any_gpu_s:.4g} GPU seconds on"
        f" average over what was measured and {found.best_gpu_s:.4g} with a local batch of"
        f" {best.local_batch} x {best.accumulation}: {counted(found.jobs, 'job')} of"
        f" {found.job_samples} samples pay back what it cost"
    )


def gpu_type_of(device: str) -> str:
    """The word that gres.conf usually has for what torch calls the device; "" = not known."""
    words = re.split(r"[\s-]+", device.lower())
    return next((w for w in words if w and w not in ("nvidia", "tesla", "geforce", "amd")), "")


def write_rows(path: Path, rows: Sequence[Measurement]) -> None:
    """Replace the file of rows."""
    _replace(path, _csv(TEMPLATE, format_measurements(rows)))


def _earlier(path: Path) -> list[Measurement]:
    """Rows that the file has already; a file with bad rows is not written over."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return []
    parsed = parse(io.StringIO(text, newline=""), str(path))
    if parsed.errors:
        raise parsed.errors[0]
    if parsed.costs:
        raise DataError(str(path), "holds costs and no rows", "give another --output")
    return list(parsed.measurements)


def _with(rows: Sequence[Measurement], row: Measurement) -> list[Measurement]:
    """The rows with one more, merged with the one of the same key."""
    if all(old.key != row.key for old in rows):
        return [*rows, row]
    return [old.merged(row) if old.key == row.key else old for old in rows]


def _bare(key: Key) -> Key:
    """The key without what is known only after a run."""
    return replace(key, gpu_type="", settings=replace(key.settings, environment=""))


def _allocated(environ: Mapping[str, str], largest: int) -> int:
    """GPUs that are kept from others meanwhile: one per task of the job."""
    text = environ.get("SLURM_NTASKS", "") if "SLURM_JOB_ID" in environ else ""
    return max(largest, int(text)) if text.isdecimal() else largest


_HEADING = (
    f"{'GPUS':>5} {'PLACEMENT':>10} {'LOCAL':>6} {'ACC':>4} {'STAGES':>6} {'FORMAT':>6}  RESULT"
)


def _line(trial: Trial, words: str) -> str:
    return (
        f"{trial.gpus:>5} {placement_text(trial.placement):>10} {trial.local_batch:>6}"
        f" {trial.accumulation:>4} {trial.stages:>6} {trial.precision:>6}  {words}"
    )


def _said(outcome: Outcome, row: Measurement | None) -> str:
    if outcome.failure:
        return f"failed: {outcome.failure}"
    if outcome.out_of_memory:
        return "out of memory"
    found = median_step(outcome)
    if row is None or found is None:
        return f"failed: only {len(outcome.timings)} steps were timed; give a larger --limit"
    sync = "" if row.sync_time_s is None else f", {1e3 * row.sync_time_s:.3g} of them not computing"
    memory = "" if row.memory_gb is None else f", {row.memory_gb:.3g} GB"
    return (
        f"{row.throughput:.4g} samples/s, step {1e3 * found[0]:.4g} ms"
        f" (+-{1e3 * found[1]:.2g}){sync}{memory}"
    )


def _numbers(option: str, text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isascii() and word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"{option}={text}", "not numbers from 1 on", f"write {option}=1,2,4")
    return tuple(dict.fromkeys(int(word) for word in words))


def _file_word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)


def _csv(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return file.getvalue()


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
