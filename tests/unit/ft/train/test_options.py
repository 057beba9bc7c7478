"""The command line of the reference trainer, and that reading it needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slurm_ext.domain.errors import ConfigError
from slurm_ft.train.options import parse
from slurm_ft.train.task import ModelKind, Target


def test_later_sources_win_key_by_key(tmp_path):
    file = tmp_path / "task.yaml"
    file.write_text("name: mine\nsteps: 7\ndepth: 2\nglobal_batch: 16\nquality: top1>=0.5\n")
    environ = {"FT_GLOBAL_BATCH": "64", "FT_FROZEN": "backbone"}
    options = parse(
        ["--preset=vit-base", f"--config={file}", "--steps=9", "--frozen=none"], environ
    )
    task = options.task
    assert task.dim == 768  # the preset
    assert (task.name, task.depth) == ("mine", 2)  # the file, over the preset
    assert task.global_batch == 64  # the plan, over the file
    assert (task.steps, task.frozen) == (9, "none")  # options, over all
    assert task.quality == Target("top1", ">=", 0.5)


def test_the_directive_gives_the_amount_of_work():
    work = {"FT_SAMPLES": "1000", "FT_EPOCHS": "2.5", "FT_BATCH": "64"}
    assert parse([], work).task.steps == 40  # 2500 samples, the last batch begun is made
    assert parse(["--global-batch=100"], work).task.steps == 25
    assert parse([], {**work, "FT_STEPS": "5"}).task.steps == 5
    assert parse([], {"FT_BATCH": "32-256"}).task.global_batch == 32  # a range is the plan's choice


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["--config=/nowhere.yaml"], {}, "/nowhere.yaml"),
        ([], {"FT_SAMPLES": "lots"}, "FT_SAMPLES='lots'"),
        (["--model=decoder"], {"FT_QUALITY": "top1>=0.9"}, "token_accuracy"),
    ],
)
def test_unusable_sources_are_named(argv, environ, words):
    with pytest.raises(ConfigError) as caught:
        parse(argv, environ)
    assert words in str(caught.value)


def test_a_file_without_keys_is_refused(tmp_path):
    file = tmp_path / "list.yaml"
    file.write_text("- steps\n")
    with pytest.raises(ConfigError, match="no keys"):
        parse([f"--config={file}"], {})


def test_the_usage_is_shown_and_a_mistake_is_told_without_torch():
    block = "import sys; sys.modules['torch'] = None; from slurm_ft.train.__main__ import main;"
    helped = subprocess.run(
        [sys.executable, "-c", f"{block} main(['--help'])"], capture_output=True, text=True
    )
    assert helped.returncode == 0, helped.stderr
    assert "--emulate-step-s" in helped.stdout
    wrong = subprocess.run(
        [sys.executable, "-c", f"{block} sys.exit(main(['--steps=0'], {{}}))"],
        capture_output=True,
        text=True,
    )
    assert wrong.returncode == 2
    assert "steps=0" in wrong.stderr


def test_a_preset_is_a_model_that_the_trainer_can_cut():
    task = parse(["--preset=gpt2"], {}).task
    assert task.model is ModelKind.DECODER
    assert task.length == 1024
