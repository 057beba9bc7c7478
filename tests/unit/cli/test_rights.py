"""Every command where it may not look: one line that names value, place and fix, no traceback."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from slurm_ext.cli import check, explain, pin, queue, release
from slurm_ext.cli import main as program
from slurm_ext.cli.check import Level
from slurm_ext.cli.check_visitor import visitor
from slurm_ext.control.config import Config
from tests.fakes.slurm import FakeSlurm
from tests.unit.cli.spooled import Site, document, whole
from tests.unit.powerless import shut

# Imported before the rights are gone.
COMMANDS = (check, explain, pin, queue, release)


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A directory with a configuration and a spool that we may not search."""
    site = Site(tmp_path)
    site.write(document(7))
    with shut(tmp_path):
        yield tmp_path


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    return line


def test_a_configuration_out_of_reach(closed, capsys):
    assert program.main(["queue", "--config", str(closed / "config.yaml")]) == 1
    line = one_line(capsys)
    assert f"{closed}/config.yaml: cannot be read" in line
    assert "rights" in line


def test_a_configuration_out_of_reach_named_by_the_environment(closed, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_EXT_CONFIG", str(closed / "config.yaml"))
    assert program.main(["queue"]) == 1
    assert f"{closed}/config.yaml: cannot be read" in one_line(capsys)


def test_a_conf_d_that_cannot_be_listed_is_not_an_empty_one(tmp_path, capsys):
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "config.yaml").write_text("cycle_s: 5\n")
    for folder in [tmp_path, *tmp_path.parents][:-2]:  # up to, but not, /tmp
        folder.chmod(0o755)
    with shut(tmp_path / "conf.d"):
        assert program.main(["queue", "--config", str(tmp_path / "config.yaml")]) == 1
    assert f"{tmp_path}/conf.d: cannot be read" in one_line(capsys)


@pytest.mark.parametrize("words", [["explain", "7"], ["queue"], ["pin", "7"]])
def test_a_spool_out_of_reach(closed, capsys, monkeypatch, words):
    monkeypatch.setenv("SLURM_EXT_SPOOL", str(closed / "spool"))
    assert program.main([*words, "--config", "/dev/null"]) == 1
    line = one_line(capsys)
    assert str(closed / "spool") in line
    assert "Permission denied" in line


@pytest.mark.parametrize("more", [[], ["--if-stale"]])
def test_a_release_that_may_not_see_the_journal_releases_all_the_same(
    closed, capsys, monkeypatch, more
):
    slurm = FakeSlurm(nodes=1, gpu_type="v100")
    monkeypatch.setattr(release, "open_backend", lambda _: slurm)
    words = ["release", "--config", "/dev/null", *more]
    for key in ("journal", "spool", "heartbeat"):
        words += ["--set", f"{key}={closed / key}"]
    assert program.main(words) == 0
    told = capsys.readouterr()
    assert "nothing of ours is out" in told.out
    assert "released without a journal" in told.err
    assert f"{closed}/journal: cannot be looked at" in told.err
    assert slurm.calls["snapshot"] == 1


def test_a_check_without_rights_says_so_line_by_line(closed):
    config = Config(journal=closed / "journal", spool=closed / "spool", heartbeat=closed / "beat")
    for line in (check.journal(config), check.heartbeat(config), *check.released(config)):
        assert line.level is Level.MEND
        assert str(closed) in line.found
        assert "run as the daemon's user" in line.fix
    assert "Permission denied" in check.spool(config).found


@pytest.mark.parametrize("age_s", [1.0, 4000.0])
def test_what_an_ordinary_user_cannot_see_neither_passes_nor_fails(
    tmp_path, monkeypatch, capsys, age_s
):
    """An ordinary user was told to mend the daemon's journal, spool and rights."""
    for folder in [tmp_path, *tmp_path.parents][:-2]:  # up to, but not, /tmp
        folder.chmod(0o755)
    site = Site(tmp_path)
    site.spool.root.chmod(0o1777)
    site.write(document(7), daemon=whole(time.time() - age_s))
    shutter = tmp_path / "var"
    shutter.mkdir()
    (shutter / "journal").write_text("")
    (shutter / "table").write_text("")
    words = ["check", "--config", str(site.config)]
    words += ["--set", f"journal={shutter / 'journal'}", "--set", f"table={shutter / 'table'}"]
    monkeypatch.setattr(check, "open_backend", lambda _: FakeSlurm())
    with shut(shutter):
        code = program.main(words)
    told = capsys.readouterr()
    rows = {line[7:29].strip(): line for line in told.out.splitlines()}
    for name in ("throughput table", "journal", "rights", "spool"):
        assert rows[name].startswith("unseen "), rows[name]
        assert "not visible to nobody: run as root or " in rows[name]
    assert rows["daemon"].startswith("ok " if age_s < 60 else "mend ")
    assert "lines not visible to nobody; run as root or" in told.err
    mends = {name for name, line in rows.items() if line.startswith("mend")}
    assert (code == 1) == bool(mends)
    assert not mends & {"throughput table", "journal", "spool", "rights", "released"}


def test_the_daemons_user_and_root_are_no_visitors(tmp_path):
    site = Site(tmp_path)
    site.write(document(7))
    assert visitor(Config(spool=site.spool.root, journal=tmp_path / "none")) is None


def test_a_journal_of_somebody_else_is_not_called_damaged(tmp_path):
    for folder in [tmp_path, *tmp_path.parents][:-2]:  # up to, but not, /tmp
        folder.chmod(0o755)
    (tmp_path / "j.sqlite").write_text("")
    with shut(tmp_path / "j.sqlite"):
        line = check.journal(Config(journal=tmp_path / "j.sqlite"))
    assert line.level is Level.MEND
    assert "daemon's user" in line.fix


def test_what_nobody_foresaw_is_one_line_too(monkeypatch, capsys):
    def fail(_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/some/place")

    monkeypatch.setattr(queue, "run", fail)
    assert program.main(["queue"]) == 1
    line = one_line(capsys)
    assert line.startswith("slurm-ext: error: /some/place: Permission denied; ")


def test_a_full_disk_behind_stdout(tmp_path):
    site = Site(tmp_path)
    site.write(*(document(number) for number in range(1, 40)))
    argv = [sys.executable, "-m", "slurm_ext", "queue", "--json", "--config", str(site.config)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "No space left on device" in line


def test_the_configuration_of_the_fixture_is_one(tmp_path):
    """The tests above fail for want of rights, not of a configuration."""
    site = Site(tmp_path)
    site.write(document(7))
    assert yaml.safe_load(site.config.read_text())
    assert site.run("queue") == 0
