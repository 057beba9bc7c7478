"""The submitter against fake `sbatch` and `squeue`: on time, and no job lost without a word."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ci.replay import submitter

# Ends every job at once: start and end stamps, and an id from the job's number.
SBATCH_GOOD = """#!/bin/bash
name=$(basename "$2" .sh)
printf 'start 1 %s 0 1 n1 1\\nend 2 %s 0\\n' "${name#ft-}" "${name#ft-}" >"$STAMPS/$name"
echo "${name#ft-};cluster"
"""
SQUEUE_EMPTY = "#!/bin/bash\n"


class Run:
    """One call of the submitter in a folder of its own, with fakes first in PATH."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capsys: Any) -> None:
        self._folder = folder
        self._capsys = capsys
        (folder / "bin").mkdir()
        (folder / "stamps").mkdir()
        patch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        patch.setenv("STAMPS", str(folder / "stamps"))
        patch.setattr(submitter, "POLL_S", 0.02)
        patch.setattr(submitter, "LOOK_S", 0.05)
        patch.setattr(submitter, "GONE_S", 0.1)

    def __call__(
        self,
        sbatch: str = SBATCH_GOOD,
        squeue: str = SQUEUE_EMPTY,
        arrivals: tuple[float, ...] = (0.0, 0.3),
        limit_s: float = 20,
    ) -> tuple[int, dict[str, Any], dict[str, Any]]:
        """Exit code, result and last status."""
        for name, text in (("sbatch", sbatch), ("squeue", squeue)):
            (self._folder / "bin" / name).write_text(text)
            (self._folder / "bin" / name).chmod(0o755)
        jobs, status = self._folder / "jobs.json", self._folder / "status.json"
        rows = [
            {"name": f"ft-{i}", "arrives_s": at, "script": str(self._folder / f"ft-{i}.sh")}
            for i, at in enumerate(arrivals)
        ]
        jobs.write_text(json.dumps(rows))
        code = submitter.main([str(jobs), str(status), str(limit_s)])
        return code, json.loads(self._capsys.readouterr().out), json.loads(status.read_text())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(tmp_path, monkeypatch, capsys)


def test_jobs_are_submitted_on_time_and_counted(run: Run) -> None:
    code, result, status = run()
    assert code == 0
    first, second = result["jobs"]
    assert (first["job_id"], second["job_id"]) == ("0", "1")
    assert second["submit_s"] - result["begun_s"] >= 0.3
    assert 0 <= result["lag_s"] < 5
    assert (status["total"], status["submitted"], status["done"]) == (2, 2, 2)
    assert status["running"] == 0


def test_refused_submission_names_the_job_and_the_reason(run: Run) -> None:
    refuse = "#!/bin/bash\necho 'sbatch: error: --ft-batch=x: write a number' >&2\nexit 1\n"
    code, result, _ = run(sbatch=refuse)
    assert code == 1
    assert "write a number" in result["problems"]["ft-0"]


def test_job_whose_environment_does_not_fit_is_named(run: Run) -> None:
    unfit = SBATCH_GOOD.replace("start 1 %s 0 1 n1 1\\nend 2 %s 0", "unfit 1 SLURM_NTASKS=3 %s%s")
    code, result, _ = run(sbatch=unfit, arrivals=(0.0,))
    assert code == 1
    assert "SLURM_NTASKS=3" in result["problems"]["ft-0"]


def test_job_that_vanished_from_the_queue_is_named(run: Run) -> None:
    silent = "#!/bin/bash\necho 5\n"
    code, result, _ = run(sbatch=silent, arrivals=(0.0,))
    assert code == 1
    assert "left the queue without finishing" in result["problems"]["ft-0"]


@pytest.mark.parametrize("squeue", ["#!/bin/bash\necho 5\n", "#!/bin/bash\nexit 1\n"])
def test_job_that_never_ends_is_named_at_the_limit(run: Run, squeue: str) -> None:
    # A squeue that fails is no proof that the job is gone: only the limit ends the replay.
    code, result, _ = run(
        sbatch="#!/bin/bash\necho 5\n", squeue=squeue, arrivals=(0.0,), limit_s=0.3
    )
    assert code == 1
    assert "has not ended after 0 s" in result["problems"]["ft-0"]
