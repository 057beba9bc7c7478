"""The daemon's configuration: one pydantic model at the edge, frozen once it is loaded.

Order of precedence: the defaults below, ``/etc/slurm-ext/config.yaml``, ``conf.d/*.yaml`` beside
it in name order, the environment (``SLURM_EXT_<KEY>``, read as YAML), the command line. A key that
is not declared here is an error that names its file and the nearest declared key: a typing error
must not silently leave a default in force. The description and unit beside each field are the only
documentation: ``python -m slurm_ext.control.config --emit markdown|man|example`` prints them.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Hashable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from slurm_ext.domain.errors import ConfigError

DEFAULT_PATH = Path("/etc/slurm-ext/config.yaml")
ENVIRONMENT_PREFIX = "SLURM_EXT_"
# Environment variables with our prefix that are not configuration keys.
ENVIRONMENT_OTHER = frozenset({"SLURM_EXT_CONFIG"})


class Act(StrEnum):
    """What the daemon may do in a partition. Each switch is off until it is named."""

    ORDER = "order"
    RESIZE = "resize"
    LEASE = "lease"
    PIN = "pin"
    MOVE = "move"


def _key(
    default: Any, description: str, *, unit: str = "", **bounds: Any
) -> Any:  # pydantic's Field is typed Any as well
    """A configuration key with its default, unit and documentation in one place."""
    extra: dict[str, Any] | None = {"unit": unit} if unit else None
    if callable(default):
        return Field(
            default_factory=default, description=description, json_schema_extra=extra, **bounds
        )
    return Field(default, description=description, json_schema_extra=extra, **bounds)


def _no_switch(value: Any) -> Any:
    """YAML's yes, no, on, off, true and false are booleans, which Python counts as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("yes, no, true and false are not numbers")
    return value


Positive = Annotated[float, BeforeValidator(_no_switch), Field(gt=0, allow_inf_nan=False)]


class PartitionConfig(BaseModel):
    """Settings of one partition."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    act: frozenset[Act] = _key(
        frozenset,
        "What the daemon may do here: any of order (places in the queue), lease (move the earliest"
        " start of a resizable job), resize (GPU counts; needs lease), pin (node lists; needs"
        " lease), move (a running job whose owner gave --ft-max-pause saves and is requeued where"
        " that seats a waiting job that only fragments keep from starting; needs order). Empty"
        " means observe only.",
    )

    @field_validator("act", mode="before")
    @classmethod
    def _one_word(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _needs_lease(self) -> PartitionConfig:
        unsafe = sorted(self.act & {Act.RESIZE, Act.PIN})
        if unsafe and Act.LEASE not in self.act:
            raise ValueError(f"{unsafe[0]} is only safe under a lease: add lease to act")
        if Act.MOVE in self.act and Act.ORDER not in self.act:
            raise ValueError("move makes room for the job that is first in order: add order to act")
        return self


class Config(BaseModel):
    """Every key of the daemon. Durations are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Literal["titan", "srtf"] = _key(
        "titan",
        "Decision rule. titan chooses GPU counts and order together; srtf orders by the shortest"
        " remaining time and leaves every job in its present shape.",
    )
    partitions: dict[str, PartitionConfig] = _key(
        dict,
        "Partition name to its settings. A partition that is not named here is observed: plans and"
        " logs are made, nothing is changed.",
    )
    cycle_s: float = _key(
        5.0,
        "Time between the beginnings of two cycles. Reaction to a submission or an end of a job"
        " takes at most this long.",
        unit="s",
        ge=0.2,
        le=300,
        allow_inf_nan=False,
    )
    lease_s: float = _key(
        300.0,
        "How far a lease moves a job's earliest start into the future. After this time without the"
        " daemon every job starts by itself.",
        unit="s",
        ge=2,
        le=86400,
        allow_inf_nan=False,
    )
    renew_at: float = _key(
        0.5,
        "Share of a lease after which it is renewed.",
        gt=0,
        lt=1,
        allow_inf_nan=False,
    )
    grace_s: float = _key(
        5.0,
        "The submit grace that job_submit.lua gives a resizable job: the same number as"
        " submit_grace_s in lua/config.lua. A future start no later than submission plus this"
        " grace is ours, a later one is the user's. 0 = the Lua module gives none.",
        unit="s",
        ge=0,
        le=3600,
        allow_inf_nan=False,
    )
    max_writes_per_cycle: int = _key(
        500,
        "Most job updates in one cycle; the most urgent are written first and the rest follow in"
        " the next cycle.",
        unit="updates",
        ge=1,
        le=100_000,
    )
    waiting_limit_s: float = _key(
        86400.0,
        "A job that has waited this long since its first submission is no longer leased, and goes"
        " in order of age before younger ones.",
        unit="s",
        gt=0,
        allow_inf_nan=False,
    )
    margin: float = _key(
        0.05,
        "A changed plan must be better than the previous one by this share, else the previous one"
        " stays.",
        ge=0,
        le=1,
        allow_inf_nan=False,
    )
    resume_window_s: float = _key(
        3600.0,
        "Requeues of a job that lie further back than this do not count towards its cool-down.",
        unit="s",
        gt=0,
        le=7 * 86400,
        allow_inf_nan=False,
    )
    resume_free_orderly: int = _key(
        10,
        "Requeues of one job within resume_window_s that cost it no cool-down, where the cause is"
        " nobody's fault: preemption, time limit, the daemon or a person. Each cause counts by"
        " itself. Causes are what the job's ft-run tells.",
        unit="requeues",
        ge=0,
        le=1000,
    )
    resume_free_failures: int = _key(
        2,
        "The same for all other causes: node failure, lost peer, no progress, an error of the"
        " program, and causes that nobody told.",
        unit="requeues",
        ge=0,
        le=1000,
    )
    resume_cooldown_s: float = _key(
        60.0,
        "How long a job waits after the first requeue beyond the free ones before it is let go;"
        " every further one doubles it. A job that may not be leased waits for Slurm's own delay at"
        " most.",
        unit="s",
        ge=0,
        le=86400,
        allow_inf_nan=False,
    )
    resume_cooldown_max_s: float = _key(
        1800.0,
        "Longest cool-down of one job.",
        unit="s",
        ge=0,
        le=86400,
        allow_inf_nan=False,
    )
    resume_at_once: int = _key(
        16,
        "Most requeued jobs of one partition that may be on their way from start to first step at"
        " the same time: all of them read checkpoints.",
        unit="jobs",
        ge=1,
        le=100_000,
    )
    resume_settle_s: float = _key(
        60.0,
        "How long after its start a requeued job that does not report steps counts as on its way.",
        unit="s",
        ge=0,
        le=3600,
        allow_inf_nan=False,
    )
    move_margin: float = _key(
        0.5,
        "Share by which the gain of moving a running job must exceed its cost (act: move). The gain"
        " is the waiting time saved, the cost the measured save, start and time in the queue; both"
        " are weighed as the objective weighs jobs, and in GPU-seconds.",
        ge=0,
        le=100,
        allow_inf_nan=False,
    )
    move_cooldown_s: float = _key(
        3600.0,
        "How long a job is left alone after it was asked to move, or was requeued for any cause.",
        unit="s",
        ge=0,
        le=30 * 86400,
        allow_inf_nan=False,
    )
    head: int = _key(
        200,
        "How many of our jobs from the head of each queue get their place written; jobs behind it"
        " keep Slurm's order until they come near.",
        unit="jobs",
        ge=1,
        le=100_000,
    )
    max_gpus_per_job: int = _key(
        16,
        "Largest GPU count that --ft-gpus=auto considers.",
        unit="GPUs",
        ge=1,
        le=65536,
    )
    efficiency_floor: float = _key(
        0.5,
        "A GPU count whose throughput per GPU is below this share of the job's best is not"
        " offered.",
        ge=0,
        le=1,
        allow_inf_nan=False,
    )
    hold_out: float = _key(
        2.5,
        "A job declines a start on which it would take more than so many times as long as waiting"
        " for more GPUs and running on them; these GPUs are left to other jobs. 1000 declines"
        " practically none.",
        ge=1,
        le=1000,
        allow_inf_nan=False,
    )
    gpu_memory_gb: dict[str, Positive] = _key(
        dict,
        "GPU type as in gres.conf to its memory. Configurations known to need more are left out;"
        " a type that is not named here is not filtered.",
        unit="GB",
    )
    solver_time_limit_s: float = _key(
        2.0,
        "Longest time that the allocation may take in one cycle; then the greedy answer is used.",
        unit="s",
        gt=0,
        le=60,
        allow_inf_nan=False,
    )
    table: Path = _key(
        Path("/var/lib/slurm-ext/throughput.sqlite"),
        "Throughput table (slurm-ext table import). On a local disk.",
    )
    journal: Path = _key(
        Path("/var/lib/slurm-ext/journal.sqlite"),
        "Journal of decisions and ledger of what is ours. On a local disk.",
    )
    journal_max_rows: int = _key(
        200_000,
        "Journal rows kept; the oldest are removed first.",
        unit="rows",
        ge=1000,
        le=100_000_000,
    )
    spool: Path = _key(
        Path("/var/spool/slurm-ext"),
        "Spool directory on the file system that login and compute nodes share: plan documents for"
        " jobs, progress reports and pin requests from users.",
    )
    heartbeat: Path = _key(
        Path("/run/slurm-ext/heartbeat"),
        "File that every complete cycle touches; slurm-ext release --if-stale looks at its age.",
    )
    backend: Literal["cli", "pyslurm"] = _key(
        "cli",
        "How Slurm is reached. cli runs Slurm's commands. pyslurm reads comments through libslurm"
        " where a pyslurm of exactly Slurm's release is installed, and runs the commands for the"
        " rest.",
    )
    command_timeout_s: float = _key(
        10.0,
        "Longest time that one Slurm command may take; then its answer counts as missing and the"
        " cycle is skipped.",
        unit="s",
        ge=0.1,
        le=600,
        allow_inf_nan=False,
    )
    read_comments: bool = _key(
        False,
        "Also read directives from the comment of jobs (--comment='ft: model=... samples=...'),"
        " for sites without the SPANK plugin and the Lua module. Such jobs are ordered, not"
        " resized.",
    )
    limits_every_s: float = _key(
        60.0,
        "Age after which the limits of QOS and associations and slurm.conf are read again.",
        unit="s",
        ge=1,
        le=86400,
        allow_inf_nan=False,
    )
    table_every_s: float = _key(
        60.0,
        "How often the throughput table is looked at for changes.",
        unit="s",
        ge=1,
        le=86400,
        allow_inf_nan=False,
    )
    metrics_listen: str = _key(
        "",
        "ADDRESS:PORT for Prometheus metrics over HTTP, e.g. 127.0.0.1:9817. Empty = none.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _key(
        "info", "Least severity that is logged."
    )

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: Any, info: ValidationInfo) -> Any:
        numeric = cls.model_fields[info.field_name or ""].annotation in (int, float)
        return _no_switch(value) if numeric else value

    @field_validator("table", "journal", "spool", "heartbeat")
    @classmethod
    def _place(cls, value: Path) -> Path:
        if not value.is_absolute() or not value.name or "\0" in str(value):
            raise ValueError("write a whole path that begins with /, without ~")
        return value

    @field_validator("metrics_listen")
    @classmethod
    def _address(cls, value: str) -> str:
        if not value:
            return value
        host, colon, port = value.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError("write ADDRESS:PORT, e.g. 127.0.0.1:9817")
        return value

    @model_validator(mode="after")
    def _leases_outlive_cycles(self) -> Config:
        # A lease has to survive until its renewal has been tried twice.
        left_s = self.lease_s * (1 - self.renew_at)
        if left_s < 2 * self.cycle_s:
            raise ValueError(
                f"a lease of {self.lease_s:g} s renewed at {self.renew_at:g} leaves {left_s:g} s,"
                f" less than two cycles of {self.cycle_s:g} s: raise lease_s, lower renew_at or"
                " lower cycle_s"
            )
        return self

    def may(self, partition: str, act: Act) -> bool:
        """Whether ``act`` is switched on for the partition."""
        settings = self.partitions.get(partition)
        return settings is not None and act in settings.act

    @property
    def acting(self) -> bool:
        """Whether anything may be changed anywhere."""
        return any(settings.act for settings in self.partitions.values())

    def observing(self) -> Config:
        """The same configuration with every switch off."""
        return self.model_copy(update={"partitions": {}})


def load_config(
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
) -> Config:
    """Read and check the whole configuration.

    ``path`` given (or ``SLURM_EXT_CONFIG``) must exist; the default path may be absent.
    ``overrides`` are ``KEY=VALUE`` words of the command line, with the value in YAML and dots for
    nested keys. Raises ConfigError that names file, key and fix.
    """
    environ = os.environ if environ is None else environ
    if path is None and environ.get("SLURM_EXT_CONFIG"):
        path = Path(environ["SLURM_EXT_CONFIG"])
    main = DEFAULT_PATH if path is None else path
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    _merge(values, places, _read_yaml(main, may_be_absent=path is None), str(main))
    for part in _parts(main.parent / "conf.d"):
        _merge(values, places, _read_yaml(part), str(part))
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in ENVIRONMENT_OTHER:
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
            _merge(values, places, {key: _yaml_value(environ[name], name)}, name)
    for word in overrides:
        dotted, equals, text = word.partition("=")
        if not equals or not dotted:
            raise ConfigError(f"--set {word}", "not KEY=VALUE", "write e.g. --set cycle_s=2")
        nested: Any = _yaml_value(text, f"--set {word}")
        for step in reversed(dotted.split(".")):
            nested = {step: nested}
        _merge(values, places, nested, f"--set {word}")
    try:
        return Config.model_validate(values)
    except ValidationError as exc:
        raise _explain(exc, places, str(main)) from exc


def _parts(folder: Path) -> list[Path]:
    """The files of ``conf.d`` in name order. One that cannot be listed is not an empty one."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as exc:
        raise ConfigError(
            str(folder), f"cannot be read: {exc.strerror}", "mend its rights"
        ) from exc
    return [folder / name for name in names if name.endswith(".yaml")]


def _read_yaml(path: Path, *, may_be_absent: bool = False) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as exc:
        if may_be_absent:
            return {}
        raise ConfigError(str(path), "no such file", "write it, or name another") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(str(path), f"cannot be read: {exc}", "mend its rights or text") from exc
    value = _yaml_value(text, str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(str(path), "is not a list of KEY: VALUE", "write one key per line")
    return value


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses a key written twice: the first would be lost silently."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, Hashable):
            raise yaml.MarkedYAMLError(
                problem="a key is a list or a mapping", problem_mark=key_node.start_mark
            )
        if key in seen:
            raise yaml.MarkedYAMLError(
                problem=f"key {key!r} is written twice", problem_mark=key_node.start_mark
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _yaml_value(text: str, place: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # derived from SafeLoader
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        where = f"{place}:{mark.line + 1}" if mark is not None else place
        raise ConfigError(where, exc.problem or "is not YAML", "mend the line") from exc
    except yaml.YAMLError as exc:
        raise ConfigError(place, f"is not YAML: {exc}", "mend it") from exc
    except RecursionError as exc:
        raise ConfigError(place, "is nested too deeply", "mend it") from exc


def _merge(
    into: dict[str, Any], places: dict[str, str], new: Mapping[Any, Any], place: str, at: str = ""
) -> None:
    """Lay ``new`` over ``into``: mappings are merged key by key, everything else is replaced."""
    for key, value in new.items():
        name = str(key)
        dotted = f"{at}{name}"
        old = into.get(name)
        if isinstance(value, Mapping) and (old is None or isinstance(old, dict)):
            branch = old if isinstance(old, dict) else {}
            into[name] = branch
            places[dotted] = place
            _merge(branch, places, value, place, f"{dotted}.")
        else:
            into[name] = value
            places[dotted] = place


def _explain(exc: ValidationError, places: Mapping[str, str], default: str) -> ConfigError:
    """Turn pydantic's first complaint into place, reason and fix."""
    error = exc.errors()[0]
    steps = [str(step) for step in error["loc"]]
    place = default
    for end in range(len(steps), 0, -1):
        found = places.get(".".join(steps[:end]))
        if found is not None:
            place = found
            break
    dotted = ".".join(steps)
    if error["type"] == "extra_forbidden":
        known = list(PartitionConfig.model_fields if len(steps) > 1 else Config.model_fields)
        near = difflib.get_close_matches(steps[-1], known, n=1, cutoff=0.5)
        fix = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(known))}"
        return ConfigError(f"{place}: {dotted}", "unknown key", fix)
    reason = str(error["msg"]).removeprefix("Value error, ")
    if not dotted:
        return ConfigError(place, reason, "mend these keys together")
    field = Config.model_fields.get(steps[0])
    fix = field.description.split(". ")[0] if field is not None and field.description else "mend it"
    return ConfigError(f"{place}: {dotted}={error['input']!r}", reason, f"{steps[0]}: {fix}")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the documentation that this module holds."""
    from slurm_ext.control import configdoc

    return configdoc.main(argv)


if __name__ == "__main__":
    sys.exit(main())
