"""``slurm-ext checkpoint``: listing, verifying and cleaning up, without torch and without Slurm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_ext.cli.main import main
from slurm_ft.checkpoint.blocks import BlockStore
from slurm_ft.checkpoint.layout import step_name
from slurm_ft.checkpoint.manifest import Manifest
from tests.unit.ft.checkpoint.written import save


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two complete checkpoints, a broken one and an unfinished one."""
    root = tmp_path / "ft-checkpoints" / "47_3"
    for step in (1, 2, 3):
        save(root, step, bytes(3000), keep=9, meta={"attempt": step})
    (root / step_name(2) / "data").unlink()
    (root / ".tmp-000000000004-ab").mkdir()
    return root


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoints in the current directory, no Slurm in the path."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("FT_CHECKPOINT_DIR", raising=False)
    monkeypatch.delenv("FT_BLOCK_STORE", raising=False)


def test_ls_lists_the_newest_first_and_says_what_is_wrong(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "ls", str(root), "-h", "-o", "%n %s %t %w %a %l %R"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{step_name(3)} 3 LATEST 1 3 files"
    assert lines[1] == f"{step_name(1)} 1 COMPLETE 1 1 files"
    assert lines[2].startswith(f"{step_name(2)} - BROKEN - - - ")
    assert "No such file" in lines[2]
    assert lines[3] == ".tmp-000000000004-ab - PARTIAL - - -"
    assert main(["checkpoint", "ls", str(root)]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[:3] == ["NAME", "STEP", "STATE"]


def test_ls_json_holds_the_manifests(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", str(root), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [item["step"] for item in document["complete"]] == [3, 1]
    assert document["pointer"] == step_name(3)
    assert [item["name"] for item in document["broken"]] == [step_name(2)]
    assert document["unfinished"] == [".tmp-000000000004-ab"]


def test_verify_tells_by_its_exit_code(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(root)]) == 1
    assert f"{step_name(2)}: not complete" in capsys.readouterr().out
    shutil.rmtree(root / step_name(2))
    assert main(["checkpoint", "verify", "--deep", str(root)]) == 0
    (root / step_name(3) / "data").write_bytes(b"\1" * 3000)
    assert main(["checkpoint", "verify", str(root)]) == 0  # the size is right
    assert main(["checkpoint", "verify", "--deep", str(root)]) == 1
    told = capsys.readouterr()
    assert f"{step_name(3)}: damaged" in told.out
    assert "content is not what was saved" in told.err
    assert (
        main(["checkpoint", "verify", str(root.parent.parent)]) == 1
    )  # nothing there is not "fine"


def test_verify_looks_at_shared_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = BlockStore(tmp_path / "blocks")
    entry, _ = store.put(memoryview(b"weights"))
    place = tmp_path / "c" / step_name(1)
    place.mkdir(parents=True)
    manifest = Manifest(1, 1, 1, 0.0, "blocks", blocks=(entry,), block_store=str(store.root))
    (place / "MANIFEST.json").write_text(manifest.to_json())
    assert main(["checkpoint", "verify", "--deep", str(tmp_path / "c")]) == 0
    store.path(entry.key).chmod(0o600)
    store.path(entry.key).write_bytes(b"Weights")
    assert main(["checkpoint", "verify", str(tmp_path / "c")]) == 0
    assert main(["checkpoint", "verify", "--deep", str(tmp_path / "c")]) == 1
    store.path(entry.key).unlink()
    assert main(["checkpoint", "verify", str(tmp_path / "c")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_a_job_is_found_where_it_was_submitted_from(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "ls", "47_3"]) == 1
    assert "has no checkpoints in ft-checkpoints/47_3" in capsys.readouterr().err
    squeue, sacct = tmp_path / "bin" / "squeue", tmp_path / "bin" / "sacct"
    # A job that has left the queue: squeue fails for the whole call.
    squeue.write_text("#!/bin/sh\necho 'Invalid job id specified' >&2; exit 1\n")
    sacct.write_text(f'#!/bin/sh\n[ "$*" = "-X -n -P -o WorkDir -j 47_3" ] && echo "{tmp_path}"\n')
    squeue.chmod(0o755)
    sacct.chmod(0o755)
    assert main(["checkpoint", "ls", "47_3", "-h", "-o", "%s"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["3", "1"]
    squeue.write_text(f'#!/bin/sh\n[ "$*" = "-h -j 47_3 -o %Z" ] && echo "{tmp_path}"\n')
    sacct.unlink()
    assert main(["checkpoint", "ls", "47_3"]) == 0
    monkeypatch.chdir(tmp_path)
    squeue.unlink()
    assert main(["checkpoint", "ls", "47_3"]) == 0
    monkeypatch.setenv("FT_CHECKPOINT_DIR", str(root))
    assert main(["checkpoint", "ls"]) == 0


def test_gc_of_a_directory_deletes_old_leftovers_only(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "gc", str(root)]) == 0  # a minute old: somebody may be writing it
    assert (root / ".tmp-000000000004-ab").exists()
    os.utime(root / ".tmp-000000000004-ab", (0, 0))
    assert main(["checkpoint", "gc", "--dry-run", str(root)]) == 0
    assert "1 unfinished save would be deleted" in capsys.readouterr().out
    assert main(["checkpoint", "gc", str(root)]) == 0
    assert not (root / ".tmp-000000000004-ab").exists()
    assert (root / step_name(3)).exists()
    assert (root / step_name(2)).exists()  # broken is for a person to look at


def test_gc_says_what_it_keeps_and_what_to_do_about_it(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "gc", str(root)]) == 0
    first, young, broken = capsys.readouterr().out.splitlines()
    assert first == f"{root}: 0 unfinished saves deleted"
    assert young == (
        f"{root}/.tmp-000000000004-ab: kept, a save has changed it within 1-00:00:00; where no save"
        " is running, give a shorter --older-than"
    )
    assert broken.startswith(f"{root}/{step_name(2)}: kept, gc deletes unfinished saves only; ")
    assert "No such file" in broken
    assert broken.endswith("delete it by hand where nobody can mend it")
    os.utime(root / ".tmp-000000000004-ab", (0, 0))
    assert main(["checkpoint", "gc", str(root)]) == 0
    assert "a save has changed it" not in capsys.readouterr().out


def test_the_reason_stands_below_the_checkpoint_that_it_is_about(root: Path) -> None:
    """Also in a file or a pipe that takes both, where stdout is buffered."""
    words = [sys.executable, "-m", "slurm_ext.cli.main", "checkpoint", "verify", str(root)]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=60
    )
    lines = done.stdout.splitlines()
    place = lines.index(f"{root}/{step_name(2)}: not complete")
    assert "No such file" in lines[place + 1]


def test_gc_of_a_block_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = BlockStore(tmp_path / "blocks")
    entry, _ = store.put(memoryview(b"used"))
    unused, _ = store.put(memoryview(b"unused"))
    store.record(tmp_path / "job", "s1", Manifest(1, 1, 1, 0.0, "blocks", blocks=(entry,)))
    (tmp_path / "job" / "s1").mkdir(parents=True)
    os.utime(store.path(unused.key), (0, 0))
    assert main(["checkpoint", "gc", "-n", str(store.root)]) == 0
    assert "1 block (6) would be freed, 1 in use" in capsys.readouterr().out
    assert store.has(unused)
    assert main(["checkpoint", "gc", "--older-than=60", str(store.root)]) == 1
    assert main(["checkpoint", "gc", "--older-than=soon", str(store.root)]) == 1
    assert "--older-than=soon" in capsys.readouterr().err
    assert main(["checkpoint", "gc", str(store.root)]) == 0
    assert not store.has(unused)
    assert store.has(entry)


def test_nothing_named_is_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls"]) == 1
    assert "FT_CHECKPOINT_DIR" in capsys.readouterr().err
    assert main(["checkpoint", "gc"]) == 1
    assert "FT_BLOCK_STORE" in capsys.readouterr().err
    assert main(["checkpoint", "verify", "/nowhere"]) == 1
    assert "is no directory" in capsys.readouterr().err


def test_a_login_node_without_torch_can_look(root: Path) -> None:
    code = (
        "import sys\nfrom slurm_ext.cli.main import main\n"
        f"assert main(['checkpoint', 'verify', '--deep', {str(root)!r}]) == 1\n"
        "assert 'torch' not in sys.modules\n"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={"PYTHONPATH": path},
        timeout=30,
        capture_output=True,
    )


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Two tasks with checkpoints, one of which left an unfinished save; and the chain's own."""
    root = tmp_path / "ft-checkpoints" / "6"
    for task, steps in (("birds", (1, 2)), ("cars", (1,))):
        for step in steps:
            save(root / task, step, bytes(300), keep=9)
    (root / "cars" / ".tmp-000000000002-ab").mkdir()
    (root / "chain").mkdir()
    (root / "chain" / "switch-0001.json").write_text("{}")
    return root


def test_the_tasks_of_a_chain_are_listed_with_their_names(
    chain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "ls", str(chain), "-h", "-o", "%n %t"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"birds/{step_name(2)} LATEST",
        f"birds/{step_name(1)} COMPLETE",
        f"cars/{step_name(1)} LATEST",
        "cars/.tmp-000000000002-ab PARTIAL",
    ]
    assert main(["checkpoint", "ls", str(chain), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [len(task["complete"]) for task in told["tasks"]] == [2, 1]


def test_the_tasks_of_a_chain_are_verified(chain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(chain)]) == 0
    assert capsys.readouterr().out.count(": ok") == 3
    (chain / "cars" / step_name(1) / "data").unlink()
    assert main(["checkpoint", "verify", str(chain)]) == 1
    assert f"{chain / 'cars' / step_name(1)}: not complete" in capsys.readouterr().out


def test_what_a_task_of_a_chain_left_unfinished_goes(
    chain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = chain / "cars" / ".tmp-000000000002-ab"
    os.utime(old, (1.0, 1.0))
    assert main(["checkpoint", "gc", str(chain)]) == 0
    assert f"{old}: deleted" in capsys.readouterr().out
    assert not old.exists()
    assert (chain / "birds" / step_name(2)).is_dir()
