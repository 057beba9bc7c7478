"""``--ft-arg``: arguments made from what holds in this attempt. Pure.

``{name}`` is replaced, ``{name=value}`` says what stands in where nothing is known, ``{{`` and
``}}`` are braces. An argument that needs something unknown is left out, so that the program's own
default holds; a name that does not exist is an error, because it is a slip of the hand.
"""

from __future__ import annotations

from slurm_ft import variables
from slurm_ft.launch.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Name in a template and the variable that holds its value.
NAMES = {
    "gpus": variables.GPUS,
    "nodes": variables.NODES,
    "local_batch": variables.LOCAL_BATCH,
    "accumulation": variables.ACCUMULATION,
    "global_batch": variables.GLOBAL_BATCH,
    "stages": variables.STAGES,
    "micro_batches": variables.MICRO_BATCHES,
    "precision": variables.PRECISION,
    "grad_checkpointing": variables.GRAD_CHECKPOINTING,
    "frozen": variables.FROZEN,
    "attempt": variables.ATTEMPT,
    "job_id": variables.JOB,
    "checkpoint_dir": variables.CHECKPOINT_DIR,
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world_size": "WORLD_SIZE",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}


def fill(templates: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The arguments, without those whose values are not known. Raises UsageError."""
    filled = (_fill_one(template, environment) for template in templates)
    return [argument for argument in filled if argument is not None]


def _fill_one(template: str, environment: Mapping[str, str]) -> str | None:
    out: list[str] = []
    known = True
    at = 0
    while at < len(template):
        char = template[at]
        if template.startswith(("{{", "}}"), at):
            out.append(char)
            at += 2
        elif char == "}":
            raise UsageError(f"--ft-arg={template}: a }} without its {{; write }}}} for a brace")
        elif char == "{":
            end = template.find("}", at)
            if end < 0:
                raise UsageError(
                    f"--ft-arg={template}: a {{ without its }}; write {{{{ for a brace"
                )
            value = _value(template, template[at + 1 : end], environment)
            known = known and value is not None
            out.append(value or "")
            at = end + 1
        else:
            out.append(char)
            at += 1
    return "".join(out) if known else None


def _value(template: str, field: str, environment: Mapping[str, str]) -> str | None:
    name, equals, fallback = field.partition("=")
    variable = NAMES.get(name)
    if variable is None:
        raise UsageError(
            f"--ft-arg={template}: {{{name}}} is not known; the names are {', '.join(NAMES)}"
        )
    value = environment.get(variable, "")
    if value:
        return value
    return fallback if equals else None
