"""Running commands: time limits that hold, and an environment that nobody changes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from slurm_ext.domain.errors import NO_SUCH_COMMAND, SlurmCommandError
from slurm_ext.slurm.process import CommandRunner, slurm_environment

PYTHON = sys.executable


def test_the_answer_is_text_whatever_the_bytes() -> None:
    code = r"import sys; sys.stdout.buffer.write(b'a\xff\n'); sys.stderr.write('warn')"
    answer = CommandRunner().run([PYTHON, "-c", code])
    assert (answer.stdout, answer.stderr, answer.rc) == ("a\ufffd\n", "warn", 0)


def test_standard_input_is_given_and_ended() -> None:
    answer = CommandRunner().run([PYTHON, "-c", "print(input() + '!')"], stdin="hello\n")
    assert answer.stdout == "hello!\n"


def test_a_failing_command_names_itself_its_code_and_its_words() -> None:
    argv = [PYTHON, "-c", "import sys; sys.exit('no controller')"]
    with pytest.raises(SlurmCommandError, match="exit code 1: no controller") as caught:
        CommandRunner().run(argv)
    assert (caught.value.rc, caught.value.argv) == (1, tuple(argv))
    assert CommandRunner().run(argv, check=False).rc == 1


def test_a_command_that_is_killed_is_an_error_even_unchecked() -> None:
    with pytest.raises(SlurmCommandError) as caught:
        CommandRunner().run(
            [PYTHON, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"], check=False
        )
    assert caught.value.rc == -11


def test_a_missing_command_is_an_error_of_the_same_kind() -> None:
    with pytest.raises(SlurmCommandError, match="cannot be started: not found on PATH") as caught:
        CommandRunner().run(["/nonexistent/squeue", "-O", "JobID:,State:,Reason:"])
    assert caught.value.rc == NO_SUCH_COMMAND
    assert "JobID" not in str(caught.value)  # its arguments would hide what is wrong


def test_a_command_that_may_not_be_run_says_why(tmp_path: Path) -> None:
    command = tmp_path / "squeue"
    command.write_text("no program")
    with pytest.raises(SlurmCommandError, match=r"squeue cannot be started: Permission denied"):
        CommandRunner().run([str(command)])


@pytest.mark.parametrize("shell", [False, True])
def test_a_hanging_command_ends_at_the_limit_with_its_children(shell: bool, tmp_path: Path) -> None:
    """A wrapper script's child keeps the pipe: killing the script alone would wait for ever."""
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(99)"
    argv = [PYTHON, "-c", code]
    if shell:
        argv = ["/bin/sh", "-c", '"$@"; true', "sh", *argv]
    begin = time.monotonic()
    with pytest.raises(SlurmCommandError, match="no answer within 1 s") as caught:
        CommandRunner(timeout_s=1).run(argv)
    assert time.monotonic() - begin < 10
    assert caught.value.rc is None
    pid = int(pid_file.read_text())
    end = time.monotonic() + 10
    while _alive(pid):
        assert time.monotonic() < end, f"process {pid} outlived its command"
        time.sleep(0.01)


def test_what_a_hanging_command_complains_of_is_told() -> None:
    """A Slurm command without munge tries again for long, and says why only to its own screen."""
    argv = ["/bin/sh", "-c", "echo a >&2; echo Did you start munged? >&2; sleep 9"]
    with pytest.raises(SlurmCommandError, match=r"within 1 s \(Did you start munged\?\)"):
        CommandRunner(timeout_s=1).run(argv)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_limit_that_lets_nothing_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="time limit"):
        CommandRunner(timeout_s=0)


def test_the_environment_is_cleaned() -> None:
    base = {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm/other.conf",
        "SQUEUE_FORMAT": "%i",
        "SQUEUE_STATES": "running",
        "SINFO_FORMAT": "%n",
        "SLURM_CLUSTERS": "other",
        "SLURM_TIME_FORMAT": "relative",
        "SLURM_BITSTR_LEN": "10",
        "LC_ALL": "de_DE.UTF-8",
        "TZ": "Europe/Berlin",
    }
    assert slurm_environment(base) == {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm/other.conf",
        "SLURM_TIME_FORMAT": "%s",
        "SLURM_BITSTR_LEN": "0",
        "LC_ALL": "C",
        "LANG": "C",
        "TZ": "UTC0",
    }
    assert os.environ.get("SLURM_TIME_FORMAT") != "%s"
