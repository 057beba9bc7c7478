"""JSON of six releases, recorded, and the agreement of JSON and text of one moment."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pytest

from slurm_ext.domain.errors import SourceMissingError
from slurm_ext.domain.job import Job, JobState
from slurm_ext.slurm.arrays import Records
from slurm_ext.slurm.json_documents import (
    job_from_json,
    jobs_from_json,
    number,
    parse_document,
)
from slurm_ext.slurm.parse_jobs import COLUMNS, JobParser, columns
from slurm_ext.slurm.rows import RowFormat

DATA = Path(__file__).resolve().parents[2] / "data" / "slurm"
AT = COLUMNS.index("JobArrayID")
RELEASES = ("24.05", "24.11", "25.05")


def text_of(name: str) -> str:
    path = DATA / name
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return raw.decode(errors="replace")


@pytest.mark.parametrize(
    ("release", "version"),
    [("24.11", "v0.0.42"), ("24.11", "v0.0.40"), ("26.05", "v0.0.42"), ("26.05", "v0.0.44")],
)
def test_text_and_json_of_one_moment_are_the_same_jobs(release: str, version: str) -> None:
    form = RowFormat(columns(text_of(f"{release}/squeue_help_format.txt")), "@MARK@")
    rows = Records(form.split(text_of(f"{release}/squeue.txt"), "squeue"), AT).rows()
    text = {job.job_id: job for job in JobParser().parse(rows, form)}
    documents = {
        job.job_id: job for job in jobs_from_json(text_of(f"{release}/squeue_{version}.json.gz"))
    }
    assert text.keys() == documents.keys()
    for job_id, job in text.items():
        for field in dataclasses.fields(Job):
            ours, theirs = getattr(job, field.name), getattr(documents[job_id], field.name)
            # squeue words some reasons at length.
            if field.name != "reason" or not ours.startswith("Nodes required"):
                assert ours == theirs, (job_id, field.name)


def test_a_data_parser_that_does_not_tell_of_whole_nodes_is_refused() -> None:
    """It would call every job one that shares its nodes."""
    text = text_of("26.05/squeue_v0.0.45.json.gz")
    assert {str(job["shared"]) for job in json.loads(text)["jobs"]} == {"[]"}
    with pytest.raises(SourceMissingError, match=r"v0\.0\.45 does not tell"):
        jobs_from_json(text)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (5, 5.0),
        ({"set": True, "infinite": False, "number": 5}, 5.0),
        ({"set": True, "infinite": False, "number": 0}, 0.0),
        ({"set": True, "infinite": True, "number": 0}, None),
        ({"set": False, "infinite": False, "number": 0}, None),
        (None, None),
        (True, None),
        ("5", None),
    ],
)
def test_json_24_05_numbers(value: object, wanted: float | None) -> None:
    """Case json-24.05: a number, or an object that may say infinite or not set."""
    assert number(value) == wanted


def test_the_bare_form_of_21_08() -> None:
    jobs = jobs_from_json(text_of("21.08/squeue.json"))
    assert {job.state for job in jobs} == {JobState.RUNNING, JobState.PENDING}
    first = jobs[0]
    assert (first.user, first.gpus, first.memory_mib) == ("user4", 0, 64000)
    assert first.time_limit_s == 30240 * 60
    assert first.node_names == ("cs75",)
    assert parse_document(text_of("21.08/squeue.json"), "jobs", "x").release == "21.08.5"


def test_23_11() -> None:
    document = parse_document(text_of("23.11/squeue.json"), "jobs", "x")
    assert document.release.startswith("23.11")
    jobs = jobs_from_json(text_of("23.11/squeue.json"))
    assert [(job.job_id, job.raw_id) for job in jobs] == [(f"204+{i}", 204 + i) for i in range(4)]
    assert all(job.running and len(job.node_names) == 1 for job in jobs)


@pytest.mark.parametrize("release", RELEASES)
def test_every_recorded_job_of_slurmrestd_is_read(release: str) -> None:
    document = parse_document(text_of(f"{release}/restd_jobs.json.gz"), "jobs", "x")
    assert document.release.startswith(release)
    jobs = [job_from_json(item) for item in document.items]
    assert len(jobs) >= 14
    for job, item in zip(jobs, document.items, strict=True):
        assert job.state.value in item["job_state"]
        assert job.raw_id == item["job_id"]
        assert job.user.startswith("user")
    ended = {JobState.COMPLETED, JobState.FAILED, JobState.TIMEOUT, JobState.CANCELLED}
    kept = jobs_from_json(text_of(f"{release}/restd_jobs.json.gz"))
    assert {job.job_id for job in kept} == {j.job_id for j in jobs if j.state not in ended}


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("gres", 6),
        ("multi-nodes", 12),
        ("multi-types", 2),
        ("pending", 6),
        ("per-socket", 2),
        ("per-task", 4),
        ("running", 6),
        ("type", 1),
    ],
)
def test_gpus_of_a_cluster_that_does_not_track_them(name: str, gpus: int) -> None:
    """This site's TRES name no GPUs: they are in the requests and in gres_detail only."""
    [item] = parse_document(text_of(f"24.11/restd_job_gpus_{name}.json.gz"), "jobs", "x").items
    assert "gpu" not in item["tres_alloc_str"]
    assert job_from_json(item).gpus == gpus


def test_types_are_known_where_there_is_one() -> None:
    def kind(name: str) -> str:
        [item] = parse_document(text_of(f"24.11/restd_job_gpus_{name}.json.gz"), "jobs", "x").items
        return job_from_json(item).gpu_type

    assert kind("type") == "h100"
    assert kind("per-socket") == "h100"  # the other type is listed with a count of 0
    assert kind("multi-types") == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"jobs": {}}',
        '{"jobs": [1]}',
        '{"jobs": [], "errors": [{"error": "Unable to contact slurm controller"}]}',
        '{"jobs": [{"job_id": 5}]}',
        '{"jobs": [{"job_id": 5, "job_state": ["PENDING"], "excluded_nodes": "n[1-"}]}',
    ],
)
def test_an_unusable_answer_is_missing_never_empty(text: str) -> None:
    with pytest.raises(SourceMissingError):
        jobs_from_json(text)


def test_an_answer_cut_off_anywhere_is_missing() -> None:
    text = json.dumps(json.loads(text_of("23.11/squeue.json")))
    for end in range(0, len(text) - 1, 997):
        with pytest.raises(SourceMissingError):
            jobs_from_json(text[:end])


def test_an_empty_queue_is_an_answer() -> None:
    assert jobs_from_json('{"jobs": [], "errors": []}') == ()
