"""Where files lie in the spool: the job, the login node and the daemon agree on it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_ext.control.spool import Spool
from slurm_ext.domain.progress import Progress
from slurm_ext.domain.request import progress_path


@pytest.mark.parametrize("job_id", ["12", "12_3"])
def test_a_report_is_read_from_where_a_job_writes_it(tmp_path: Path, job_id: str) -> None:
    path = Path(progress_path(tmp_path, os.getuid(), job_id))
    path.parent.mkdir()
    report = Progress(job_id, 0, 1e9, 10, 640, 55.5, 4)
    path.write_text(report.to_json())
    assert Spool(tmp_path).read_inbox([os.getuid()]).progress == {(os.getuid(), job_id): report}
