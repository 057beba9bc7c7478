"""What ``ft-run --help`` and ``--version`` print. Imported only then."""

from __future__ import annotations

import textwrap

from slurm_ext import __version__
from slurm_ft.launch.options import OPTIONS, Option

SUMMARY = "run the program of one rank so that it is told, saved and brought back"
_WIDTH = 90


def spelled(option: Option) -> str:
    """An option as it is typed."""
    return f"--{option.name}={option.metavar}" if option.metavar else f"--{option.name}"


def usage() -> str:
    """The whole help."""
    lines = ["usage: srun ft-run [options] [--] COMMAND [ARGUMENT...]", "", SUMMARY + ".", ""]
    for option in OPTIONS:
        lines.append(f"  {spelled(option)}")
        words = option.words
        if option.environment:
            words += f" [{option.environment}]"
        indent = " " * 8
        lines += textwrap.wrap(
            words,
            _WIDTH,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
    return "\n".join(lines) + "\n"


def version() -> str:
    """The release."""
    return f"ft-run {__version__}\n"
