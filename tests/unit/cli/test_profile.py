"""``slurm-ext table profile`` without training: script, files, stand-ins for srun and programs."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from slurm_ext.cli.main import build_parser, main
from slurm_ext.cli.measure import Reports, Seen, StepLauncher, Work, expand
from slurm_ext.cli.profile import gpu_type_of, run, worth_text
from slurm_ext.domain.errors import ConfigError, DataError, ProtocolError
from slurm_ext.domain.progress import Progress
from slurm_ext.estimate.csvtext import parse
from slurm_ext.estimate.trials import Trial, Worth
from slurm_ft.launch.options import parse as parse_ft_run

TRIAL = Trial(2, (2,), 4)
# Reports as a session does: 10 ms a step, made so fast that a test need not wait.
PROGRAM = """
import json, os, sys, time
batch, steps = int(sys.argv[1]), int(sys.argv[2])
if os.environ.get("RANK", "0") != "0":
    sys.exit()
if len(sys.argv) > 3 and batch >= int(sys.argv[3]):
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB")
at, path = time.time(), os.environ["FT_PROGRESS_FILE"]
for step in (2, steps // 2, steps):
    report = dict(job_id="1", attempt=0, at_s=at + step * 0.01, step=step, samples=step * batch,
                  samples_per_s=batch / 0.01, gpus=1, first_step_s=at, version=1)
    with open(path + ".new", "w") as file:
        json.dump(report, file)
    os.replace(path + ".new", path)
    time.sleep(0.3)
"""


def profile(*words: str) -> int:
    return main(["table", "profile", *words])


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return f"{sys.executable} {path} {{global_batch}} {{steps}}"


def rows_of(path: Path):
    with open(path, newline="") as file:
        parsed = parse(file, str(path))
    assert not parsed.errors
    return parsed.measurements


def test_the_script_takes_the_largest_trial_and_runs_the_same_options(capsys, tmp_path):
    out = tmp_path / "rows of mine.csv"
    assert (
        profile(
            *("--script", "--preset=vit-large", "-G", "1,4,8", "--gpus-per-node=4"),
            *("-b", "8,16", "--precision=bf16", "--limit=100", f"--output={out}"),
            "--sbatch=--partition=gpu",
        )
        == 0
    )
    script = capsys.readouterr().out
    lines = script.splitlines()
    assert "#SBATCH --nodes=2 --ntasks=8 --ntasks-per-node=4" in lines
    assert "#SBATCH --gpus-per-task=1" in lines
    assert "#SBATCH --partition=gpu" in lines
    assert "#SBATCH --time=00:15:00" in lines  # 6 trials of 130 s and 120 s to begin with
    words = shlex.split(lines[-1].removeprefix("exec "))
    assert words[:3] == [sys.executable, "-m", "slurm_ext.cli.main"]
    again = build_parser("table").parse_args(words[3:])
    assert again.here
    assert (again.gpus, again.local_batches, again.precisions) == ("1,4,8", "8,16", "bf16")
    assert (again.gpus_per_node, again.limit, again.output) == (4, 100.0, out)


def test_a_job_is_submitted_through_sbatch(capsys, tmp_path, monkeypatch):
    stub = tmp_path / "sbatch"
    stub.write_text(f'#!/bin/sh\ncat > {tmp_path}/script\necho "77;cluster"\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert profile("--model=m") == 0
    assert "job 77" in capsys.readouterr().out
    assert "table profile --here --model=m" in (tmp_path / "script").read_text()
    stub.write_text("#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    assert profile("--model=m") == 1
    assert "invalid partition" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "the rows have no model"),
        (("--model=m", "--gpus=0"), "--gpus=0"),
        (("--model=m", "--local-batch=a"), "--local-batch=a"),
        (("--model=m", "--grad-checkpointing=maybe"), "maybe"),
        (("--model=m", "--steps=2"), "--steps at 3"),
        (("--model=m", "--gpus=3", "--stages=2"), "no combination"),
        (("--model=m", "--preset=gpt2", "--command=x"), "--preset"),
        (("--model=m", "--here"), "no allocation"),
        (("--model=m", "--local", "--command='x"), "quot"),
        (("--model=m", "--local", "--command=x {batch}"), "{batch}"),
    ],
)
def test_what_cannot_be_run_is_refused(words, message, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert profile(*words) == 1
    assert message in capsys.readouterr().err


def test_a_step_asks_for_its_ranks_exactly_and_never_requeues_the_allocation():
    argv = StepLauncher().argv(Trial(6, (4, 2), 8))
    assert argv[0] == "srun"
    assert {"--exact", "--nodes=2", "--ntasks=6", "--gpus-per-task=1"} <= set(argv)
    assert {"--ntasks-per-node=4", "--distribution=block,pack"} <= set(argv)  # 4 + 2, not 3 + 3
    ft_run = argv[argv.index("slurm_ft.launch.main") + 1 :]
    options = parse_ft_run([*ft_run, "program"], {})
    assert options.on("no-requeue")
    assert list(options.command) == ["program"]
    assert "--gpus-per-task=1" not in StepLauncher(gpus_per_task=False).argv(TRIAL)


def test_a_program_of_ones_own_is_measured_by_its_reports(tmp_path, program, capsys):
    out = tmp_path / "rows.csv"
    words = ("--local", "--model=mine", f"--command={program}", "--gpu-type=a100", f"-O{out}")
    assert profile(*words, "-b4,8", "--warmup=2", "--steps=20") == 0
    rows = rows_of(out)
    assert [(row.key.local_batch, row.key.gpu_type) for row in rows] == [(4, "a100"), (8, "a100")]
    # The reports say 10 ms a step; their times of writing do not matter.
    assert [row.throughput for row in rows] == [pytest.approx(400.0), pytest.approx(800.0)]
    said = capsys.readouterr().out
    assert "jobs of 150000 samples pay back" in said or "job of 150000 samples pay back" in said
    assert "GPU hours" in said
    # What is in the file is not run again, unless it is asked for.
    before = out.read_text()
    assert profile(*words, "-b4,8", "--warmup=2", "--steps=20") == 0
    assert out.read_text() == before
    assert "in the file already" in capsys.readouterr().out
    assert profile(*words, "-b4", "--warmup=2", "--steps=20", "--again") == 0
    assert [row.count for row in rows_of(out)] == [2, 1]


def test_a_batch_that_does_not_fit_is_a_row_and_larger_ones_are_left_out(tmp_path, program, capsys):
    out = tmp_path / "rows.csv"
    words = ("--local", "--model=mine", f"--command={program} 8", "--gpu-type=a100", f"-O{out}")
    assert profile(*words, "-b4,8,16", "--warmup=2", "--steps=10") == 0
    assert [(r.key.local_batch, r.count, r.out_of_memory) for r in rows_of(out)] == [
        (4, 1, 0),
        (8, 0, 1),
    ]
    assert "left out: a smaller batch ran out of memory" in capsys.readouterr().out


def test_a_failing_program_leaves_no_row_and_its_last_line(tmp_path, capsys):
    out = tmp_path / "rows.csv"
    command = f"{sys.executable} -c \"import sys; sys.exit('no such file: data.bin')\""
    assert profile("--local", "--model=m", f"--command={command}", "--gpu-type=x", f"-O{out}") == 1
    said = capsys.readouterr().out
    assert "no such file: data.bin" in said
    assert said.splitlines()[-1] == f"there is no row to import; {out} is not written"
    assert not out.exists()


def test_a_program_that_hangs_is_ended_at_its_limit(tmp_path, capsys):
    command = f"{sys.executable} -c 'import time; time.sleep(600)'"
    words = ("--local", "--model=m", f"--command={command}", "--gpu-type=x", "--limit=0.5")
    assert profile(*words, f"-O{tmp_path / 'rows.csv'}") == 1
    assert "not done within its limit" in capsys.readouterr().out


def test_a_damaged_file_is_not_written_over(tmp_path, capsys):
    out = tmp_path / "rows.csv"
    out.write_text("model,gpu_type,gpus,local_batch,throughput\nm,v100,one,8,5\n")
    before = out.read_text()
    args = build_parser("table").parse_args(
        ["table", "profile", "--local", "--model=m", "--command=true", f"-O{out}"]
    )
    with pytest.raises(DataError, match="one"):
        run(args, {})
    assert out.read_text() == before


def reports(tmp_path: Path, *found: Progress) -> Reports:
    """What a command has said, one report after another."""
    said = Reports(tmp_path, Work(command=("x",), warmup=2, steps=20), Seen())
    for report in found:
        said.progress_file.write_text(report.to_json())
        said.read()
    return said


def report(step: int, at_s: float, batch: int = 8, rate: float = 0.0) -> Progress:
    return Progress("1", 0, at_s, step, step * batch, rate, 2, first_step_s=100.0)


def test_times_are_those_of_the_steps_and_not_of_the_reports(tmp_path):
    # Reports at odd moments, the rate over all steps: 0.5 s a step.
    said = reports(tmp_path, report(4, 102.4, rate=16.0), report(10, 105.0, rate=16.0))
    assert [timing.wall_s for timing in said.timings()] == [pytest.approx(0.5)] * 6
    # Long after the beginning the rate is of the last minute only: then the clock counts.
    late = reports(tmp_path, report(400, 300.0, rate=16.0), report(402, 303.0, rate=16.0))
    assert [timing.wall_s for timing in late.timings()] == [pytest.approx(1.5)] * 2


def test_steps_of_the_warm_up_do_not_count(tmp_path):
    said = reports(tmp_path, report(1, 101.0), report(2, 109.0), report(4, 110.0))
    assert [timing.wall_s for timing in said.timings()] == [0.5, 0.5]


def test_a_command_that_takes_another_batch_is_not_believed(tmp_path):
    right = reports(tmp_path, report(2, 101.0), report(12, 102.0))
    assert right.wrong_batch(TRIAL) == ""
    wrong = reports(tmp_path, report(2, 101.0, batch=16), report(12, 102.0, batch=16))
    assert "about 16 samples and not 8" in wrong.wrong_batch(TRIAL)


def test_a_report_of_another_form_is_an_error_and_not_silence(tmp_path):
    said = Reports(tmp_path, Work(command=("x",)), Seen())
    said.read()  # none yet
    said.progress_file.write_text('{"version": 9}')
    with pytest.raises(ProtocolError, match="version 9"):
        said.read()


def test_a_half_written_line_of_timings_waits_for_its_rest(tmp_path):
    said = Reports(tmp_path, Work(warmup=1, steps=3), Seen())
    head = json.dumps({"environment": "torch-9", "device": "NVIDIA A100-SXM4-80GB"})
    lines = [
        json.dumps({"step": i, "at_s": 100.0 + i, "wall_s": 0.1 * i, "compute_s": 0.05})
        for i in (1, 2, 3)
    ]
    said.timing_file.write_text("\n".join([head, *lines])[:-5])
    said.read()
    assert [timing.wall_s for timing in said.timings()] == [0.2]
    assert said.first_step_at_s == 101.0


def test_words_of_a_command_are_replaced_wherever_they_stand():
    assert expand(["--b={local_batch}", "x"], {"local_batch": 8}) == ["--b=8", "x"]
    with pytest.raises(ConfigError, match=r"\{batch\}"):
        expand(["{batch}"], {"local_batch": 8})


@pytest.mark.parametrize(
    ("device", "word"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H200", "h200"),
        ("Tesla V100-PCIE-16GB", "v100"),
        ("cpu", "cpu"),
        ("", ""),
    ],
)
def test_a_gpu_is_called_as_in_gres_conf(device, word):
    assert gpu_type_of(device) == word


def test_what_it_was_worth_is_one_sentence():
    key = Trial(2, (2,), 8, 4).key("m", "v100", "e")
    text = worth_text(Worth(1.5, 2, 4.0, 2.5, key, 1000, 3))
    assert "8 x 4" in text
    assert "3 jobs of 1000 samples" in text
    assert "1 job of 1000" in worth_text(Worth(1.5, 2, 4.0, 2.5, key, 1000, 1))
    assert "nothing to choose" in worth_text(Worth(1.5, 2, 4.0, 4.0, key, 1000, None))
    assert "nothing was measured" in worth_text(Worth(1.5, 0, 0.0, 0.0, None, 1000, None))
