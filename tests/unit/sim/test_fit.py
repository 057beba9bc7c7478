"""Findings about a site: worked by hand on small logs, and against slow oracles on random ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ext.domain.errors import DataError
from slurm_ext.sim.advice import MIN_JOBS, Advice, Verdict, advise, percent
from slurm_ext.sim.fit import Hour, fit, reached
from slurm_ext.sim.fragments import fragments
from slurm_ext.sim.readers.sacct import read_sacct
from slurm_ext.sim.readers.sacctjob import SacctJob, SacctLog, Span
from slurm_ext.sim.reuse import reuse
from slurm_ext.sim.trace import read_lines

RECORDED = Path(__file__).parents[2] / "data" / "sacct" / "allocations_24.11.5.txt"
HOUR = 3600.0


def job(
    job_id: str,
    ready: float,
    start: float | None,
    end: float | None,
    gpus: int = 1,
    nodes: tuple[str, ...] = ("n1",),
    **other: object,
) -> SacctJob:
    spans = () if start is None else (Span(start, end, nodes),)
    state = "PENDING" if start is None else "RUNNING" if end is None else "COMPLETED"
    plain = SacctJob(
        job_id=job_id,
        state=state,
        submit_s=ready,
        ready_s=ready,
        gpus=gpus,
        spans=spans,
        ended_s=end,
        node_count=len(nodes),
        partition="gpu",
        user="ada",
        name=job_id,
    )
    return replace(plain, **other)  # type: ignore[arg-type]


def log(*jobs: SacctJob) -> SacctLog:
    return SacctLog("s.txt", jobs, max(time for one in jobs for time in one.times))


# -- shares --------------------------------------------------------------------------------------


def test_queueing_share_by_hour_of_the_day() -> None:
    # Waiting began at 9 (1 h of 4), at 9 the next day (2 h of 4), and at 23:59 (none).
    found = fit(
        log(
            job("a", 9 * HOUR, 10 * HOUR, 13 * HOUR),
            job("b", 33.9 * HOUR, 35.9 * HOUR, 37.9 * HOUR),
            job("c", 23.99 * HOUR, 23.99 * HOUR, 24.99 * HOUR),
        )
    )
    assert found.hours == (Hour(9, 2, pytest.approx(3 / 8)), Hour(23, 1, 0.0))
    assert found.queue_share == pytest.approx(3 / 9)
    assert found.gpu_hours == pytest.approx(6)
    assert found.period_s == pytest.approx(28.9 * HOUR)


def test_thresholds_count_only_hours_with_enough_jobs() -> None:
    hours = (Hour(1, 10, 0.5), Hour(2, 10, 0.6), Hour(3, 9, 0.9), Hour(4, 10, 0.49))
    assert [hour.hour for hour in reached(hours, 0.5)] == [1, 2]
    assert [hour.hour for hour in reached(hours, 0.6)] == [2]
    crowd = [job(f"w{i}", 2 * HOUR, 5 * HOUR, 7 * HOUR) for i in range(10)]
    calm = [job(f"c{i}", 9 * HOUR, 9 * HOUR, 10 * HOUR) for i in range(30)]
    found = fit(log(*crowd, *calm))
    assert found.busy_jobs_share == found.crowded_jobs_share == pytest.approx(10 / 40)


def test_short_jobs_leave_out_those_that_broke_down() -> None:
    found = fit(
        log(
            job("crash", 0, 0, 10, state="FAILED"),
            job("short", 0, 0, 1799),
            job("long", 0, 0, 1800, gpus=4),
            job("longer", 0, 0, 7200, state="TIMEOUT"),
        )
    )
    assert found.short_share == pytest.approx(1 / 3)
    assert found.broken_share == pytest.approx(1 / 4)
    assert found.short_gpu_share == pytest.approx(1809 / (1809 + 7200 + 7200))
    assert found.multi_gpu_share == pytest.approx(7200 / (1809 + 7200 + 7200))
    assert found.sizes == ((1, 3), (4, 1))
    # Where everything broke down there is nothing else to go by.
    assert fit(log(job("crash", 0, 0, 10, state="FAILED"))).short_share == 1


def test_unfinished_jobs_are_counted_and_not_judged() -> None:
    jobs = (
        job("a", 0, 0, HOUR),
        job("runs", 0, 10, None),
        job("waits", 0, None, None, copies=3),
        job("cpu", 0, 5 * HOUR, 6 * HOUR, gpus=0),
    )
    found = fit(log(*jobs))
    assert (found.jobs, found.unfinished, found.queue_share) == (1, 4, 0)
    with pytest.raises(DataError, match="no GPU job that ran to its end"):
        fit(log(*jobs[1:]))


def test_the_recorded_cluster() -> None:
    found = fit(read_sacct(read_lines(str(RECORDED)), "r", strict=True))
    assert (found.jobs, found.unfinished) == (27, 9)
    assert found.fragments is not None
    assert (found.fragments.nodes, found.fragments.gpus) == (4, 16)
    # Job 29 asked for a whole node while four nodes had one to three GPUs free.
    assert 0.1 < found.fragments.wait_share < 0.2
    assert found.reuse.top == (("vit-large", 3), ("bert", 2))


# -- model reuse ---------------------------------------------------------------------------------


def test_waiting_together_and_a_predecessor() -> None:
    jobs = [
        job("a", 0, 0, 10, model="vit"),
        job("b", 1, 12, 20, model="vit"),  # waited when a ended, and together with c
        job("c", 11, 30, 40, model="vit"),  # waited when b ended
        job("d", 30, 35, 40, gpus=2, model="vit"),  # c and d: no overlap, other GPU count
        job("e", 0, 50, 60, model="bert"),  # alone of its model
        job("f1", 0, 50, 60),
        job("f2", 0, 50, 60),
    ]
    found = reuse(jobs)
    assert found.known_share == pytest.approx(5 / 7)
    assert (found.models, found.top) == (2, (("vit", 4), ("bert", 1)))
    assert found.repeated_share == pytest.approx(3 / 5)
    assert found.together_share == pytest.approx(2 / 5)
    assert found.successor_share == pytest.approx(2 / 5)
    assert found.repeated_names_share == pytest.approx(1 / 7)  # f1, f2
    assert reuse([job("x", 0, 1, 2)]).known_share == 0


_JOBS = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.integers(0, 9),
        st.integers(1, 9),
        st.integers(1, 2),
        st.sampled_from(["vit", "bert", ""]),
    ),
    min_size=1,
    max_size=14,
)


@given(_JOBS)
def test_reuse_agrees_with_looking_at_every_pair(rows) -> None:
    jobs = [
        job(f"j{i}", ready, ready + wait, ready + wait + ran, gpus=gpus, model=model)
        for i, (ready, wait, ran, gpus, model) in enumerate(rows)
    ]
    known = [one for one in jobs if one.model]
    together = successors = 0
    for one in known:
        since, until = one.waits[0]
        others = [other for other in known if other is not one and other.model == one.model]
        together += until > since and any(
            other.waits[0][0] < until and since < other.waits[0][1] and other.waited_s > 0
            for other in others
        )
        successors += until > since and any(
            since <= (other.ended_s or 0) <= until for other in others if other.gpus == one.gpus
        )
    found = reuse(jobs)
    assert found.together_share * len(known) == pytest.approx(together)
    assert found.successor_share * len(known) == pytest.approx(successors)


# -- fragments -----------------------------------------------------------------------------------


def test_a_job_that_waits_for_a_whole_node_while_pieces_are_free() -> None:
    found = fragments(
        log(
            # Both nodes are known to have four GPUs.
            job("x", 0, 0, 10, gpus=8, nodes=("n1", "n2")),
            job("a", 10, 10, 30, gpus=2, nodes=("n1",)),
            job("b", 10, 10, 20, gpus=1, nodes=("n2",)),
            # Waits from 12 on: until 20 five GPUs are free, three on one node. Then it starts.
            job("whole", 12, 20, 30, gpus=4, nodes=("n2",)),
            # Waits from 12 to 30, but eight GPUs are never free: no fragments.
            job("wide", 12, 30, 40, gpus=8, nodes=("n1", "n2")),
        )
    )
    assert found is not None
    assert (found.nodes, found.gpus) == (2, 8)
    assert found.stranded_share == pytest.approx(5 * 8 / (8 * 40))
    assert found.wait_share == pytest.approx(8 / (8 + 18))


def test_other_partitions_and_full_nodes_are_no_fragments() -> None:
    found = fragments(
        log(
            job("x", 0, 0, 40, gpus=4, nodes=("n1",)),
            job("free", 0, 0, 1, gpus=4, nodes=("n9",), partition="other"),
            job("waits", 5, 40, 50, gpus=4, nodes=("n1",)),
        )
    )
    assert found is not None
    assert (found.stranded_share, found.wait_share) == (0, 0)


def test_gpus_per_node_reveals_gpus_that_were_never_used() -> None:
    jobs = log(
        job("a", 0, 0, 20, gpus=1, nodes=("n1",)),
        job("b", 0, 0, 20, gpus=1, nodes=("n2",)),
        job("pair", 0, 20, 30, gpus=2, nodes=("n1",)),
    )
    seen, told = fragments(jobs), fragments(jobs, gpus_per_node=2)
    assert seen is not None
    assert told is not None
    assert (seen.gpus, told.gpus) == (3, 4)
    assert (seen.wait_share, told.wait_share) == (0, 1)


def test_three_gpus_on_two_nodes_fit_beside_others() -> None:
    found = fragments(
        log(
            job("cap", 0, 0, 1, gpus=8, nodes=("n1", "n2")),
            job("a", 1, 1, 20, gpus=2, nodes=("n1",)),
            job("b", 1, 1, 20, gpus=3, nodes=("n2",)),
            job("odd", 1, 20, 30, gpus=3, nodes=("n1", "n2")),
        )
    )
    assert found is not None
    assert found.wait_share == 0


def test_a_pending_array_waits_once_per_task() -> None:
    found = fragments(
        log(
            job("cap", 0, 0, 1, gpus=8, nodes=("n1", "n2")),
            job("a", 1, 1, 20, gpus=2, nodes=("n1",)),
            job("b", 1, 1, 20, gpus=2, nodes=("n2",)),
            job("rest_[1-3]", 10, None, None, gpus=4, copies=3),
            job("wide", 5, 20, 30, gpus=8, nodes=("n1", "n2")),
        )
    )
    assert found is not None
    # Three tasks wait for 20 s, of which 10 s for a whole node; "wide" waits for more than is free.
    assert found.wait_share == pytest.approx(3 * 10 / (3 * 20 + 15))


def test_without_nodes_there_is_no_answer() -> None:
    assert fragments(log(job("a", 0, 0, 5, nodes=()))) is None


_PLACED = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.integers(0, 6),
        st.integers(1, 8),
        st.integers(1, 4),
        st.sampled_from([("n1",), ("n2",), ("n3",), ("n1", "n2"), ("n2", "n3")]),
        st.sampled_from(["gpu", "big"]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60)
@given(_PLACED)
def test_fragments_agree_with_looking_at_every_second(rows) -> None:
    """The same question, answered second by second from the jobs themselves."""
    jobs = [
        job(
            f"j{i}",
            ready,
            ready + wait,
            ready + wait + ran,
            gpus=each * len(nodes),
            nodes=nodes,
            partition=partition,
        )
        for i, (ready, wait, ran, each, nodes, partition) in enumerate(rows)
    ]
    found = fragments(log(*jobs))
    begin = int(min(one.ready_s if one.waited_s else one.spans[0].start_s for one in jobs))
    end = int(max(one.ended_s or 0 for one in jobs))

    def used(node: str, second: int) -> int:
        return sum(
            one.gpus // len(one.spans[0].nodes)
            for one in jobs
            if node in one.spans[0].nodes and one.spans[0].start_s <= second < (one.ended_s or 0)
        )

    names = sorted({node for one in jobs for node in one.spans[0].nodes})
    most = {node: max(used(node, s) for s in range(begin, end)) for node in names}
    members = {
        part: {node for one in jobs if one.partition == part for node in one.spans[0].nodes}
        for part in ("gpu", "big")
    }
    stranded = blocked = 0
    for second in range(begin, end):
        free = {node: most[node] - used(node, second) for node in names}
        hit: set[str] = set()
        for one in jobs:
            if one.ready_s <= second < one.spans[0].start_s:
                own = [free[node] for node in members[one.partition]]
                need = len(one.spans[0].nodes)
                fitting = sum(gpus >= one.gpus // need for gpus in own)
                if sum(own) >= one.gpus and fitting < need:
                    blocked += 1
                    hit |= members[one.partition]
        stranded += sum(free[node] for node in hit)
    waited = sum(one.waited_s for one in jobs)
    assert found is not None
    assert found.gpus == sum(most.values())
    assert found.stranded_share == pytest.approx(stranded / (sum(most.values()) * (end - begin)))
    assert found.wait_share == pytest.approx(blocked / waited if waited else 0)


# -- advice --------------------------------------------------------------------------------------


def site(wait: float, ran: float, jobs: int = 120, **other: object) -> SacctLog:
    """A site where every hour a job of ``ran`` comes and waits ``wait`` (both in seconds)."""
    return log(
        *(
            job(f"j{i}", i * 60.0, i * 60.0 + wait, i * 60.0 + wait + ran, **other)
            for i in range(jobs)
        )
    )


def verdicts(found: SacctLog) -> dict[str, Verdict]:
    return {one.mechanism: one.verdict for one in advise(fit(found))}


def by_name(found: SacctLog) -> dict[str, Advice]:
    return {one.mechanism: one for one in advise(fit(found))}


def test_a_quiet_site_with_short_jobs_leaves_everything_off() -> None:
    every = by_name(site(wait=0, ran=600))
    assert every.pop("pipeline switch").verdict is Verdict.UNCLEAR  # models unknown
    assert {one.verdict for one in every.values()} == {Verdict.LEAVE_OFF}
    assert verdicts(site(wait=0, ran=600, model="vit"))["pipeline switch"] is Verdict.LEAVE_OFF


def test_a_crowded_site_with_one_model_uses_merging_and_switching() -> None:
    found = verdicts(site(wait=3600, ran=900, model="vit"))
    assert found["queue order"] is Verdict.USE
    assert found["GPU counts of pending jobs"] is Verdict.USE
    assert found["task merging"] is Verdict.NOT_YET
    assert found["pipeline switch"] is Verdict.USE
    assert found["moving running jobs"] is Verdict.LEAVE_OFF  # all short


def test_between_the_two_thresholds_order_pays_and_merging_does_not() -> None:
    found = by_name(site(wait=1100, ran=900, model="vit"))
    assert found["queue order"].verdict is Verdict.USE
    assert "55 %" in found["queue order"].because
    assert found["task merging"].verdict is Verdict.LEAVE_OFF


def test_long_jobs_are_resized_and_reallocated_but_never_switched() -> None:
    found = verdicts(site(wait=4 * HOUR, ran=2 * HOUR, model="vit"))
    assert found["moving running jobs"] is Verdict.USE
    assert found["pipeline switch"] is Verdict.LEAVE_OFF
    quiet = verdicts(site(wait=0, ran=2 * HOUR))
    assert quiet["GPU counts of pending jobs"] is Verdict.USE
    assert quiet["queue order"] is Verdict.LEAVE_OFF
    assert quiet["moving running jobs"] is Verdict.LEAVE_OFF


def test_unknown_models_are_not_guessed() -> None:
    found = by_name(site(wait=3600, ran=900))
    assert found["task merging"].verdict is Verdict.UNCLEAR
    assert found["pipeline switch"].verdict is Verdict.UNCLEAR
    assert "--model-pattern" in found["task merging"].because
    # Different models: nothing to merge, and that is known.
    jobs = site(wait=3600, ran=900).jobs
    every = log(*(replace(one, model=f"m{i}") for i, one in enumerate(jobs)))
    assert verdicts(every)["task merging"] is Verdict.LEAVE_OFF


def test_fragments_decide_over_node_lists() -> None:
    pieces = [
        job("cap1", 0, 0, 1, gpus=4, nodes=("n1",)),
        job("cap2", 0, 0, 1, gpus=4, nodes=("n2",)),
        job("one1", 1, 1, 9000, gpus=1, nodes=("n1",)),
        job("one2", 1, 1, 9000, gpus=1, nodes=("n2",)),
        job("whole", 1, 9000, 9999, gpus=4, nodes=("n1",)),
    ]
    others = [job(f"q{i}", 10000 + 9 * i, 10000 + 9 * i, 10009 + 9 * i) for i in range(MIN_JOBS)]
    name = "node lists against GPU fragments"
    assert verdicts(log(*pieces, *others))[name] is Verdict.USE
    assert verdicts(site(wait=10, ran=60))[name] is Verdict.LEAVE_OFF
    assert verdicts(site(wait=10, ran=60, nodes=()))[name] is Verdict.UNCLEAR


def test_few_jobs_allow_no_verdict_but_keep_the_numbers() -> None:
    every = advise(fit(site(wait=3600, ran=900, jobs=MIN_JOBS - 1, model="vit")))
    assert {one.verdict for one in every} == {Verdict.UNCLEAR}
    assert all("99 jobs are too few" in one.because for one in every)
    assert "80 %" in every[0].because
    enough = verdicts(site(wait=3600, ran=900, jobs=MIN_JOBS, model="vit"))
    assert enough["queue order"] is Verdict.USE


def test_every_advice_tells_its_numbers_and_its_setting() -> None:
    for one in advise(fit(site(wait=3600, ran=900, model="vit"))):
        assert "%" in one.because
        assert "act:" in one.setting or "--ft-" in one.setting


def test_shares_in_words() -> None:
    assert [percent(x) for x in (0, 0.001, 0.015, 0.5, 1)] == [
        "0 %",
        "under 1 %",
        "2 %",
        "50 %",
        "100 %",
    ]
