"""The demonstration end to end on a few jobs: every variant, every key, and nothing left behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ci.cluster import engine, registry
from ci.replay.__main__ import INTERRUPTED, main
from tests.cluster.runner import hears_interrupts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_three_variants_of_a_few_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, picture = tmp_path / "r.json", tmp_path / "g.svg"
    code = main(["--jobs=5", "--time-scale=240", f"--json={result}", f"--gantt={picture}"])
    shown = capsys.readouterr()
    assert code in (0, 1), shown.err  # 1 where a check was missed, e.g. on a busy machine
    document = json.loads(result.read_text())
    assert set(document) == {"plain", "order", "slurm_ext", "ratio", "meta"}
    variants = document["meta"]["variants"]
    assert {found["jobs"] for found in variants.values()} == {5}
    assert variants["plain"]["resized"] == variants["order"]["resized"] == 0
    assert variants["slurm_ext"]["resized"] > 0
    assert "no benchmark" in shown.out
    assert picture.read_bytes().startswith(b"<?xml")
    names = re.findall(r"starting (\S+):", shown.err)
    assert len(names) == 3
    assert not set(names) & set(registry.running(engine.connect()))


def test_interrupt_leaves_nothing_behind() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ci.replay", "--variants=plain", "--keep"],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hears_interrupts,
    )
    assert process.stderr is not None
    told = ""
    for line in process.stderr:
        told += line
        if " done, " in line:  # the replay has begun
            break
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED, told + rest
    (name,) = re.findall(r"starting (\S+):", told)
    assert name not in registry.running(engine.connect())
