"""The table of shapes: each row as it was run on Slurm 24.11.5."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.control.shapes import (
    possible_counts,
    read_back_matches,
    resize_fields,
    restore_fields,
    scaled_limit,
    shape_for,
)
from slurm_ext.control.submitted import Frame, first_sight, notice_others, offered_counts
from slurm_ext.domain.configuration import Configuration
from slurm_ext.domain.directive import Directive, GpuRequest, GpuRequestKind, RequestedShape
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.domain.job import Job, JobState, Shape, ShapeKind
from slurm_ext.domain.journal import LedgerEntry

RANK, LAUNCHER, SINGLE, TASKS, FIXED = ShapeKind
RANKS = Frame(RANK, gpus=4, nodes=1, ntasks=4)
LAUNCHERS = Frame(LAUNCHER, gpus=8, nodes=2, ntasks=2, gpus_per_node=4)
ON_ONE = Frame(SINGLE, gpus=4, nodes=1, ntasks=4, gpus_per_node=4, nodes_max=1)
PER_NODE = Frame(TASKS, gpus=8, nodes=2, ntasks=8, gpus_per_node=4)


def config(*placement: int) -> Configuration:
    return Configuration(sum(placement), placement)


def fields(frame: Frame, *placement: int, **more: object) -> str:
    shape = shape_for(frame, config(*placement))
    assert shape is not None
    written = resize_fields(frame, shape, **more)  # type: ignore[arg-type]
    return " ".join(f"{key}={value}" for key, value in written)


@pytest.mark.parametrize(
    ("frame", "placement", "expected"),
    [
        (RANKS, (2,), "NumTasks=2 NumNodes=1"),
        (RANKS, (4, 4), "NumTasks=8 NumNodes=2"),
        (replace(RANKS, gpus_per_task=2, ntasks=2), (4, 4), "NumTasks=4 NumNodes=2"),
        (replace(RANKS, cpus_per_task=4), (2,), "NumTasks=2 NumNodes=1 NumCPUs=8"),
        (LAUNCHERS, (2,), "NumTasks=1 NumNodes=1 TresPerNode=gres/gpu:2"),
        (LAUNCHERS, (4, 4, 4), "NumTasks=3 NumNodes=3 TresPerNode=gres/gpu:4"),
        (
            replace(LAUNCHERS, gpu_type="v100"),
            (4,),
            "NumTasks=1 NumNodes=1 TresPerNode=gres/gpu:v100:4",
        ),
        (ON_ONE, (2,), "NumTasks=2 NumNodes=1 TresPerNode=gres/gpu:2"),
        (PER_NODE, (4,), "NumTasks=4 NumNodes=1"),
        (PER_NODE, (4, 4, 4), "NumTasks=12 NumNodes=3"),
        (replace(ON_ONE, array=True), (2,), "NumTasks=2 TresPerNode=gres/gpu:2"),
    ],
)
def test_the_transaction_of_each_form(frame, placement, expected):
    assert fields(frame, *placement) == expected


def test_everything_moves_together_and_the_node_list_comes_last():
    frame = replace(ON_ONE, cpus_per_task=2, memory_node_mib=64_001)
    written = fields(frame, 2, limit_s=5400.0, nodes=("n3",), memory_cap_mib=100_000)
    assert written == (
        "NumTasks=2 NumNodes=1 TresPerNode=gres/gpu:2 NumCPUs=4 MinMemoryNode=32001"
        " TimeLimit=90 ReqNodeList=n3"
    )


def test_memory_of_a_node_never_exceeds_what_a_node_has():
    frame = replace(ON_ONE, gpus=1, ntasks=1, gpus_per_node=1, memory_node_mib=50_000)
    assert "MinMemoryNode=128000" in fields(frame, 4, memory_cap_mib=128_000)


@pytest.mark.parametrize(
    ("frame", "placement"),
    [
        (LAUNCHERS, (4, 2)),  # a launcher has one count per node
        (ON_ONE, (4, 4)),
        (PER_NODE, (2,)),  # ranks per node stay
        (PER_NODE, (4, 2)),
        (replace(RANKS, gpus_per_task=2), (1,)),
        (replace(RANKS, nodes_max=1), (4, 4)),
        (Frame(FIXED, 4, 1, 4), (2,)),
    ],
)
def test_forms_that_cannot_take_a_configuration(frame, placement):
    assert shape_for(frame, config(*placement)) is None


@pytest.mark.parametrize(
    ("frame", "ok"),
    [
        (RANKS, (1, 2, 4, 8, 16)),
        (LAUNCHERS, (1, 2, 4, 8, 16)),
        (ON_ONE, (1, 2, 4)),
        (PER_NODE, (4, 8, 16)),
        (replace(RANKS, nodes_max=2), (1, 2, 4, 8)),
        (replace(RANKS, gpus_per_task=2, ntasks=2), (2, 4, 8, 16)),
        (replace(LAUNCHERS, array=True), (8,)),
        (replace(RANKS, array=True), (1, 2, 4, 8, 16)),  # may spread by itself
        (replace(RANKS, array=True, nodes=2, gpus=8, ntasks=8), (8,)),
        (replace(PER_NODE, gpus_per_node=2, gpus=4, ntasks=4), (2, 4)),
        (Frame(FIXED, 4, 1, 4), (4,)),
    ],
)
def test_counts_that_a_form_can_take(frame, ok):
    found = possible_counts(frame, (1, 2, 4, 6, 8, 16), 4)
    assert found.ok == ok
    assert set(found.refused) == {1, 2, 4, 6, 8, 16} - set(ok)
    assert all(found.refused.values())


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (RANKS, "NumTasks=4 NumNodes=1-0"),  # 0 takes our maximum away
        (replace(RANKS, nodes=2), "NumTasks=4 NumNodes=2"),
        (
            replace(LAUNCHERS, nodes=1, nodes_max=4),
            "NumTasks=2 NumNodes=1-4 TresPerNode=gres/gpu:8",
        ),
        (LAUNCHERS, "NumTasks=2 NumNodes=2 TresPerNode=gres/gpu:4"),
        (ON_ONE, "NumTasks=4 NumNodes=1 TresPerNode=gres/gpu:4"),
        (PER_NODE, "NumTasks=8 NumNodes=2"),
    ],
)
def test_what_restores(frame, expected):
    entry = LedgerEntry("1", 0.0, submitted=frame.shape, submitted_limit_s=3600.0)
    assert " ".join(f"{k}={v}" for k, v in restore_fields(frame, entry)) == expected


def test_restore_gives_back_limit_and_node_list_where_they_are_ours():
    entry = LedgerEntry(
        "1",
        0.0,
        submitted=RANKS.shape,
        submitted_limit_s=3600.0,
        written_limit_s=7200.0,
        pinned=True,
    )
    restored = dict(restore_fields(RANKS, entry))
    assert restored["TimeLimit"] == "60"
    assert restored["ReqNodeList"] == ""


# -- time limit ----------------------------------------------------------------------------------


def estimate(value: float, high: float, source: Source = Source.MEASURED) -> Estimate:
    return Estimate(value, value, high, source)


@pytest.mark.parametrize(
    ("chosen", "at_submitted", "max_s", "expected"),
    [
        # Half the GPUs: the limit is stretched by high/value, in whole minutes.
        (estimate(2000, 2400), estimate(1000, 1200), None, 8640.0),
        # More GPUs: shortened by measurement, not by a guess.
        (estimate(500, 600), estimate(1000, 1200), None, 2160.0),
        (estimate(500, 600, Source.DECLARED), estimate(1000, 1200), None, 3600.0),
        (estimate(500, 600), None, None, 3600.0),
        # Never below what may be needed.
        (estimate(3000, 4000), None, None, 4020.0),
        # Never above what is allowed, if that suffices.
        (estimate(2000, 2400), estimate(1000, 1200), 7200.0, 7200.0),
        (estimate(2000, 2400), estimate(1000, 1200), 7230.0, 7200.0),
    ],
)
def test_the_time_limit_is_scaled(chosen, at_submitted, max_s, expected):
    choice = scaled_limit(3600.0, chosen, at_submitted, max_s)
    assert choice.limit_s == expected
    assert not choice.refusal


def test_a_configuration_that_no_allowed_limit_suffices_for_is_refused():
    choice = scaled_limit(3600.0, estimate(7000, 8000), estimate(1000, 1200), 7200.0)
    assert choice.limit_s is None
    assert "2.0 h" in choice.refusal


def test_no_limit_stays_no_limit():
    assert scaled_limit(None, estimate(10, 20), None, None).limit_s is None


@given(
    submitted=st.integers(1, 10**4).map(lambda m: m * 60.0),
    value=st.floats(1, 1e6),
    spread=st.floats(1, 3),
    base=st.floats(1, 1e6),
    max_minutes=st.one_of(st.none(), st.integers(1, 10**5)),
)
def test_limits_suffice_and_are_allowed(submitted, value, spread, base, max_minutes):
    chosen = estimate(value, value * spread)
    max_s = None if max_minutes is None else max_minutes * 60.0
    choice = scaled_limit(submitted, chosen, estimate(base, base), max_s)
    if choice.limit_s is None:
        assert max_s is not None
        assert chosen.high > max_s
        assert choice.refusal
    else:
        assert choice.limit_s % 60 == 0
        assert choice.limit_s >= chosen.high - 1e-3
        assert max_s is None or choice.limit_s <= max_s


# -- reading back, and what is the users' --------------------------------------------------------

JOB = Job("1", 1, "alice", ("main",), JobState.PENDING, 0.0, gpus=4, ntasks=4, time_limit_s=3600.0)
DIRECTIVE = Directive(
    gpus=GpuRequest(GpuRequestKind.AUTO),
    shape=RANK,
    req=RequestedShape(gpus=4, nodes=1, ntasks=4, gpus_per_task=1),
)


def test_read_back():
    wanted = Shape(RANK, 8, 2, 8)
    eight = replace(JOB, gpus=8, nodes=2, ntasks=8)
    assert read_back_matches(eight, wanted) is None
    assert "8 GPUs" in (read_back_matches(JOB, wanted) or "")
    assert read_back_matches(eight, wanted, limit_s=3600.0) is None
    assert "time limit" in (read_back_matches(eight, wanted, limit_s=7200.0) or "")
    assert "node list" in (read_back_matches(eight, wanted, nodes=("n1", "n2")) or "")
    pinned = replace(eight, req_nodes=("n2", "n1"))
    assert read_back_matches(pinned, wanted, nodes=("n1", "n2")) is None
    assert read_back_matches(pinned, wanted, nodes=()) is not None


def test_slurms_own_node_count_of_ranks_tells_nothing():
    assert read_back_matches(replace(JOB, nodes=3), Shape(RANK, 4, 1, 4)) is None
    assert read_back_matches(replace(JOB, nodes=3), Shape(LAUNCHER, 4, 1, 4)) is not None


def test_first_sight_takes_what_lua_recorded_over_what_slurm_shows():
    seen = first_sight(JOB, DIRECTIVE, None)
    assert seen.submitted == Shape(RANK, 4, 1, 4)
    assert seen.written is None
    # With the ledger lost, a size that differs is one of ours.
    again = first_sight(replace(JOB, gpus=8, ntasks=8, nodes=2), DIRECTIVE, None)
    assert again.submitted == Shape(RANK, 4, 1, 4)
    assert again.written is not None
    # Without Lua's record nothing can be resized.
    assert first_sight(JOB, replace(DIRECTIVE, req=None), None).submitted.kind is FIXED


def test_a_value_that_is_neither_submitted_nor_ours_is_the_users():
    entry = replace(
        first_sight(JOB, DIRECTIVE, None), written=Shape(RANK, 8, 2, 8), written_limit_s=7200.0
    )
    theirs = notice_others(replace(JOB, gpus=2, ntasks=2, time_limit_s=1800.0), entry)
    assert theirs.submitted == Shape(RANK, 2, 1, 2)
    assert theirs.submitted_limit_s == 1800.0
    assert theirs.written is None
    ours = notice_others(replace(JOB, gpus=8, ntasks=8, nodes=2, time_limit_s=7200.0), entry)
    assert ours == entry
    untouched = notice_others(JOB, entry)
    assert untouched == entry


def test_cpus_that_somebody_gave_are_a_size_of_theirs():
    """A resize writes CPUs for each task, as submitted, and would undo them."""
    entry = first_sight(JOB, DIRECTIVE, None)
    more = replace(JOB, cpus=4 * JOB.cpus)
    theirs = notice_others(more, entry)
    assert theirs.resized_by_hand
    assert theirs.submitted == entry.submitted
    assert notice_others(more, theirs) == theirs
    # A size of ours has CPUs of its own, and after a requeue Slurm shows those of the attempt.
    ours = replace(entry, written=entry.submitted)
    assert notice_others(more, ours) == ours
    back = replace(more, restarts=1)
    assert notice_others(back, entry) == entry
    # Of a job that was seen in a size of ours first, nobody knows.
    grown = replace(JOB, gpus=8, ntasks=8, nodes=2, cpus=8)
    late = notice_others(JOB, replace(first_sight(grown, DIRECTIVE, None), written=None))
    assert not late.resized_by_hand


def test_a_half_written_transaction_is_ours():
    submitted, written = Shape(LAUNCHER, 8, 2, 2), Shape(LAUNCHER, 2, 1, 1)
    entry = LedgerEntry("1", 0.0, submitted=submitted, written=written, submitted_limit_s=3600.0)
    half = replace(JOB, gpus=4, nodes=1, ntasks=1)  # NumNodes arrived, TresPerNode did not
    assert notice_others(half, entry) == entry
    assert notice_others(replace(JOB, gpus=12, nodes=3, ntasks=3), entry).submitted.gpus == 12


def test_offered_counts():
    entry = first_sight(JOB, DIRECTIVE, None)

    def offered(entry: LedgerEntry, *, resizable: bool = True) -> tuple[int, ...]:
        return offered_counts(DIRECTIVE, entry, JOB, resizable=resizable, maximum=16)

    assert offered(entry) == (1, 2, 4, 8, 12, 16)
    assert offered(entry, resizable=False) == (4,)
    assert offered(replace(entry, veto=True)) == (4,)
    assert offered(replace(entry, veto=True, veto_gpus=2)) == (2,)
