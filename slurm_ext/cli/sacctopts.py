"""Options that say how to read what ``sacct`` wrote: the same for every command that reads it."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from slurm_ext.domain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SacctOptions:
    """``columns`` of a file without a heading, its separator, and what finds models in texts."""

    columns: tuple[str, ...] | None = None
    delimiter: str | None = None
    model_pattern: re.Pattern[str] | None = None


def add_sacct_options(parser: argparse.ArgumentParser, *also: str) -> None:
    """Add the options; ``also`` are further spellings of --sacct-columns."""
    parser.add_argument(
        "--model-pattern",
        metavar="REGEX",
        help="finds the model in the comment, name or submit line of jobs without --ft-model"
        " (output of sacct)",
    )
    parser.add_argument(
        "--sacct-columns",
        *also,
        dest="sacct_columns",
        metavar="NAME,...",
        help="columns of output of sacct without a heading (--noheader), as in its --format",
    )
    parser.add_argument(
        "--delimiter",
        metavar="TEXT",
        help="separator of the output of sacct, if the heading does not tell",
    )


def sacct_options(args: argparse.Namespace) -> SacctOptions:
    """What was given. Raises ConfigError for a pattern that is none."""
    names = args.sacct_columns
    return SacctOptions(
        columns=None if names is None else tuple(names.split(",")),
        delimiter=args.delimiter,
        model_pattern=_pattern(args.model_pattern),
    )


def _pattern(text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as exc:
        raise ConfigError(
            f"--model-pattern={text!r}", f"not a regular expression ({exc})", "mend it"
        ) from exc
