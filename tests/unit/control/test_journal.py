"""The journal and the ledger: what survives, what is bounded, what is moved aside."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.control.journal import Journal, open_journal
from slurm_ext.control.ledger import KEEP_S, Ledger, holds_something
from slurm_ext.domain.codec import dumps, loads
from slurm_ext.domain.errors import DataError
from slurm_ext.domain.job import Job, JobState, Shape, ShapeKind
from slurm_ext.domain.journal import JournalRow, LedgerEntry

SHAPE = Shape(ShapeKind.RANK_PER_GPU, gpus=4, nodes=1, ntasks=4)
ENTRY = LedgerEntry(
    "7",
    first_submit_s=100.0,
    attempt=1,
    factor=-3,
    lease_until_s=400.0,
    submitted=SHAPE,
    submitted_limit_s=3600.0,
    written=replace(SHAPE, gpus=2, ntasks=2),
    pinned=True,
    veto=True,
    veto_gpus=2,
    notes=("a", "b"),
)


def row(n: int, job: str = "7") -> JournalRow:
    return JournalRow(float(n), n, job, "decision", f"reason {n}")


def job(job_id: str, **fields) -> Job:
    base = int(job_id.split("_")[0])
    values = {
        "user": "alice",
        "partitions": ("main",),
        "state": JobState.PENDING,
        "submit_s": 50.0,
        **fields,
    }
    return Job(job_id=job_id, base_id=base, **values)


def test_everything_survives_reopening(tmp_path):
    path = tmp_path / "j.sqlite"
    with Journal(path, 1000) as journal:
        journal.store([ENTRY], rows=[row(1)], directives={7: "ft:{}"})
    with Journal(path, 1000) as journal:
        assert journal.ledger() == {"7": ENTRY}
        assert journal.history("7") == [row(1)]
        assert journal.history("8") == []
        assert journal.directives() == {7: "ft:{}"}
        assert journal.last_cycle() == 1
        journal.store(removed=["7"])
        journal.forget_directives([7])
    with Journal(path, 1000) as journal:
        assert journal.ledger() == {}
        assert journal.directives() == {}


def test_a_killed_writer_leaves_the_last_transaction(tmp_path):
    path = tmp_path / "j.sqlite"
    journal = Journal(path, 1000)
    journal.store([ENTRY])
    # no close(): the process is gone
    with Journal(path, 1000) as again:
        assert again.ledger() == {"7": ENTRY}


def test_history_is_bounded_and_keeps_the_newest(tmp_path):
    with Journal(tmp_path / "j.sqlite", 1000) as journal:
        for start in range(0, 3000, 100):
            journal.store(rows=[row(n) for n in range(start, start + 100)])
            assert journal.rows() <= 1000
        assert journal.rows() >= 900
        assert journal.history(last=1) == [row(2999)]


def test_a_failed_transaction_leaves_nothing(tmp_path):
    with Journal(tmp_path / "j.sqlite", 1000) as journal:
        bad = replace(row(1), reason=None)
        with pytest.raises(DataError, match=r"j\.sqlite"):
            journal.store([ENTRY], rows=[bad])
        assert journal.ledger() == {}
        journal.store([ENTRY])  # and the journal still works
        assert journal.ledger() == {"7": ENTRY}


@pytest.mark.parametrize("damage", ["garbage", "truncated", "version", "row"])
def test_a_damaged_journal_is_moved_aside_and_told(tmp_path, damage):
    path = tmp_path / "j.sqlite"
    with Journal(path, 1000) as journal:
        journal.store([ENTRY], rows=[row(n) for n in range(2000)])
    if damage == "garbage":
        path.write_bytes(b"x" * 10000)
    elif damage == "truncated":
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
    else:
        db = sqlite3.connect(path)
        if damage == "version":
            db.execute("UPDATE meta SET value='99'")
        else:
            db.execute("UPDATE ledger SET entry='{}'")
        db.commit()
        db.close()
    with pytest.raises(DataError, match=r"j\.sqlite"), Journal(path, 1000) as journal:
        journal.ledger()
    journal, told = open_journal(path, 1000, 1234.0)
    with journal:
        assert journal.ledger() == {}
        assert "j.sqlite.damaged-1234" in told
        assert (tmp_path / "j.sqlite.damaged-1234").exists()
        journal.store([ENTRY])


def test_a_locked_journal_is_not_taken_for_a_damaged_one(tmp_path, monkeypatch):
    monkeypatch.setattr("slurm_ext.control.journal._BUSY_S", 0.05)
    path = tmp_path / "j.sqlite"
    with Journal(path, 1000) as journal:
        journal.store([ENTRY])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DataError, match="locked"):
        open_journal(path, 1000, 1234.0)
    other.close()
    journal, told = open_journal(path, 1000, 1234.0)
    with journal:
        assert not told
        assert journal.ledger() == {"7": ENTRY}
    assert not list(tmp_path.glob("*.damaged*"))


def test_an_unusable_place_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be used"):
        open_journal(tmp_path / "file" / "j.sqlite", 1000, 0.0)


def test_a_removed_file_is_noticed(tmp_path):
    path = tmp_path / "j.sqlite"
    with Journal(path, 1000) as journal:
        assert not journal.lost
        path.unlink()
        assert journal.lost
        path.write_text("another")
        assert journal.lost


numbers = st.one_of(st.none(), st.integers(-(2**31), 2**31))
times = st.one_of(st.none(), st.floats(0, 1e11))
shapes = st.one_of(
    st.none(),
    st.builds(
        Shape,
        st.sampled_from(ShapeKind),
        st.integers(0, 4096),
        st.integers(1, 512),
        st.integers(1, 4096),
    ),
)


@given(
    st.builds(
        LedgerEntry,
        job_id=st.text(min_size=1, max_size=30),
        first_submit_s=st.floats(0, 1e11),
        attempt=st.integers(0, 10**6),
        factor=numbers,
        lease_until_s=times,
        submitted=shapes,
        submitted_limit_s=times,
        submitted_req_nodes=st.lists(st.text()).map(tuple),
        written=shapes,
        pinned=st.booleans(),
        veto_gpus=numbers,
        notes=st.lists(st.text()).map(tuple),
    )
)
def test_an_entry_survives_its_own_text(entry):
    assert loads(LedgerEntry, dumps(entry), "here") == entry


def test_the_ledger_stages_what_changed():
    ledger = Ledger()
    ledger.meet([job("1"), job("2")], 60.0)
    assert [entry.job_id for entry in ledger.staged()[0]] == ["1", "2"]
    ledger.settle()
    ledger.meet([job("1"), job("2")], 61.0)
    assert ledger.staged() == ([], [])
    assert not ledger.put(ledger["1"])
    assert ledger.put(replace(ledger["1"], factor=5))
    assert [entry.job_id for entry in ledger.staged()[0]] == ["1"]
    ledger.unsettle()
    assert [entry.job_id for entry in ledger.staged()[0]] == ["1", "2"]


def test_the_first_submission_survives_a_requeue_and_a_short_absence():
    ledger = Ledger()
    ledger.meet([job("1", submit_s=50.0)], 60.0)
    ledger.meet([], 70.0)
    ledger.meet([job("1", submit_s=900.0, restarts=1)], 900.0)
    assert ledger["1"].first_submit_s == 50.0
    assert ledger["1"].attempt == 0
    ledger.meet([], 1000.0)
    ledger.meet([], 1000.0 + KEEP_S + 1)
    assert "1" not in ledger
    assert ledger.staged()[1] == ["1"]


def test_an_arrays_rest_and_its_tasks_inherit_what_is_ours():
    ledger = Ledger()
    whole = job("5_[1-3]", array=True)
    ledger.meet([whole], 60.0)
    ours = replace(ENTRY, first_submit_s=50.0, attempt=0)
    ledger.put(replace(ours, job_id="5_[1-3]"))
    ledger.meet([job("5_[2-3]", array=True), job("5_1", array=True, state=JobState.RUNNING)], 70.0)
    assert ledger["5_[2-3]"] == replace(ours, job_id="5_[2-3]")
    assert ledger["5_1"] == replace(ours, job_id="5_1")
    assert "5_[1-3]" not in ledger


def test_a_number_that_was_given_to_another_job_inherits_nothing():
    ours = replace(ENTRY, first_submit_s=50.0, attempt=0)
    ledger = Ledger({i: replace(ours, job_id=i) for i in ("1", "2", "5_[1-3]", "5_7", "6_[1-3]")})
    ledger.put(replace(ledger["2"], restarts=2))
    later = [
        job("1", submit_s=90.0),
        job("2", submit_s=90.0, restarts=1),  # fewer requeues than were counted
        job("5_[1-2]", submit_s=90.0, array=True),
        job("5_7", submit_s=90.0, array=True),
        job("6_[2-3]", array=True),
    ]
    ledger.meet(later, 95.0)
    for known in later[:-1]:
        assert ledger[known.job_id] == LedgerEntry(
            known.job_id, known.submit_s, attempt=known.restarts
        )
    assert ledger["6_[2-3]"].factor == ENTRY.factor
    ledger.meet([job("5_1", submit_s=90.0, array=True, state=JobState.RUNNING)], 96.0)
    assert ledger["5_1"].factor is None


def test_holding_something():
    assert holds_something(ENTRY)
    nothing = LedgerEntry("1", 0.0, submitted=SHAPE)
    assert not holds_something(nothing)
    for change in (
        {"factor": 1},
        {"lease_until_s": 5.0},
        {"written": SHAPE},
        {"written_limit_s": 60.0},
        {"pinned": True},
    ):
        assert holds_something(replace(nothing, **change)), change
