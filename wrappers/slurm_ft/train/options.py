"""The command line of the reference trainer. No torch here: ``--help`` is quick.

Values come from, later ones winning: defaults, a preset, the file of ``--config``, the ``FT_*``
variables of the plan and the directive, options. Each key of a task is an option and a key of the
file, so the three cannot drift apart.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from slurm_ext.domain.errors import ConfigError
from slurm_ft import variables
from slurm_ft.train.layout import SCHEDULES, Wish
from slurm_ft.train.task import Task, make_task

# Sizes of models that are fine-tuned in earnest, for measurements; the default is a toy.
PRESETS: dict[str, dict[str, Any]] = {
    "vit-base": {"model": "vit", "dim": 768, "depth": 12, "heads": 12, "image": 224, "patch": 16},
    "vit-large": {"model": "vit", "dim": 1024, "depth": 24, "heads": 16, "image": 224, "patch": 16},
    "gpt2": {
        "model": "decoder",
        "dim": 768,
        "depth": 12,
        "heads": 12,
        "vocab": 50257,
        "length": 1024,
    },
}
# How one task of a chain follows another.
SWITCHES = ("overlapped", "naive", "cold")
# Variables of the plan and the directive, and the keys of a task that they fill.
_VARIABLES = {
    "FT_FROZEN": "frozen",
    "FT_QUALITY": "quality",
    variables.GLOBAL_BATCH: "global_batch",
}


@dataclass(frozen=True, slots=True)
class Options:
    """What to train, how it wishes to be spread, and what to write down beside it."""

    task: Task
    wish: Wish
    device: str = "auto"
    threads: int = 0
    checkpoint: str = "async"
    loss_log: Path | None = None
    timings: Path | None = None
    log_every: int = 10
    emulate_step_s: float = 0.0
    chain: Path | None = None
    switch: str = SWITCHES[0]


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Options from arguments and environment. Raises ConfigError for what cannot be used."""
    args = _parser().parse_args(argv)
    chain = args.chain or environ.get(variables.CHAIN)
    values: dict[str, Any] = dict(PRESETS[args.preset]) if args.preset else {}
    if args.config is not None:
        values.update(_read(args.config))
    values.update(_from_environment(environ))
    given = {f.name: getattr(args, f.name) for f in fields(Task)}
    values.update({name: value for name, value in given.items() if value is not None})
    if "steps" not in values and (steps := _steps(environ, values)) is not None:
        values["steps"] = steps
    task = make_task(values, str(args.config) if args.config else "options")
    return Options(
        task=task,
        wish=Wish(
            local_batch=args.local_batch,
            accumulation=args.accumulation,
            max_local_batch=args.max_local_batch,
            stages=args.stages,
            micro_batches=args.micro_batches,
            schedule=args.schedule,
            precision=args.precision,
            grad_checkpointing=args.grad_checkpointing,
        ),
        device=args.device,
        threads=args.threads,
        checkpoint=args.checkpoint,
        loss_log=args.loss_log,
        timings=args.timings,
        log_every=max(1, args.log_every),
        emulate_step_s=max(0.0, args.emulate_step_s),
        chain=Path(chain) if chain else None,
        switch=args.switch,
    )


class _Parser(argparse.ArgumentParser):
    """Every rank finds the same slip: each says it in one line, and none prints all options."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError("command line", message, f"see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m slurm_ft.train",
        description="Fine-tune a small transformer on data that it makes itself.",
        epilog="Run it in a Slurm job as: srun ft-run -- python -m slurm_ft.train [options]",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML with keys of a task")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="sizes of a known model")
    task = parser.add_argument_group("task (also keys of the file)")
    for field in fields(Task):
        flag = "--" + field.name.replace("_", "-")
        task.add_argument(flag, metavar="VALUE", help=f"default: {field.default or '-'}")
    layout = parser.add_argument_group("layout (default: the plan's)")
    for name in ("local-batch", "accumulation", "max-local-batch", "stages", "micro-batches"):
        layout.add_argument(f"--{name}", type=int, metavar="N")
    layout.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    layout.add_argument("--precision", metavar="FORMAT", help="fp32, tf32 or bf16")
    layout.add_argument("--grad-checkpointing", action=argparse.BooleanOptionalAction)
    run = parser.add_argument_group("run")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    run.add_argument("--threads", type=int, default=0, metavar="N", help="of torch; 0 = its choice")
    run.add_argument("--checkpoint", choices=("async", "sync", "none"), default="async")
    run.add_argument("--loss-log", type=Path, metavar="FILE", help="one JSON line for each step")
    run.add_argument("--timings", type=Path, metavar="FILE", help="seconds of each step as JSON")
    run.add_argument("--log-every", type=int, default=10, metavar="N", help="steps between lines")
    run.add_argument(
        "--emulate-step-s", type=float, default=0.0, metavar="S", help="compute longer by S seconds"
    )
    run.add_argument(
        "--chain",
        type=Path,
        metavar="FILE",
        help=f"YAML with tasks to train one after the other (default: ${variables.CHAIN})",
    )
    run.add_argument(
        "--switch",
        choices=SWITCHES,
        default=SWITCHES[0],
        help="how one task of a chain follows another",
    )
    return parser


def _read(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError as exc:
        raise ConfigError(
            str(path), "PyYAML is not installed here", "install it, or give options"
        ) from exc
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ConfigError(
            str(path), f"cannot be read ({exc})", "name a readable YAML file"
        ) from exc
    if not isinstance(document, dict):
        raise ConfigError(str(path), "holds no keys", "write lines such as model: vit")
    return {str(key): value for key, value in document.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {
        key: environ[name] for name, key in _VARIABLES.items() if environ.get(name)
    }
    # The directive's batch may be a range, whose choice is the plan's FT_GLOBAL_BATCH.
    if "global_batch" not in values and environ.get("FT_BATCH", "").isdecimal():
        values["global_batch"] = environ["FT_BATCH"]
    if environ.get("FT_STEPS"):
        values["steps"] = environ["FT_STEPS"]
    return values


def _steps(environ: Mapping[str, str], values: Mapping[str, Any]) -> int | None:
    """Optimizer steps for ``--ft-samples`` and ``--ft-epochs``."""
    if not environ.get("FT_SAMPLES"):
        return None
    try:
        samples = float(environ["FT_SAMPLES"]) * float(environ.get("FT_EPOCHS") or 1)
        return max(1, math.ceil(samples / int(values.get("global_batch", Task().global_batch))))
    except (ValueError, ArithmeticError) as exc:
        raise ConfigError(
            f"FT_SAMPLES={environ['FT_SAMPLES']!r} and FT_EPOCHS={environ.get('FT_EPOCHS')!r}",
            "no number of steps follows",
            "set numbers, or give --steps",
        ) from exc
