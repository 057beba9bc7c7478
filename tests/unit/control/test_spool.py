"""The spool: what users may write, what is refused, and a file server that hangs."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from pathlib import Path

import pytest

from slurm_ext.control import spool as module
from slurm_ext.control.spool import (
    Inbox,
    Spool,
    SpoolThread,
    read_cluster,
    read_plan,
    write_request,
)
from slurm_ext.domain.document import ClusterDocument, Mode, PlanDocument
from slurm_ext.domain.errors import DataError, ProtocolError, SourceMissingError
from slurm_ext.domain.plan import Decision, Verdict
from slurm_ext.domain.policy import Permit
from slurm_ext.domain.progress import Progress
from slurm_ext.domain.request import PinRequest, parse_pin_request

UID = os.getuid()
REPORT = Progress("7", 0, 100.0, 5, 500, 12.5, 4)


@pytest.fixture
def spool(tmp_path):
    found = Spool(tmp_path / "spool")
    found.prepare()
    return found


@pytest.fixture
def mine(spool):
    path = spool.root / str(UID)
    path.mkdir()
    return path


def document(base_id: int = 7) -> PlanDocument:
    return PlanDocument(
        job_id=str(base_id),
        base_id=base_id,
        user="alice",
        partition="main",
        made_s=1.0,
        mode=Mode.ACTING,
        policy="titan",
        decision=Decision(str(base_id), Verdict.WAIT, 0, "its turn comes"),
        permit=Permit(),
        refused={"8": "QOS allows 4"},
    )


def test_preparing_makes_a_sticky_root_and_our_own_directory(spool):
    assert stat.S_IMODE(spool.root.stat().st_mode) == 0o1777
    assert stat.S_IMODE((spool.root / "plans").stat().st_mode) == 0o755
    spool.prepare()  # again, as after a restart


def test_preparing_refuses_a_squatted_directory(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "plans").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="plans"):
        Spool(tmp_path / "spool").prepare()


def test_documents_are_replaced_whole_and_readable(spool):
    spool.write_plans([document()])
    path = spool.root / "plans" / "7.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert read_plan(spool.root, 7) == document()
    assert spool.read_plans() == {7: document()}
    assert [p.name for p in path.parent.iterdir()] == ["7.json"]  # nothing temporary is left
    spool.remove_plans([7, 8])
    with pytest.raises(SourceMissingError):
        read_plan(spool.root, 7)


def test_a_damaged_document_is_an_error_that_names_it(spool, caplog):
    (spool.root / "plans" / "7.json").write_text("{")
    (spool.root / "plans" / "note.txt").write_text("")
    with pytest.raises(ProtocolError, match=r"7\.json"):
        read_plan(spool.root, 7)
    assert spool.read_plans() == {}
    assert "7.json" in caplog.text


def test_the_document_of_the_whole(spool):
    whole = ClusterDocument(1.0, Mode.OBSERVE, "titan", 3, 5.0, 300.0, {"main": ("order",)})
    spool.write_cluster(whole)
    assert read_cluster(spool.root) == whole


def test_another_version_is_refused(spool):
    text = json.loads(document().to_json())
    text["version"] = 2
    (spool.root / "plans" / "7.json").write_text(json.dumps(text))
    with pytest.raises(ProtocolError, match="version 2"):
        read_plan(spool.root, 7)


def test_progress_and_requests_come_in_and_unchanged_files_are_not_read_again(
    spool, mine, monkeypatch
):
    (mine / "progress-7.json").write_text(REPORT.to_json())
    write_request(spool.root, UID, PinRequest(7, True, 50.0, gpus=4))
    (mine / ".progress-9.json.tmp").write_text("being written")
    inbox = spool.read_inbox([UID, 54321])
    assert inbox.progress == {(UID, "7"): REPORT}
    assert inbox.requests == {(UID, 7): PinRequest(7, True, 50.0, gpus=4)}

    def opened(*_):
        raise AssertionError("an unchanged file was read again")

    monkeypatch.setattr(module, "read_untrusted", opened)
    assert spool.read_inbox([UID]) == inbox
    monkeypatch.undo()
    (mine / "progress-7.json").unlink()
    assert spool.read_inbox([UID]).progress == {}


def _link(mine: Path) -> None:
    (mine / "real").write_text(REPORT.to_json())
    (mine / "progress-7.json").symlink_to(mine / "real")


def _second_name(mine: Path) -> None:
    (mine / "real").write_text(REPORT.to_json())
    os.link(mine / "real", mine / "progress-7.json")


def _fifo(mine: Path) -> None:
    os.mkfifo(mine / "progress-7.json")


def _large(mine: Path) -> None:
    (mine / "progress-7.json").write_text(" " * 20_000 + REPORT.to_json())


def _binary(mine: Path) -> None:
    (mine / "progress-7.json").write_bytes(b"\xff\xfe")


def _other_job(mine: Path) -> None:
    (mine / "progress-7.json").write_text(REPORT.to_json().replace('"7"', '"8"'))


def _unbounded(mine: Path) -> None:
    (mine / "progress-7.json").write_text(REPORT.to_json().replace("12.5", "1e300"))


@pytest.mark.parametrize(
    "trick", [_link, _second_name, _fifo, _large, _binary, _other_job, _unbounded]
)
def test_a_file_that_is_not_what_it_should_be_is_refused_and_told_once(spool, mine, caplog, trick):
    trick(mine)
    assert spool.read_inbox([UID]) == Inbox()
    assert spool.read_inbox([UID]) == Inbox()
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    assert "progress-7.json" in caplog.text


@pytest.mark.skipif(UID != 0, reason="giving a file away needs root")
def test_a_file_or_directory_of_another_owner_is_refused(spool, mine, caplog):
    (mine / "progress-7.json").write_text(REPORT.to_json())
    os.chown(mine / "progress-7.json", 12345, -1)
    assert spool.read_inbox([UID]) == Inbox()
    assert "belongs to user 12345" in caplog.text
    other = spool.root / "54321"
    other.mkdir()
    (other / "progress-7.json").write_text(REPORT.to_json())
    assert spool.read_inbox([54321]) == Inbox()
    assert "does not belong to user 54321" in caplog.text


def test_a_linked_directory_is_not_entered(spool, tmp_path, caplog):
    real = tmp_path / "real"
    real.mkdir()
    (real / "progress-7.json").write_text(REPORT.to_json())
    (spool.root / str(UID)).symlink_to(real)
    assert spool.read_inbox([UID]) == Inbox()
    assert str(UID) in caplog.text


def test_nobody_speaks_for_another_users_job():
    inbox = Inbox(
        requests={
            (2001, 7): PinRequest(7, True, 10.0),
            (2002, 7): PinRequest(7, False, 99.0),
            (0, 8): PinRequest(8, True, 5.0),
            (2001, 8): PinRequest(8, False, 6.0),
        }
    )
    assert inbox.request_about(2001, 7) == PinRequest(7, True, 10.0)
    assert inbox.request_about(2001, 8) == PinRequest(8, False, 6.0)
    assert inbox.request_about(2003, 8) == PinRequest(8, True, 5.0)  # root may
    assert inbox.request_about(2003, 7) is None


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"job_id": 0},
        {"job_id": "7"},
        {"gpus": 0},
        {"gpus": 10**9},
        {"gpus": 1.5},
        {"pinned": 1},
        {"extra": 1},
    ],
)
def test_a_malformed_request_is_refused(change):
    good = json.loads(PinRequest(7, True, 1.0).to_json())
    assert parse_pin_request(json.dumps(good), "p").job_id == 7
    with pytest.raises(ProtocolError, match="p:"):
        parse_pin_request(json.dumps({**good, **change}), "p")


def test_a_missing_spool_is_missing_not_empty(tmp_path):
    with pytest.raises(SourceMissingError):
        Spool(tmp_path / "absent").read_inbox([UID])


def test_a_hanging_file_server_costs_one_limit_and_nothing_piles_up(spool):
    thread = SpoolThread(spool, 0.05)
    let_go = threading.Event()
    began: list[int] = []

    def hang(_: Spool) -> int:
        began.append(1)
        let_go.wait(30)
        return 1

    with pytest.raises(SourceMissingError, match=r"no answer within 0\.05 s"):
        thread.call(hang)
    for _ in range(3):
        with pytest.raises(SourceMissingError, match="still hangs"):
            thread.call(hang)
    assert began == [1]
    let_go.set()
    for running in threading.enumerate():
        if running.name == "spool":
            running.join(10)
    assert thread.call(lambda s: s.root) == spool.root


def test_an_error_of_the_spool_reaches_the_caller(spool):
    def fail(_: Spool) -> None:
        raise SourceMissingError("x", "gone")

    with pytest.raises(SourceMissingError, match="gone"):
        SpoolThread(spool, 5.0).call(fail)
