"""The option table against everything that is written from it, and against itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from slurm_ext.domain.directive import Directive, parse_options
from slurm_ext.domain.grammar import canonical
from slurm_ext.domain.options import BY_NAME, OPTIONS
from slurm_ext.domain.options_emit import WRITERS

ROOT = Path(__file__).resolve().parents[3]
COMMITTED = {
    "c": "spank/ft_options.h",
    "lua": "site/lua/ft_options.lua",
    "markdown": "docs/directives.md",
}


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_the_committed_file_is_what_the_table_says(kind: str) -> None:
    path = ROOT / COMMITTED[kind]
    assert path.read_text() == WRITERS[kind](), (
        f"write it anew: python -m slurm_ext.domain.options --emit {kind} > {COMMITTED[kind]}"
    )


def test_the_generator_runs_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "slurm_ext.domain.options", "--emit", "lua"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=30,
    )
    assert result.stdout == WRITERS["lua"]()


def test_names_keys_and_twins_are_unique() -> None:
    keys = [key for option in OPTIONS for key in option.keys]
    assert len(BY_NAME) == len(OPTIONS)
    assert len(set(keys)) == len(keys)
    assert len({option.twin for option in OPTIONS}) == len(OPTIONS)
    assert not {option.twin for option in OPTIONS} & {option.job_env for option in OPTIONS}


def test_every_key_is_a_field_of_the_directive_and_the_other_way_round() -> None:
    keys = {key for option in OPTIONS for key in option.keys}
    recorded = {"v", "begin_s", "shape", "req"}  # by the Lua module, not by an option
    assert {field.name for field in fields(Directive)} == keys | recorded


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_the_default_is_what_the_directive_holds_without_the_option(option) -> None:  # type: ignore[no-untyped-def]
    if not option.default:
        assert getattr(Directive(), option.keys[0]) is None
        return
    assert canonical(option, option.default, 0.0) == option.default
    assert parse_options({option.name: option.default}, now_s=0.0) == Directive()
    assert parse_options({option.name: option.default}, now_s=0.0).to_json() == '{"v":1}'


def test_exclusion_is_mutual() -> None:
    for option in OPTIONS:
        if option.excludes:
            assert BY_NAME[option.excludes].excludes == option.name


def test_every_option_is_on_the_page() -> None:
    page = (ROOT / COMMITTED["markdown"]).read_text()
    for option in OPTIONS:
        assert f"`{option.flag}`" in page
        assert f"`{option.twin}`" in page


def test_help_lines_fit_a_terminal_and_the_plugin() -> None:
    for option in OPTIONS:
        assert len(option.name) + len("ft-") <= 75  # SPANK_OPTION_MAXLEN
        assert "\n" not in option.usage + option.fix + option.doc
        assert len(option.choices) < 6  # FT_MAX_CHOICES with its terminator
