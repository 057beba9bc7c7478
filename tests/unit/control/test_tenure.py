"""One daemon per journal and per spool."""

from __future__ import annotations

import errno
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_ext.control import locks
from slurm_ext.control.config import Config
from slurm_ext.control.cycle import Engine
from slurm_ext.control.locks import daemon_lives, spool_lock
from slurm_ext.control.tenure import TakenError, Tenure
from tests.unit.control.bench import Bench


def config(root: Path, journal: str = "j", spool: str = "spool") -> Config:
    return Config(journal=root / journal, spool=root / spool)


def test_journal_and_spool_are_held_each(tmp_path):
    first, second = Tenure(), Tenure()
    first.claim(config(tmp_path))
    first.claim(config(tmp_path))  # a reload that changes nothing
    with pytest.raises(TakenError, match="another daemon runs with this journal"):
        second.claim(config(tmp_path, spool="other"))
    with pytest.raises(TakenError, match="another daemon plans in this spool"):
        second.claim(config(tmp_path, journal="other"))
    second.release()
    first.release()
    second.claim(config(tmp_path))
    second.release()


def test_a_reload_holds_the_new_before_the_old_is_given_back(tmp_path):
    first, second = Tenure(), Tenure()
    first.claim(config(tmp_path))
    moved = config(tmp_path, "j2", "spool2")
    first.claim(moved)
    assert daemon_lives(tmp_path / "j")
    first.keep_only(moved)
    assert not daemon_lives(tmp_path / "j")
    assert daemon_lives(tmp_path / "j2")
    second.claim(config(tmp_path))
    with pytest.raises(TakenError):
        first.claim(config(tmp_path, "j2", "spool"))
    first.release()
    second.release()


def test_users_cannot_lock_us_out(tmp_path):
    """Whoever can open a file can lock it."""
    tenure = Tenure()
    tenure.claim(config(tmp_path))
    path = spool_lock(tmp_path / "spool")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
    tenure.release()


def test_a_spool_that_comes_later_is_held_when_it_comes(tmp_path):
    bench = Bench(tmp_path)
    bench.engine.close()
    shutil.rmtree(tmp_path / "spool")
    (tmp_path / "spool").write_text("not mounted")
    ours, theirs = Tenure(), Tenure()
    ours.claim(bench.config)
    engine = Engine(bench.config, bench.slurm, clock=lambda: bench.now, prepare_spool=ours.prepare)
    engine.cycle()
    (tmp_path / "spool").unlink()
    theirs.claim(bench.config.model_copy(update={"journal": tmp_path / "theirs"}))
    with pytest.raises(TakenError):  # the loop counts this as a failed cycle: nothing is written
        engine.cycle()
    theirs.release()
    assert not engine.cycle().skipped
    with pytest.raises(TakenError):
        theirs.claim(bench.config.model_copy(update={"journal": tmp_path / "theirs"}))
    engine.close()
    ours.release()
    theirs.release()


def test_a_file_system_without_locks_costs_a_warning_not_the_documents(
    tmp_path, monkeypatch, caplog
):
    real = locks.fcntl.flock

    def flock(handle: int, what: int) -> None:
        if Path(f"/proc/self/fd/{handle}").resolve().name == "daemon.lock":
            raise OSError(errno.ENOLCK, "No locks available")
        real(handle, what)

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    bench = Bench(tmp_path)
    bench.engine.close()
    tenure = Tenure()
    tenure.claim(bench.config)
    engine = Engine(
        bench.config, bench.slurm, clock=lambda: bench.now, prepare_spool=tenure.prepare
    )
    engine.cycle()
    assert (tmp_path / "spool" / "plans" / "cluster.json").exists()
    told = [r for r in caplog.records if "no other daemon is kept from this spool" in r.message]
    assert len(told) == 1
    engine.close()
    tenure.release()


def test_asking_whether_a_daemon_lives_makes_no_file(tmp_path):
    assert not daemon_lives(tmp_path / "var" / "j")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_daemon_leaves_no_lock(tmp_path):
    code = (
        "import sys; from pathlib import Path; from slurm_ext.control.config import Config;"
        "from slurm_ext.control.tenure import Tenure; root = Path(sys.argv[1]);"
        "Tenure().claim(Config(journal=root / 'j', spool=root / 'spool'));"
        "print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(TakenError):
        Tenure().claim(config(tmp_path, journal="other"))
    holder.kill()
    holder.communicate(timeout=60)
    tenure = Tenure()
    tenure.claim(config(tmp_path, journal="other"))
    tenure.release()
