"""Batch scripts read as sbatch reads them, with the line in every error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.errors import DataError, DirectiveError
from slurm_ext.domain.script import BatchScript, parse_script

NOW_S = 1_764_450_000.0


def _parse(*lines: str) -> BatchScript:
    return parse_script("\n".join(("#!/bin/bash", *lines, "")), now_s=NOW_S, place="job.sh")


def test_options_are_found_in_every_spelling() -> None:
    script = _parse(
        "#SBATCH -N2 --ntasks-per-node=1 --gres=gpu:v100:4   # a comment",
        "# plain comment",
        "",
        "#SBATCH -t 1-12 -p main,high --exclusive --ft-model=vit",
        "#SBATCH --ft-gpus auto --job-name 'two words'",
        "srun train.py",
        "#SBATCH --ft-model=late",
    )
    assert script.directive.model == "vit"
    assert str(script.directive.gpus) == "auto"
    assert (script.gpus, script.nodes, script.ntasks) == (8, 2, 2)
    assert script.gpu_type == "v100"
    assert script.time_limit_s == 36 * 3600
    assert script.partitions == ("main", "high")
    assert script.options["job-name"] == "two words"
    assert script.options["exclusive"] == ""


@pytest.mark.parametrize(
    ("line", "gpus", "ntasks"),
    [
        ("-n4 --gpus-per-task=1", 4, 4),
        ("--gpus=4", 4, 1),
        ("-G a100:4", 4, 1),
        ("-N2 --gpus-per-node=4", 8, 2),
        ("--gres=gpu", 1, 1),
        ("--gres=gpu:a100", 1, 1),
        ("--gres=nic:2,gpu:3", 3, 1),
        ("-N2-4 --gres=gpu:2 --ntasks-per-node=2", 4, 4),
        ("--mem=4G", 0, 1),
    ],
)
def test_gpus_are_counted_over_the_whole_job(line: str, gpus: int, ntasks: int) -> None:
    script = _parse(f"#SBATCH {line}")
    assert (script.gpus, script.ntasks) == (gpus, ntasks)


def test_a_later_value_replaces_an_earlier_one() -> None:
    script = _parse("#SBATCH --ft-samples=1 -n1", "#SBATCH --ft-samples=2 -n2")
    assert (script.directive.samples, script.ntasks) == (2, 2)


def test_the_comment_counts_where_no_option_is_given() -> None:
    assert _parse("#SBATCH --comment='ft: samples=7'").directive.samples == 7


@pytest.mark.parametrize(
    ("lines", "where", "words"),
    [
        (("#SBATCH -n1", "#SBATCH --ft-epochs=three"), "job.sh:3: ", "write a number above 0"),
        (("#SBATCH --ft-epochs=3", "#SBATCH --ft-steps=4"), "job.sh:3: ", "also given"),
        (("#SBATCH --ft-model",), "job.sh:2: ", "the value is missing"),
        (("#SBATCH --ft-model --ft-samples=2",), "job.sh:2: ", "the value is missing"),
        (("#SBATCH --ft-colour=red",), "job.sh:2: ", "there is no such option"),
        (("#SBATCH --comment='ft: samples=x'",), "job.sh:2: ", "whole number"),
    ],
)
def test_a_bad_directive_names_its_line(lines: tuple[str, ...], where: str, words: str) -> None:
    with pytest.raises(DirectiveError) as caught:
        _parse(*lines)
    assert str(caught.value).startswith(where)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "line", ["-N x", "-n 0", "--gres=gpu:many:x", "--time=soon", "--job-name='open"]
)
def test_a_bad_option_of_sbatch_names_its_line(line: str) -> None:
    with pytest.raises(DataError, match=r"^job\.sh:2: "):
        _parse(f"#SBATCH {line}")


@given(st.text(alphabet="#SBATCH -=nNgpustf1xé'\"\n:,", max_size=120))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        script = parse_script(text, now_s=NOW_S)
    except (DirectiveError, DataError):
        return
    assert script.gpus >= 0
    assert script.nodes >= 1
