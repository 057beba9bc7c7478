"""The plan inside the job: read as the daemon writes it, and weighed against what was granted."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.configuration import Configuration
from slurm_ext.domain.document import DOCUMENT_VERSION, Mode, PlanDocument
from slurm_ext.domain.plan import Decision, Verdict
from slurm_ext.domain.policy import Permit
from slurm_ext.domain.request import plan_path
from slurm_ft.launch import plan

CONFIGURATION = Configuration(
    gpus=8,
    placement=(4, 4),
    local_batch=16,
    accumulation=2,
    precision="bf16",
    grad_checkpointing=True,
    frozen="4",
)


def document(configuration: Configuration | None = CONFIGURATION, attempt: int = 0) -> str:
    return PlanDocument(
        job_id="77",
        base_id=77,
        user="alice",
        partition="main",
        made_s=0.0,
        mode=Mode.ACTING,
        policy="titan",
        decision=Decision("77", Verdict.START, 0, "", configuration=configuration),
        permit=Permit(),
        attempt=attempt,
    ).to_json()


def test_it_reads_what_the_daemon_writes():
    assert plan.DOCUMENT_VERSION == DOCUMENT_VERSION
    found = plan.parse_planned(document(), 77, 0)
    assert found is not None
    assert (found.gpus, found.local_batch, found.accumulation) == (8, 16, 2)
    assert found.global_batch == CONFIGURATION.global_batch
    assert found.words == {
        "FT_PRECISION": "bf16",
        "FT_GRAD_CHECKPOINTING": "yes",
        "FT_FROZEN": "4",
    }


def test_the_path_is_that_of_the_daemon(tmp_path: Path):
    path = Path(plan_path(tmp_path, 77))
    path.parent.mkdir()
    path.write_text(document())
    assert plan.settle_from_spool(str(tmp_path), 77, 0, 8, 2).planned


def test_an_attempt_never_inherits_a_plan():
    assert plan.parse_planned(document(attempt=1), 77, 2) is None
    assert plan.parse_planned(document(configuration=None), 77, 0) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"version": 2}',
        "[" * 100_000,
        document().replace('"base_id":77', '"base_id":78'),
        document().replace('"gpus":8', '"gpus":0'),
        document().replace('"gpus":8', '"gpus":true'),
        document().replace('"gpus":8', '"gpus":1e30'),
        document().replace('"bf16"', '"bf16\\nMASTER_PORT=1"'),
        document().replace('"grad_checkpointing":true', '"grad_checkpointing":"yes"'),
    ],
)
def test_a_document_of_another_form_is_not_used(text: str):
    with pytest.raises(plan.PlanUnusable):
        plan.parse_planned(text, 77, 0)


@given(st.text() | st.from_type(dict).map(repr))
def test_anything_else_is_refused_or_empty(text: str):
    with contextlib.suppress(plan.PlanUnusable):
        assert plan.parse_planned(text, 77, 0) is None


def settle(granted: int, **changes: int) -> plan.Settled:
    raw = json.loads(document())
    raw["decision"]["configuration"].update(changes)
    return plan.settle(granted, 2, plan.parse_planned(json.dumps(raw), 77, 0))


def test_as_planned():
    found = settle(8)
    assert found.note == ""
    assert found.values["FT_GPUS"] == "8"
    assert found.values["FT_LOCAL_BATCH"] == "16"
    assert found.values["FT_GLOBAL_BATCH"] == "256"


@pytest.mark.parametrize(
    ("granted", "local", "accumulation"), [(4, 16, 4), (2, 16, 8), (16, 16, 1), (64, 4, 1)]
)
def test_granted_beats_planned_and_the_global_batch_stays(granted, local, accumulation):
    found = settle(granted)
    assert (found.values["FT_LOCAL_BATCH"], found.values["FT_ACCUMULATION"]) == (
        str(local),
        str(accumulation),
    )
    assert local * granted * accumulation == 256
    assert f"Slurm granted {granted}" in found.note


@pytest.mark.parametrize(
    ("granted", "changes", "why"),
    [
        (3, {}, "cannot share a batch of 256"),
        (2, {"stages": 4, "gpus": 8}, "pipelines of 4 stages"),
        (0, {}, "does not say how many"),
    ],
)
def test_what_cannot_be_kept_is_said_and_plain_variables_are_used(granted, changes, why):
    found = settle(granted, **changes)
    assert why in found.note
    assert found.values["FT_PLAN_DIGEST"] == "plain"
    assert "FT_LOCAL_BATCH" not in found.values


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_the_global_batch_is_never_changed(granted, gpus, local, accumulation):
    found = settle(granted, gpus=gpus, local_batch=local, accumulation=accumulation)
    values = found.values
    if found.planned:
        kept = int(values["FT_LOCAL_BATCH"]) * granted * int(values["FT_ACCUMULATION"])
        assert kept == gpus * local * accumulation == int(values["FT_GLOBAL_BATCH"])
        # No rank is given more than is known to fit.
        assert int(values["FT_LOCAL_BATCH"]) <= local
    else:
        assert (gpus * local * accumulation) % granted


def test_ranks_that_read_different_plans_have_different_digests():
    digests = {
        settle(8).values["FT_PLAN_DIGEST"],
        settle(8, accumulation=4).values["FT_PLAN_DIGEST"],
        settle(4).values["FT_PLAN_DIGEST"],
        plan.settle(8, 2, None).values["FT_PLAN_DIGEST"],
    }
    assert len(digests) == 4
    assert settle(8).values["FT_PLAN_DIGEST"] == settle(8).values["FT_PLAN_DIGEST"]


def test_a_file_server_that_hangs_costs_the_limit_and_no_more(tmp_path: Path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    begun = time.monotonic()
    with pytest.raises(plan.PlanUnusable, match=r"within 0\.2 s"):
        plan.read_within(str(path), 0.2)
    assert time.monotonic() - begun < 5
    # Let the reader that was left behind end.
    os.close(os.open(path, os.O_WRONLY))


def test_a_missing_spool_is_no_plan_and_no_note(tmp_path: Path):
    found = plan.settle_from_spool(str(tmp_path / "none"), 77, 0, 8, 2)
    assert (found.planned, found.note) == (False, "")


def test_an_unusable_plan_is_told_and_the_job_starts(tmp_path: Path):
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "77.json").write_text("{")
    found = plan.settle_from_spool(str(tmp_path), 77, 0, 8, 2)
    assert "is not used" in found.note
    assert found.values["FT_GPUS"] == "8"
    (tmp_path / "plans" / "77.json").write_text(" " * (plan.MAX_PLAN_BYTES + 1))
    assert "longer than" in plan.settle_from_spool(str(tmp_path), 77, 0, 8, 2).note
