"""Documentation of the configuration, printed from the fields themselves.

Text only: the committed ``docs/config.md``, ``site/man/slurm-ext-config.5`` and
``site/config.yaml.example`` are this module's output, and a test compares them, so that a default
can never differ between code, documentation and the file that an administrator copies.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slurm_ext.control.config import DEFAULT_PATH, ENVIRONMENT_PREFIX, Act, Config, PartitionConfig

_INTRODUCTION = (
    f"Keys are read from the defaults, {DEFAULT_PATH}, conf.d/*.yaml beside it in name order, the"
    f" environment ({ENVIRONMENT_PREFIX} and the key in capitals, the value in YAML) and the"
    " command line (--set KEY=VALUE), later ones over earlier ones. A key that is not listed here"
    " is an error. Durations are seconds. On SIGHUP the daemon reads everything again; a file with"
    " an error leaves the old configuration in force."
)
_EXAMPLE_PARTITION = "main"


@dataclass(frozen=True, slots=True)
class Key:
    """One documented key."""

    name: str
    default: str
    unit: str
    text: str


def _yaml_text(value: Any) -> str:
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, frozenset):
        value = sorted(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text: str = yaml.safe_dump(value, default_flow_style=True).strip()
    return text.removesuffix("...").strip()


def documented(model: type[Config] | type[PartitionConfig] = Config) -> Iterator[Key]:
    """The keys of a model in declared order."""
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        unit = str(extra.get("unit", "")) if isinstance(extra, dict) else ""
        default = field.get_default(call_default_factory=True)
        yield Key(name, _yaml_text(default), unit, field.description or "")


def markdown() -> str:
    """The page of the documentation."""
    lines = [
        "# Configuration of the daemon",
        "",
        "<!-- printed by `python -m slurm_ext.control.config --emit markdown`; do not edit -->",
        "",
        *textwrap.wrap(_INTRODUCTION, 100),
        "",
        "| Key | Default | Unit | Meaning |",
        "|---|---|---|---|",
    ]
    for key in documented():
        lines.append(f"| `{key.name}` | `{key.default}` | {key.unit or '-'} | {key.text} |")
    lines += ["", "Keys of one partition (`partitions: {NAME: {...}}`):", ""]
    lines += ["| Key | Default | Unit | Meaning |", "|---|---|---|---|"]
    for key in documented(PartitionConfig):
        lines.append(f"| `{key.name}` | `{key.default}` | {key.unit or '-'} | {key.text} |")
    return "\n".join(lines) + "\n"


def _roff(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def man() -> str:
    """The manual page, section 5."""
    lines = [
        '.\\" printed by python -m slurm_ext.control.config --emit man; do not edit',
        '.TH SLURM\\-EXT\\-CONFIG 5 "" "slurm\\-ext" "slurm\\-ext"',
        ".SH NAME",
        "slurm\\-ext\\-config \\- configuration of the slurm\\-ext daemon",
        ".SH SYNOPSIS",
        f".I {_roff(str(DEFAULT_PATH))}",
        ".SH DESCRIPTION",
        _roff(_INTRODUCTION),
        ".SH KEYS",
    ]
    for prefix, model in (("", Config), ("partitions.NAME.", PartitionConfig)):
        for key in documented(model):
            unit = f" {key.unit}" if key.unit else ""
            lines += [
                ".TP",
                f".BR {_roff(prefix + key.name)}",
                _roff(key.text),
                f"Default: {_roff(key.default)}{_roff(unit)}.",
            ]
    lines += [".SH SEE ALSO", ".BR slurm\\-ext (1),", ".BR slurm.conf (5)"]
    return "\n".join(lines) + "\n"


def example() -> str:
    """The file that an administrator copies: every key with its default, commented out."""
    lines = [
        f"# Copy to {DEFAULT_PATH}. Every key is shown with its default; see slurm-ext-config(5).",
        "# Printed by: python -m slurm_ext.control.config --emit example",
        "",
    ]
    for key in documented():
        unit = f" Unit: {key.unit}." if key.unit else ""
        lines += [f"# {line}" for line in textwrap.wrap(key.text + unit, 96)]
        lines += [f"#{key.name}: {key.default}", ""]
        if key.name == "partitions":
            # Moving touches running jobs: a decision of its own, not one for the first week.
            switches = ", ".join(act.value for act in Act if act is not Act.MOVE)
            lines[-1:] = [
                "# After a week of observing, switch acting on per partition:",
                "#partitions:",
                f"#  {_EXAMPLE_PARTITION}:",
                f"#    act: [{switches}]",
                "",
            ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """``--emit FORMAT`` on stdout."""
    emitters = {"markdown": markdown, "man": man, "example": example}
    parser = argparse.ArgumentParser(prog="python -m slurm_ext.control.config")
    parser.add_argument("--emit", choices=sorted(emitters), required=True)
    arguments = parser.parse_args(argv)
    sys.stdout.write(emitters[arguments.emit]())
    return 0
