"""How a task is spread over ranks: replicas, stages, batches, precision. No torch here, no I/O.

Taken from the ``FT_*`` variables that ``ft-run`` set, options winning. The one rule that is never
bent: ``local batch x GPUs x accumulation`` is the task's global batch, so that a job computes the
same thing on any number of GPUs. What cannot keep it is an error here, before the first step.

A pipeline of ``stages`` GPUs counts as that many GPUs in the product: one round of its schedule
takes ``local batch x stages`` samples, cut into ``micro_batches``, as the throughput table has it.
Ranks of one pipeline are neighbours: rank = replica x stages + stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_ext.domain.errors import ConfigError
from slurm_ft import variables

# The schedules of torch.distributed.pipelining that the trainer drives.
SCHEDULES = ("1f1b", "gpipe")
PRECISIONS = ("fp32", "tf32", "bf16")
_YES = {"1", "yes", "true", "on"}
_NO = {"", "0", "no", "false", "off"}


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to run a task on ``gpus`` ranks, one GPU each. ``global_batch`` is its product."""

    gpus: int = 1
    local_batch: int = 32
    accumulation: int = 1
    stages: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    precision: str = "fp32"
    grad_checkpointing: bool = False

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step."""
        return self.local_batch * self.gpus * self.accumulation

    @property
    def replicas(self) -> int:
        """Copies of the model, each on ``stages`` ranks."""
        return self.gpus // self.stages

    @property
    def round_samples(self) -> int:
        """Samples that one replica takes at once; it does so ``accumulation`` times a step."""
        return self.local_batch * self.stages

    @property
    def micro_samples(self) -> int:
        """Samples that go through the stages together."""
        return self.round_samples // self.micro_batches

    def place_of(self, rank: int) -> tuple[int, int]:
        """Replica and stage of a rank."""
        return divmod(rank, self.stages)

    def samples_of(self, step: int, replica: int, index: int) -> range:
        """Numbers of the samples of round ``index`` of step ``step`` (from 1) in one replica.

        A step is one stretch of the endless row of samples, so its content does not depend on the
        number of replicas.
        """
        first = (step - 1) * self.global_batch
        first += (replica * self.accumulation + index) * self.round_samples
        return range(first, first + self.round_samples)


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line says about the layout. ``None`` = take it from the plan."""

    local_batch: int | None = None
    accumulation: int | None = None
    max_local_batch: int | None = None
    stages: int | None = None
    micro_batches: int | None = None
    schedule: str = "1f1b"
    precision: str | None = None
    grad_checkpointing: bool | None = None


def stages_of(environ: Mapping[str, str], wish: Wish) -> int:
    """Stages of a pipeline, of the option or the plan; 1 without either."""
    return _given(environ, variables.STAGES, wish.stages) or 1


def resolve_layout(
    environ: Mapping[str, str], wish: Wish, *, world: int, global_batch: int
) -> Layout:
    """The layout for ``world`` ranks. Raises ConfigError where the global batch cannot be kept."""
    local = _given(environ, variables.LOCAL_BATCH, wish.local_batch)
    accumulation = _given(environ, variables.ACCUMULATION, wish.accumulation)
    stages = stages_of(environ, wish)
    planned = _given(environ, variables.STAGES, None) or 1
    # The plan's micro-batches are for the plan's stages.
    told = environ if planned == stages else {}
    micro = _given(told, variables.MICRO_BATCHES, wish.micro_batches)
    if world % stages:
        raise ConfigError(
            f"stages={stages}",
            f"{world} ranks are no whole number of such pipelines",
            f"choose a divisor of {world}",
        )
    local, accumulation = _split(world, global_batch, local, accumulation, wish.max_local_batch)
    if micro is None:
        # As few as keep every stage busy once; a plan that knows better says so.
        micro = stages
    layout = Layout(
        gpus=world,
        local_batch=local,
        accumulation=accumulation,
        stages=stages,
        micro_batches=micro,
        schedule=wish.schedule,
        precision=wish.precision or environ.get(variables.PRECISION) or "fp32",
        grad_checkpointing=_switch(environ, wish.grad_checkpointing),
    )
    _check(layout, global_batch, environ.get(variables.GPUS))
    return layout


def _split(
    world: int, global_batch: int, local: int | None, accumulation: int | None, most: int | None
) -> tuple[int, int]:
    """Local batch and accumulation, whichever of them is given."""
    if local is not None and accumulation is not None:
        return local, accumulation
    if global_batch % world:
        raise ConfigError(
            f"global_batch={global_batch}",
            f"{world} ranks cannot share it evenly",
            "choose a GPU count that divides it",
        )
    share = global_batch // world
    if local is not None:
        if share % local:
            raise ConfigError(
                f"local_batch={local}",
                f"a rank's share of {share} samples is no multiple of it",
                f"choose a divisor of {share}",
            )
        return local, share // local
    if accumulation is None:
        accumulation = 1
        while share % accumulation or (most is not None and share // accumulation > most):
            accumulation += 1
    if share % accumulation:
        raise ConfigError(
            f"accumulation={accumulation}",
            f"it does not divide a rank's share of {share} samples",
            f"choose a divisor of {share}",
        )
    return share // accumulation, accumulation


def _check(layout: Layout, global_batch: int, planned_gpus: str | None) -> None:
    if layout.global_batch != global_batch:
        planned = f" (the plan is for {planned_gpus} GPUs)" if planned_gpus else ""
        raise ConfigError(
            f"global_batch={global_batch}",
            f"local batch {layout.local_batch} x {layout.gpus} ranks x accumulation "
            f"{layout.accumulation} is {layout.global_batch}{planned}",
            "leave local batch or accumulation away, so that it follows from the others",
        )
    if layout.round_samples % layout.micro_batches:
        raise ConfigError(
            f"micro_batches={layout.micro_batches}",
            f"a round of {layout.round_samples} samples cannot be cut into so many",
            f"choose a divisor of {layout.round_samples}",
        )
    if layout.schedule not in SCHEDULES:
        raise ConfigError(
            f"schedule={layout.schedule!r}", "unknown", f"write {' or '.join(SCHEDULES)}"
        )
    if layout.schedule == "1f1b" and layout.stages > layout.micro_batches:
        raise ConfigError(
            f"micro_batches={layout.micro_batches}",
            f"1F1B over {layout.stages} stages needs at least as many micro-batches",
            "choose more micro-batches, or the schedule gpipe",
        )
    if layout.precision not in PRECISIONS:
        raise ConfigError(
            f"precision={layout.precision!r}",
            "this program does not train in it",
            f"write {', '.join(PRECISIONS)}",
        )


def _given(environ: Mapping[str, str], name: str, option: int | None) -> int | None:
    """The option, else the variable, as a number from 1 on."""
    if option is not None:
        value, place = option, name.removeprefix("FT_").lower()
    elif text := environ.get(name, ""):
        place = name
        try:
            value = int(text)
        except ValueError as exc:
            raise ConfigError(f"{name}={text!r}", "not a whole number", "unset it") from exc
    else:
        return None
    if value < 1:
        raise ConfigError(f"{place}={value}", "too small", "write a number from 1 on")
    return value


def _switch(environ: Mapping[str, str], option: bool | None) -> bool:
    if option is not None:
        return option
    text = environ.get(variables.GRAD_CHECKPOINTING, "").lower()
    if text not in _YES | _NO:
        raise ConfigError(
            f"{variables.GRAD_CHECKPOINTING}={text!r}", "neither yes nor no", "write yes or no"
        )
    return text in _YES
