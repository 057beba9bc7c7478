"""sacct's output: a recorded cluster, other sites' separators, and names that try to be rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.errors import DataError
from slurm_ext.sim.readers.sacct import ended_jobs, read_sacct, to_trace
from slurm_ext.sim.readers.sacctfile import COMMAND, FORMAT, is_heading
from slurm_ext.sim.readers.sacctjob import SacctJob, SacctLog, Span
from slurm_ext.sim.trace import read_lines, read_trace

DATA = Path(__file__).parents[2] / "data" / "sacct"
RECORDED = DATA / "allocations_24.11.5.txt"
RUG = DATA / "rug_sacct.txt"
RUG_NAMES = (
    "JobID,JobName,User,Partition,NodeList,NNodes,NCPUS,NTasks,State,Submit,Start,End,Timelimit,"
    "Elapsed,TotalCPU,UserCPU,SystemCPU,ReqMem,MaxRSS,U1,U2,U3,U4,U5,U6,U7,U8,Comment"
)
RUG_COLUMNS = RUG_NAMES.split(",")
COLUMNS = FORMAT.split(",")
CELLS = {
    "JobID": "7",
    "User": "ada",
    "Account": "lab",
    "Partition": "gpu",
    "State": "COMPLETED",
    "Submit": "2025-03-01T10:00:00",
    "Eligible": "2025-03-01T10:00:00",
    "Start": "2025-03-01T10:05:00",
    "End": "2025-03-01T11:05:00",
    "TimelimitRaw": "120",
    "NNodes": "1",
    "NodeList": "n1",
    "ReqTRES": "billing=2,cpu=2,gres/gpu=2,mem=2000M,node=1",
    "AllocTRES": "billing=2,cpu=2,gres/gpu:v100=2,gres/gpu=2,mem=2000M,node=1",
    "AdminComment": "",
    "JobName": "train",
    "Comment": "",
}
# 2025-03-01T10:00:00 as written, in seconds.
TEN = 1740823200.0


def line(**changes: str) -> str:
    return "|".join({**CELLS, **changes}.values())


def read(*lines: str, **options) -> SacctLog:
    return read_sacct(["|".join(COLUMNS), *lines], "s.txt", **options)


def one(*lines: str, **options) -> SacctJob:
    log = read(*lines, strict=True, **options)
    (job,) = log.jobs
    return job


@pytest.fixture(scope="module")
def recorded() -> SacctLog:
    return read_sacct(read_lines(str(RECORDED)), str(RECORDED), strict=True)


def by_id(log: SacctLog) -> dict[str, SacctJob]:
    return {job.job_id: job for job in log.jobs}


# -- a recorded cluster --------------------------------------------------------------------------


def test_a_recorded_cluster_as_a_trace() -> None:
    trace = read_trace(RECORDED, strict=True)
    assert (trace.fmt, len(trace.jobs), trace.skipped) == ("sacct", 27, ())
    assert trace.jobs[0].submit_s == 0
    assert trace.jobs[0].gpu_type == "v100"
    assert sorted(trace.notes) == [
        "1 left out: ended before they started",
        "1 left out: no GPU",
        "4 left out: still waiting",  # 37, and 38_[1-3] is three jobs in one row
        "5 left out: still running",
    ]
    assert read_trace(RECORDED, limit=3).jobs == trace.jobs[:3]


def test_names_with_separators_and_line_ends_keep_their_row(recorded: SacctLog) -> None:
    jobs = by_id(recorded)
    assert jobs["2"].gpus == 4
    assert jobs["2"].name.startswith("name|with|pipes")
    # The line end is shown as something that cannot be one.
    assert jobs["3"].name == "two?lines"
    assert jobs["3"].gpus == 2
    assert jobs["4"].name == "caf?"


def test_models_come_from_directives_of_both_kinds(recorded: SacctLog) -> None:
    jobs = by_id(recorded)
    assert {i: jobs[i].model for i in ("5", "6", "22", "23", "1")} == {
        "5": "bert",
        "6": "bert",
        "22": "vit-large",
        "23": "vit-large",
        "1": "",
    }
    job = next(job for job in to_trace(recorded).jobs if job.job_id == "22")
    assert (job.batch, job.samples) == (64, 50000.0)


def test_a_requeued_job_is_one_job_with_two_starts(recorded: SacctLog) -> None:
    job = by_id(recorded)["21"]
    assert [span.end_s - span.start_s for span in job.spans if span.end_s] == [3, 9]
    assert (job.ran_s, job.waited_s) == (12, 1 + 4)
    assert job.state == "COMPLETED"


def test_a_heterogeneous_job_is_one_job_on_all_its_nodes(recorded: SacctLog) -> None:
    job = by_id(recorded)["14"]
    assert (job.gpus, job.node_count, job.ran_s) == (3, 2, 3)
    assert job.spans[0].nodes == ("n3", "n4")
    assert "14+1" not in by_id(recorded)


def test_waiting_begins_when_slurm_may_start_the_job(recorded: SacctLog) -> None:
    jobs = by_id(recorded)
    # A dependency, --begin and an array's %2: the user's wish.
    assert jobs["12"].waited_s == 0
    assert jobs["13"].waited_s == 1
    assert jobs["7_3"].waited_s == 0
    assert jobs["6"].waited_s == 5


def test_jobs_that_wait_run_or_never_ran_are_told_apart(recorded: SacctLog) -> None:
    jobs = by_id(recorded)
    assert jobs["30"].running
    assert jobs["30"].limit_s == 2 * 86400
    assert (jobs["37"].waiting, jobs["37"].gpus, jobs["37"].node_count) == (True, 16, 4)
    assert jobs["38_[1-3]"].copies == 3
    assert (jobs["36"].state, jobs["36"].spans) == ("CANCELLED", ())
    assert jobs["10"].limit_s is None  # UNLIMITED
    assert jobs["1"].spans[0].nodes == ("n1", "n2")


def test_steps_are_passed_over() -> None:
    with_steps = by_id(read_sacct(read_lines(str(DATA / "steps_24.11.5.txt")), "s", strict=True))
    without = by_id(read_sacct(read_lines(str(RECORDED)), "a", strict=True))
    assert set(with_steps) == {"1", "14", "21", "7_1", "7_2", "7_3", "7_4", "7_5"}
    assert with_steps == {job_id: without[job_id] for job_id in with_steps}


# -- another site --------------------------------------------------------------------------------


def test_another_separator_without_heading_and_without_tres_is_refused_with_the_command() -> None:
    lines = read_lines(str(RUG))
    with pytest.raises(DataError, match="no heading that begins with JobID"):
        read_sacct(lines, "rug")
    with pytest.raises(DataError, match=re.escape(f"no column AllocTRES; write it with {COMMAND}")):
        read_sacct(lines, "rug", columns=RUG_COLUMNS, delimiter="☃")


def test_another_separator_is_read_with_and_without_heading() -> None:
    gpu = "cpu=12,gres/gpu=1"
    lines = [f"{text}☃{gpu}" for text in read_lines(str(RUG))]
    columns = [*RUG_COLUMNS, "AllocTRES"]
    assert lines[0].count("☃") + 1 == len(columns)
    log = read_sacct(lines, "rug", columns=columns, delimiter="☃", strict=True)
    assert read_sacct(["☃".join(columns), *lines], "rug") == log
    # The file holds every job twice, under different (anonymised) names.
    assert log.notes == ("17 left out: the same record again",)
    jobs = by_id(log)
    assert (jobs["21090562"].partition, jobs["21090562"].ran_s) == ("gpu", 3 * 3600 + 8 * 60 + 10)
    assert jobs["20872560"].limit_s == 8 * 86400
    assert len(jobs["21085537"].spans[0].nodes) == 21
    assert jobs["21085537"].running
    assert jobs["20963999_982"].waited_s > 0


@pytest.mark.parametrize("delimiter", ["|", ",", "\x1f", "☃", "::", "\t"])
def test_the_separator_is_taken_from_the_heading(delimiter: str) -> None:
    columns = ["JobID", "State", "Submit", "Start", "End", "NodeList", "AllocTRES"]
    cells = [CELLS[column].replace(",", ";") for column in columns[:-1]] + ["gres/gpu=2"]
    # --parsable ends every line with the separator, --parsable2 does not.
    for end in ("", delimiter):
        text = [delimiter.join(columns) + end, delimiter.join(cells) + end]
        (job,) = read_sacct(text, "s.txt", strict=True).jobs
        assert (job.job_id, job.gpus, job.waited_s, job.ran_s) == ("7", 2, 300, 3600)


def test_epoch_seconds_and_zones_are_the_same_times() -> None:
    plain = one(line())
    epoch = one(
        line(Submit="1740823200", Eligible="1740823200", Start="1740823500", End="1740827100")
    )
    zoned = one(line(End="2025-03-01T12:05:00+01:00"))
    assert plain == epoch == zoned
    assert plain.submit_s == TEN


# -- meaning of single cells ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "column", "reason"),
    [
        ({"State": ""}, "state", "empty"),
        ({"State": "done"}, "state", "not a state"),
        ({"Submit": "Unknown"}, "submit", "no time"),
        ({"Submit": "2025-03-01 25:00"}, "submit", "not a time"),
        ({"Submit": "99999999999999"}, "submit", "not a time of this era"),
        ({"Submit": "2025-03-01T10:06:00"}, "start", "before Submit"),
        ({"Start": "2025-03-01T11:06:00"}, "end", "before Start"),
        ({"End": "Unknown"}, "end", "no time, but the job is COMPLETED"),
        ({"State": "RUNNING", "Start": "Unknown", "End": "Unknown"}, "start", "no time"),
        ({"AllocTRES": "gres/gpu=two"}, "alloctres", "two"),
        ({"AllocTRES": "gres/gpu=1e30"}, "alloctres", "GPUs"),
        ({"AllocTRES": "gres/gpu=-1"}, "alloctres", "GPUs"),
        ({"NodeList": "n[1-"}, "nodelist", "brackets"),
        ({"NodeList": "n[1-999999999]"}, "nodelist", "longer than"),
        ({"TimelimitRaw": "soon"}, "timelimitraw", "not a time"),
        ({"User": "\ufffd"}, "user", "not UTF-8"),
        ({"JobID": "seven"}, "JobID", "not a job id"),
    ],
)
def test_a_bad_cell_is_named_and_only_its_row_is_lost(
    changes: dict[str, str], column: str, reason: str
) -> None:
    lines = (line(JobID="6"), line(**changes), line(JobID="8"))
    log = read(*lines)
    assert sorted(by_id(log)) == ["6", "8"]
    (message,) = log.skipped
    assert message.startswith(f"s.txt:3: {column}=")
    assert reason in message
    with pytest.raises(DataError, match=r"s\.txt:3: "):
        read(*lines, strict=True)


def test_a_row_that_breaks_off_before_any_text_of_a_user_costs_only_itself() -> None:
    log = read("7|ada|lab|gpu", line(JobID="8"))
    assert list(by_id(log)) == ["8"]
    assert "4 cells under 17 columns" in log.skipped[0]


def test_a_row_cut_off_behind_the_last_safe_column_does_not_swallow_the_next() -> None:
    cut = "|".join(line().split("|")[:14])
    log = read(cut, line(JobID="8"))
    assert list(by_id(log)) == ["8"]
    assert "14 cells under 17 columns" in log.skipped[0]


def test_names_in_front_of_other_columns_are_never_put_together() -> None:
    columns = ["JobID", "JobName", "State", "Submit", "Start", "End", "AllocTRES"]
    cells = [CELLS[name] for name in columns]
    broken = ["|".join(columns), "6|two", "|".join(["lines", *cells[2:]]), "|".join(cells)]
    log = read_sacct(broken, "s.txt")
    assert list(by_id(log)) == ["7"]
    assert [text.split(":")[1] for text in log.skipped] == ["2", "3"]


def test_gpus_are_those_it_got_else_those_it_asked_for() -> None:
    assert one(line(AllocTRES="cpu=1,gres/gpu:a100=3")).gpus == 3
    pending = line(State="PENDING", Start="Unknown", End="Unknown", AllocTRES="")
    assert (one(pending).gpus, one(pending).waiting) == (2, True)
    # Slurm writes an expected start for pending jobs.
    assert one(line(State="PENDING", End="Unknown", AllocTRES="")).spans == ()


def test_a_leased_job_waits_from_its_submission() -> None:
    # The daemon moves the earliest start of its jobs, and so what sacct calls Eligible.
    later = {"Eligible": "2025-03-01T10:04:59"}
    assert one(line(**later)).waited_s == 1
    ours = {"AdminComment": 'site note ft:{"v":1,"model":"vit"}'}
    assert one(line(**later, **ours)).waited_s == 300
    begin = {"AdminComment": f'ft:{{"v":1,"model":"vit","begin_s":{TEN + 240}}}'}
    assert one(line(**later, **begin)).waited_s == 60


def test_a_directive_that_cannot_be_read_costs_the_model_and_not_the_job() -> None:
    log = read(line(AdminComment='ft:{"v":99}'), strict=True)
    assert log.jobs[0].model == ""
    assert log.notes == ("1 with a directive that could not be read: model unknown",)


@pytest.mark.parametrize(
    ("pattern", "model"),
    [(r"bert\w*", "bertlarge"), (r"(?:bert)(\w*)", "large"), (r"(x?)(?P<model>bert)", "bert")],
)
def test_a_pattern_finds_the_model_of_jobs_without_directive(pattern: str, model: str) -> None:
    text = line(JobName="tune-bertlarge-3")
    assert one(text, model_pattern=re.compile(pattern)).model == model
    named = line(JobName="tune-bertlarge-3", Comment="ft: model=vit")
    assert one(named, model_pattern=re.compile(pattern)).model == "vit"


# -- records and jobs ----------------------------------------------------------------------------


def test_records_of_one_job_are_joined_in_order_of_time() -> None:
    first = line(State="NODE_FAIL")
    second = line(
        Submit="2025-03-01T11:05:00",
        Eligible="2025-03-01T11:07:01",
        Start="2025-03-01T12:00:00",
        End="2025-03-01T12:30:00",
    )
    job = one(first, second)
    assert job == one(second, first)
    assert (job.submit_s, job.ran_s, job.waited_s) == (TEN, 3600 + 1800, 300 + 3300)


def test_a_preempted_job_may_come_back_hours_later() -> None:
    times = dict.fromkeys(("Submit", "Eligible"), "2025-03-01T15:00:00")
    again = line(**times, Start="2025-03-01T15:00:00", End="2025-03-01T16:00:00")
    assert one(line(State="PREEMPTED"), again).ran_s == 7200
    assert "the id of another job" in read(line(), again).skipped[0]


def test_the_same_record_twice_and_a_reused_id_are_refused() -> None:
    other = read(line(), line(End="2025-03-01T11:00:00"))
    assert "two records of the same time" in other.skipped[0]
    again = read(line(), line(), strict=True)
    assert (len(again.jobs), again.notes) == (1, ("1 left out: the same record again",))
    year = {k: v.replace("2025", "2026") for k, v in CELLS.items() if v.startswith("2025")}
    log = read(line(), line(**year))
    assert "the id of another job" in log.skipped[0]
    assert log.jobs[0].submit_s == TEN


def test_a_running_job_long_past_its_limit_is_no_job() -> None:
    runaway = line(JobID="6", State="RUNNING", End="Unknown", NodeList="n2")
    log = read(runaway, line())
    assert len(log.jobs) == 2
    late = {k: v.replace("03-01", "03-09") for k, v in CELLS.items() if v.startswith("2025")}
    log = read(runaway, line(**late))
    assert list(by_id(log)) == ["7"]
    assert "runawayjobs" in log.notes[0]


@pytest.mark.parametrize(
    ("job_id", "copies"),
    [("9_[1-3]", 3), ("9_[1,4-6%2]", 4), ("9_[0-10:5]", 3), ("9_[2]", 1), ("9_[x]", 1)],
)
def test_the_rest_of_an_array_counts_its_tasks(job_id: str, copies: int) -> None:
    job = one(line(JobID=job_id, State="PENDING", Start="Unknown", End="Unknown"))
    assert job.copies == copies


def test_without_gpus_in_accounting_the_setting_is_named() -> None:
    log = read(line(AllocTRES="cpu=1", ReqTRES=""))
    with pytest.raises(DataError, match=r"1 left out: no GPU.*AccountingStorageTRES=gres/gpu"):
        to_trace(log)
    with pytest.raises(DataError, match="no job at all"):
        ended_jobs(read())


def test_a_cancelled_run_and_an_empty_run() -> None:
    trace = to_trace(
        read(line(State="CANCELLED by 1001"), line(JobID="8", End=CELLS["Start"]), strict=True)
    )
    assert [(job.job_id, job.state) for job in trace.jobs] == [("7", "CANCELLED")]
    assert trace.notes == ("1 left out: ran for 0 s",)
    assert trace.origin_s == TEN


def test_headings() -> None:
    assert is_heading("JobID|State")
    assert is_heading("jobidraw,State")
    assert not is_heading("job_id,submit_s")
    assert not is_heading("JobIDs")
    with pytest.raises(DataError, match="state occurs twice"):
        read_sacct(["JobID|State|State"], "s.txt")
    with pytest.raises(DataError, match="no column Submit, Start, End, AllocTRES; write it with"):
        read_sacct(["JobID|State"], "s.txt")
    with pytest.raises(DataError, match="no column JobID"):
        read_sacct(["7"], "s.txt", columns=["State", "Submit", "Start", "End", "ReqTRES"])
    with pytest.raises(DataError, match=r"s\.txt: empty"):
        read_sacct([], "s.txt")


# -- properties ----------------------------------------------------------------------------------

_TEXT = st.text(st.sampled_from('ab|\n,;=[]{}" 7☃'), max_size=12)


@given(st.lists(st.tuples(_TEXT, _TEXT, st.integers(0, 3)), min_size=1, max_size=8))
def test_no_name_or_comment_harms_another_job(texts) -> None:
    """Whatever users write into the last columns, every job keeps its own id, GPUs and times."""
    lines = [
        line(
            JobID=str(100 + index),
            User=f"user{index}",
            AllocTRES=f"gres/gpu={gpus},node=1",
            JobName=name,
            Comment=comment,
        )
        for index, (name, comment, gpus) in enumerate(texts)
    ]
    # A line end behind the last separator leaves a line that nobody can assign; it is refused.
    log = read_sacct("\n".join(["|".join(COLUMNS), *lines]).split("\n"), "s.txt")
    jobs = by_id(log)
    for index, (_, _, gpus) in enumerate(texts):
        job = jobs[str(100 + index)]
        assert (job.user, job.gpus, job.ran_s, job.waited_s) == (f"user{index}", gpus, 3600, 300)


_STATES = st.sampled_from(["COMPLETED", "FAILED", "TIMEOUT", "CANCELLED by 7", "OUT_OF_MEMORY"])
_RUN = st.tuples(
    st.integers(0, 10**6), st.integers(0, 10**5), st.integers(1, 10**6), st.integers(0, 99), _STATES
)


@given(
    st.lists(_RUN, min_size=1, max_size=12),
    st.permutations(COLUMNS[1:]),
    st.sampled_from(["|", "\x1f", "☃"]),
)
def test_what_is_written_is_read_back_in_any_order_of_columns(runs, columns, delimiter) -> None:
    columns = ["JobID", *columns]
    lines = [delimiter.join(columns)]
    for number, (submit, wait, ran, gpus, state) in enumerate(runs, start=1):
        start = 10**9 + submit + wait
        cells = CELLS | {
            "JobID": str(number),
            "State": state,
            "Submit": str(10**9 + submit),
            "Eligible": str(10**9 + submit),
            "Start": str(start),
            "End": str(start + ran),
            "AllocTRES": f"cpu=1,gres/gpu={gpus}",
            "NodeList": f"n[1-{number}]",
        }
        lines.append(delimiter.join(cells[column] for column in columns))
    log = read_sacct(lines, "s.txt", strict=True)
    found = {
        int(j.job_id): (
            j.submit_s - 10**9,
            j.waited_s,
            j.ran_s,
            j.gpus,
            j.state,
            len(j.spans[0].nodes),
        )
        for j in log.jobs
    }
    assert found == {
        number: (submit, wait, ran, gpus, state.split()[0], number)
        for number, (submit, wait, ran, gpus, state) in enumerate(runs, start=1)
    }
    assert log.horizon_s == max(10**9 + s + w + r for s, w, r, _, _ in runs)
    assert [job.submit_s for job in log.jobs] == sorted(job.submit_s for job in log.jobs)


_MARKED = st.text(st.sampled_from("7_[]-+.%|:T2025 COMPLETEDUnknown\u2028\x00é"), max_size=40)


@given(st.lists(st.text(max_size=40) | _MARKED, max_size=6), st.booleans())
def test_any_text_gives_a_log_or_an_error_of_ours(lines, headed) -> None:
    if headed:
        lines = ["|".join(COLUMNS), *lines]
    try:
        trace = to_trace(read_sacct(lines, "s.txt"))
    except DataError:
        return
    assert trace.jobs


@given(st.sampled_from(COLUMNS), st.text(max_size=30))
def test_any_text_in_one_cell_costs_at_most_its_own_row(column, text) -> None:
    text = text.replace("|", "").replace("\n", "")
    log = read(line(JobID="6"), line(**{column: text}), line(JobID="8"))
    ids = by_id(log)
    assert {"6", "8"} <= set(ids)
    if text.strip() in {"6", "8"} and column == "JobID":
        return  # taken for a further record of that job
    assert len(ids) + len(log.skipped) == 3 or "." in text


def test_the_documented_command_is_the_one_that_errors_name() -> None:
    page = (Path(__file__).parents[3] / "docs" / "traces.md").read_text()
    block = page.partition("```\nsacct ")[2].partition(" > last-month.txt")[0]
    assert ["sacct", *block.replace("\\\n", " ").split()] == COMMAND.split()


def test_spans_know_their_nodes() -> None:
    assert one(line(NodeList="n[1-2]", NNodes="2")).spans == (
        Span(TEN + 300, TEN + 3900, ("n1", "n2")),
    )


def test_a_damaged_row_is_not_mixed_into_what_is_wrong_with_the_whole_file() -> None:
    rows = [line(JobID=str(n), AllocTRES="cpu=1", ReqTRES="") for n in (1, 2)]
    with pytest.raises(DataError, match=r"no GPU job.*\(2 left out: no GPU\); Slurm accounts GPUs"):
        to_trace(read(*rows, line(JobID="3", End="soon")))
    with pytest.raises(DataError, match=r"\(.*end='soon'"):
        to_trace(read(line(JobID="3", End="soon")))
