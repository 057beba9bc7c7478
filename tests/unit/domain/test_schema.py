"""Schemas and codec come from the same annotations; documents satisfy their schemas."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.codec import dumps, loads
from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.directive import parse_options
from slurm_ext.domain.document import Mode, PlanDocument, parse_plan_document
from slurm_ext.domain.errors import ProtocolError
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.domain.job import Shape, ShapeKind
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.plan import Decision, SolveInfo, Term, Verdict
from slurm_ext.domain.policy import Permit
from slurm_ext.domain.progress import Progress
from slurm_ext.domain.request import PinRequest
from slurm_ext.domain.schema import markdown, schemas

ROOT = Path(__file__).parents[3]
SCHEMAS = schemas()
ESTIMATE = Estimate(10.0, 9.0, 12.0, Source.INTERPOLATED, "between 128 and 256")
CONFIGURATION = Configuration(4, (2, 2), local_batch=8, accumulation=2)
PLAN = PlanDocument(
    job_id="7_[1-3]",
    base_id=7,
    user="alice",
    partition="main",
    made_s=1.5,
    mode=Mode.ACTING,
    policy="titan",
    decision=Decision(
        "7_[1-3]",
        Verdict.START,
        0,
        "most progress",
        CONFIGURATION,
        ("n01", "n02"),
        ESTIMATE,
        terms=(Term("progress", 0.1, "a tenth per second"),),
    ),
    permit=Permit(True, True, True, False, ("no pins here",)),
    candidates=(Candidate(("7_[1-3]",), CONFIGURATION, ESTIMATE, ESTIMATE),),
    refused={"3": "global batch 128 does not divide by 3 GPUs"},
    solve=SolveInfo("main", "knapsack", True, 0.0, 0.001, 3, 8),
    ours=LedgerEntry(
        "7_[1-3]", 1.0, submitted=Shape(ShapeKind.FIXED, 4, 1, 4), lease_until_s=300.0
    ),
)


def valid(name: str, text: str) -> None:
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(text))


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_every_schema_is_one(name):
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    assert SCHEMAS[name]["title"]


def test_documents_satisfy_their_schemas_and_survive_their_text():
    valid("plan", PLAN.to_json())
    assert parse_plan_document(PLAN.to_json(), "p") == PLAN
    valid("request", PinRequest(7, True, 1.0, 4).to_json())
    valid("progress", Progress("7", 0, 1.0, 2, 3, 4.5, 4, 1, 0.5, (0.1, 0.2)).to_json())
    valid("ledger", dumps(PLAN.ours))
    directive = parse_options(
        {
            "model": "vit-large@r1",
            "samples": "50000",
            "epochs": "3",
            "gpus": "1,2,4-8",
            "batch": "128-256",
            "quality": "top1>=0.8",
            "deadline": "now+2:00:00",
            "max-gpu-hours": "10",
        },
        now_s=1.7e9,
    )
    valid("directive", directive.to_json())
    valid("directive", parse_options({"gpus": "auto"}, now_s=1.7e9).to_json())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"made_s": "now"}, "made_s='now' is not a number"),
        ({"mode": "asleep"}, "mode='asleep' is not one of observe, acting, released"),
        ({"uid": True}, "uid=True is not a whole number"),
        ({"notes": "x"}, "notes='x' is not a list"),
        ({"surprise": 1}, "unknown key 'surprise'"),
        ({"permit": {"order": 1}}, "permit.order=1 is not true or false"),
        ({"refused": []}, "refused=[] is not an object"),
        ({"decision": {}}, "decision lacks 'job_id'"),
    ],
)
def test_what_the_schema_refuses_the_codec_refuses_with_its_place(change, words):
    raw = {**json.loads(PLAN.to_json()), **change}
    with pytest.raises(jsonschema.ValidationError):
        valid("plan", json.dumps(raw))
    with pytest.raises(ProtocolError) as caught:
        loads(PlanDocument, json.dumps(raw), "plans/7.json")
    assert words in str(caught.value)
    assert "plans/7.json" in str(caught.value)


def test_a_value_that_contradicts_itself_is_refused():
    raw = json.loads(PLAN.to_json())
    raw["decision"]["remaining_s"]["low"] = 99.0
    with pytest.raises(ProtocolError, match="out of order"):
        loads(PlanDocument, json.dumps(raw), "p")


def test_a_missing_key_is_named():
    raw = json.loads(PLAN.to_json())
    del raw["user"]
    with pytest.raises(ProtocolError, match="lacks 'user'"):
        loads(PlanDocument, json.dumps(raw), "p")


def test_infinity_is_never_written():
    with pytest.raises(ValueError, match="JSON"):
        replace(PLAN, made_s=float("inf")).to_json()


@given(st.text())
def test_any_text_is_a_protocol_error_or_a_document(text):
    with pytest.raises(ProtocolError):
        loads(PlanDocument, text, "p")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(json.loads(PLAN.to_json()))), json_values)
def test_the_codec_accepts_what_the_schema_accepts(key, value):
    """One key replaced at random: the two readers of the annotations never disagree."""
    raw = {**json.loads(PLAN.to_json()), key: value}
    text = json.dumps(raw, allow_nan=True)
    validator = jsonschema.Draft202012Validator(SCHEMAS["plan"])
    accepted = validator.is_valid(json.loads(text))
    try:
        parse_plan_document(text, "p")
    except ProtocolError:
        # The codec is stricter in two points: 1.0 is no whole number, and no number is infinite.
        assert not accepted or isinstance(value, float)
    else:
        assert accepted


def test_the_committed_page_is_printed_from_the_classes():
    assert (ROOT / "docs/documents.md").read_text() == markdown()


def test_a_type_without_a_json_form_is_a_programming_error():
    @dataclass(frozen=True, slots=True)
    class Odd:
        value: complex

    with pytest.raises(TypeError):
        dumps(Odd(1j))
