"""The command line of ft-run, its templates, and that help and page tell every option."""

from __future__ import annotations

import pytest

from slurm_ft.launch.errors import UsageError
from slurm_ft.launch.options import OPTIONS, parse
from slurm_ft.launch.templates import NAMES, fill
from slurm_ft.launch.usage import usage


def test_the_command_begins_with_the_first_word_that_is_no_option():
    found = parse(["--grace=60", "--spool", "/s", "python", "--grace=1", "-v"], {})
    assert found.command == ("python", "--grace=1", "-v")
    assert found.seconds("grace") == 60.0
    assert found["spool"] == "/s"
    assert parse(["--", "--odd"], {}).command == ("--odd",)
    assert parse(["-v", "-"], {}).command == ("-",)


def test_the_command_line_goes_before_the_environment():
    env = {"FT_SIGNALS": "TERM", "FT_GRACE_S": "30", "FT_SPOOL": ""}
    found = parse(["--grace=60", "x"], env)
    assert found["signals"] == "TERM"
    assert found["grace"] == "60"
    assert found["spool"] == "/var/spool/slurm-ext"
    assert {"signals", "grace"} <= found.given
    assert "spool" not in found.given


def test_switches_and_repeats():
    argv = ["--no-requeue", "--ft-arg=a", "--ft-arg", "b", "--on-preempt=s", "--on-preempt-each"]
    found = parse([*argv, "x"], {})
    assert found["requeue"] == "never"
    assert found.ft_args == ("a", "b")
    assert found.on("on-preempt-each")
    assert not found.on("verbose")


def test_a_hook_for_every_rank_needs_a_hook():
    with pytest.raises(UsageError, match="add --on-preempt=COMMAND"):
        parse(["--on-preempt-each", "x"], {})
    assert parse(["--on-preempt-each", "x"], {"FT_ON_PREEMPT": "s"}).on("on-preempt-each")


@pytest.mark.parametrize("text", ["soon", "60-soon", "0", "-5"])
def test_a_bad_interval_is_told_all_three_forms(text: str):
    with pytest.raises(UsageError, match=f"--checkpoint-interval={text}: .* auto, .*120-1800, or"):
        parse([f"--checkpoint-interval={text}", "x"], {})


@pytest.mark.parametrize(
    "argv",
    [
        ["--nope"],
        ["-x"],
        ["--grace"],
        ["--grace="],
        ["--grace=-1"],
        ["--grace=nan"],
        ["--verbose=yes"],
        ["--requeue=perhaps"],
        ["--launcher=maybe"],
        ["--checkpoint-interval=often"],
        ["--checkpoint-interval=600-60"],
    ],
)
def test_slips_name_the_option(argv: list[str]):
    with pytest.raises(UsageError, match=argv[0].partition("=")[0]):
        parse([*argv], {})


@pytest.mark.parametrize("text", ["auto", "60-600", "90", "0.5"])
def test_intervals(text: str):
    assert parse([f"--checkpoint-interval={text}"], {})["checkpoint-interval"] == text


def test_help_tells_every_option_and_its_variable():
    told = usage()
    for option in OPTIONS:
        assert f"--{option.name}" in told
        assert option.environment in told


ENV = {"FT_LOCAL_BATCH": "16", "FT_GPUS": "8", "RANK": "0"}


@pytest.mark.parametrize(
    ("template", "argument"),
    [
        ("--batch={local_batch}", ["--batch=16"]),
        ("{gpus}x{local_batch}", ["8x16"]),
        ("--json={{{gpus}}}", ["--json={8}"]),
        ("--accumulate={accumulation}", []),
        ("--accumulate={accumulation=1}", ["--accumulate=1"]),
        ("--precision={precision=}", ["--precision="]),
        ("plain", ["plain"]),
    ],
)
def test_templates(template: str, argument: list[str]):
    assert fill([template], ENV) == argument


@pytest.mark.parametrize("template", ["{gpu}", "{}", "{gpus", "gpus}", "{{}"])
def test_template_slips_are_errors(template: str):
    with pytest.raises(UsageError, match="--ft-arg="):
        fill([template], ENV)


def test_an_unknown_name_lists_the_names():
    with pytest.raises(UsageError) as caught:
        fill(["{batch}"], ENV)
    assert all(name in str(caught.value) for name in NAMES)


@pytest.mark.parametrize(
    "argv",
    [
        ["--ft-arg", "--", "true"],
        ["--on-preempt", "--grace=3", "--", "true"],
        ["--on-resume", "--verbose", "--", "true"],
        ["--state-dir", "--", "true"],
    ],
)
def test_an_option_without_its_value_does_not_swallow_what_follows(argv: list[str]):
    with pytest.raises(UsageError, match=f"{argv[0]} wants a value; write {argv[0]}="):
        parse(argv, {})


def test_a_template_may_look_like_an_option():
    assert parse(["--ft-arg", "--batch={local_batch}", "--", "true"], {}).ft_args == (
        "--batch={local_batch}",
    )
    assert parse(["--ft-arg", "--verbose", "--", "true"], {}).ft_args == ("--verbose",)
