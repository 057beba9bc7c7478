"""The command line as a whole: exit codes, one line per error, laziness."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from slurm_ext import __version__
from slurm_ext.cli import main as program
from slurm_ext.cli import queue
from slurm_ext.domain.errors import ConfigError


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slurm_ext", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_version():
    done = run("-V")
    assert (done.returncode, done.stdout) == (0, f"slurm-ext {__version__}\n")


@pytest.mark.parametrize("words", [[], ["nonsense"], ["queue", "--nonsense"]])
def test_wrong_usage_is_exit_code_two(words):
    assert run(*words).returncode == 2


def test_a_mistyped_option_prints_the_usage_of_its_sub_command():
    done = run("queue", "--lnog")
    assert done.stderr.startswith("usage: slurm-ext queue ")
    assert "unrecognized arguments: --lnog" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["queue", "--jsom"],
            "slurm-ext queue: error: unrecognized arguments: --jsom; do you mean",
        ),
        (["table", "list", "--tabel", "x"], "unrecognized arguments: --tabel; do you mean --table"),
        (["simulate", "--seed", "-1x"], "argument --seed: -1x looks like an option"),
    ],
)
def test_a_misspelt_option_is_named_not_the_word_behind_it(words, said, capsys):
    with pytest.raises(SystemExit) as caught:
        program.main(words)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--version", "queue"], ["table", "import", "-h"]])
def test_what_is_no_misspelling_is_left_alone(words, capsys):
    with pytest.raises(SystemExit) as caught:
        program.main(words)
    assert caught.value.code == 0
    assert capsys.readouterr().out


def test_an_error_of_ours_is_one_line_and_exit_code_one(tmp_path):
    done = run("check", "--config", str(tmp_path / "absent.yaml"))
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("slurm-ext: error: ")
    assert "absent.yaml" in line


@pytest.mark.parametrize("name", sorted(program.COMMANDS))
def test_every_command_registers_and_has_help(name, capsys):
    importlib.import_module(program.COMMANDS[name][0])
    with pytest.raises(SystemExit) as caught:
        program.main([name, "--help"])
    assert caught.value.code == 0
    assert f"slurm-ext {name}" in capsys.readouterr().out


def test_only_the_wanted_command_is_imported():
    code = (
        "import sys; from slurm_ext.cli.main import build_parser; build_parser('table');"
        "print([m for m in sys.modules if m.startswith(('pydantic', 'prometheus', 'highspy'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "prometheus" not in done.stdout
    assert "highspy" not in done.stdout


def test_a_missing_package_is_named_with_its_fix(monkeypatch, capsys):
    def absent(_: str) -> object:
        raise ModuleNotFoundError("No module named 'pydantic'", name="pydantic")

    monkeypatch.setattr(program.importlib, "import_module", absent)
    assert program.main(["daemon"]) == 1
    told = capsys.readouterr().err
    assert "daemon needs the Python module pydantic" in told
    assert "install" in told
    assert "Traceback" not in told


def test_a_bug_of_ours_is_not_hidden(monkeypatch):
    def absent(_: str) -> object:
        raise ModuleNotFoundError("No module named 'slurm_ext.x'", name="slurm_ext.x")

    monkeypatch.setattr(program.importlib, "import_module", absent)
    with pytest.raises(ModuleNotFoundError):
        program.main(["daemon"])


def test_an_error_while_running_is_one_line(monkeypatch, capsys):
    def fail(_: object) -> int:
        raise ConfigError("place", "reason", "fix")

    monkeypatch.setattr(queue, "run", fail)
    assert program.main(["queue"]) == 1
    assert capsys.readouterr().err == "slurm-ext: error: place: reason; fix\n"


def test_a_reader_that_has_enough_is_no_traceback():
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m slurm_ext --help | true"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
