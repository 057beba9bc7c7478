"""The directive: options, comment, stored document, GPU counts, amount of work."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.directive import (
    Directive,
    GpuRequest,
    GpuRequestKind,
    JobClass,
    MergeConsent,
    Precision,
    Quality,
    RequestedShape,
    extract_from_admin_comment,
    from_json,
    parse_comment,
    parse_options,
)
from slurm_ext.domain.errors import DirectiveError, ProtocolError
from slurm_ext.domain.job import ShapeKind

NOW_S = 1_764_450_000.0  # 2025-11-29T21:00:00Z


def _parse(**given_options: str) -> Directive:
    return parse_options(
        {name.replace("_", "-"): value for name, value in given_options.items()}, now_s=NOW_S
    )


FULL = {
    "--ft-model": "org/vit-large@main",
    "--ft-dataset": "cards/pets.yaml",
    "--ft-samples": "50000",
    "--ft-epochs": "2.50",
    "--ft-batch": "256-1024",
    "--ft-gpus": "8,1,2-4,3",
    "--ft-input": "224x224",
    "--ft-frozen": "backbone",
    "--ft-precision": "bf16",
    "--ft-grad-checkpointing": "yes",
    "--ft-class": "preemptible",
    "--ft-deadline": "2026-01-01T00:00:00+01:00",
    "--ft-merge": "account",
    "--ft-switch": "yes",
    "--ft-quality": "top1>=0.810",
    "--ft-max-pause": "90",
    "--ft-max-gpu-hours": "12.5",
}


def test_every_option_becomes_its_typed_field() -> None:
    assert parse_options(FULL, now_s=NOW_S) == Directive(
        model="org/vit-large",
        revision="main",
        dataset="cards/pets.yaml",
        samples=50000,
        epochs=2.5,
        batch_min=256,
        batch_max=1024,
        gpus=GpuRequest(GpuRequestKind.LIST, ((1, 4), (8, 8))),
        input_shape="224x224",
        frozen="backbone",
        precision=Precision.BF16,
        grad_checkpointing=True,
        job_class=JobClass.PREEMPTIBLE,
        deadline_s=1_767_222_000.0,
        merge=MergeConsent.ACCOUNT,
        switch=True,
        quality=Quality("top1", ">=", 0.81),
        max_pause_s=5400,
        max_gpu_hours=12.5,
    )


def test_nothing_given_is_the_default() -> None:
    directive = parse_options({}, now_s=NOW_S)
    assert directive == Directive()
    assert directive.to_json() == '{"v":1}'
    assert directive.gpus.kind is GpuRequestKind.REQUESTED


@pytest.mark.parametrize(
    ("given_options", "option", "words"),
    [
        ({"epochs": "three"}, "--ft-epochs", "write a number above 0"),
        ({"ft-colour": "red"}, "--ft-colour", "the options are batch, class"),
        ({"epochs": "3", "steps": "4"}, "--ft-steps", "--ft-epochs is also given"),
        ({"steps": "4", "epochs": "3"}, "--ft-epochs", "--ft-steps is also given"),
        ({"deadline": "2020-01-01"}, "--ft-deadline", "this time has passed"),
        ({"deadline": "now+60"}, "--ft-deadline", "a number without a unit is ambiguous"),
        ({"gpus": "4-2"}, "--ft-gpus", "a range runs backwards"),
        ({"model": "x\n"}, "--ft-model", "not a model name"),
    ],
)
def test_a_refusal_names_option_value_place_and_fix(
    given_options: dict[str, str], option: str, words: str
) -> None:
    with pytest.raises(DirectiveError) as caught:
        parse_options(given_options, now_s=NOW_S, place="job.sh:3")
    assert caught.value.option == option
    assert words in str(caught.value)
    assert str(caught.value).startswith("job.sh:3: ")
    assert "\n" not in str(caught.value)


def test_a_step_counts_a_global_batch_and_an_epoch_the_samples() -> None:
    assert _parse(samples="100", epochs="2.5").total_samples(None) == 250.0
    assert _parse(samples="100").total_samples(None) == 100.0
    assert _parse(steps="10").total_samples(32) == 320.0
    assert _parse(steps="10", batch="64").total_samples(None) == 640.0
    assert _parse(steps="10").total_samples(None) is None
    assert _parse(epochs="3").total_samples(64) is None


@pytest.mark.parametrize(
    ("gpus", "requested", "maximum", "counts"),
    [
        ("requested", 3, 64, (3,)),
        ("requested", 100, 8, (100,)),
        ("auto", 4, 16, (1, 2, 4, 8, 12, 16)),
        ("auto", 3, 8, (1, 2, 3, 4, 8)),
        ("auto", 1, 1, (1,)),
        ("auto", 8, 2, (1, 2, 8)),
        ("1,2,4-8", 4, 6, (1, 2, 4, 5, 6)),
        ("1,2", 4, 64, (1, 2, 4)),
    ],
)
def test_counts_always_hold_the_requested_one(
    gpus: str, requested: int, maximum: int, counts: tuple[int, ...]
) -> None:
    assert _parse(gpus=gpus).resolve_gpu_counts(requested, maximum) == counts


@given(st.integers(1, 600), st.integers(1, 600), st.lists(st.integers(1, 600), min_size=1))
def test_listed_counts_are_exactly_those_that_are_allowed(
    requested: int, maximum: int, listed: list[int]
) -> None:
    text = ",".join(map(str, listed))
    try:
        directive = _parse(gpus=text)
    except DirectiveError:
        assert len(set(listed)) > 16
        return
    counts = directive.resolve_gpu_counts(requested, maximum)
    assert counts == tuple(sorted({n for n in listed if n <= maximum} | {requested}))
    assert all(directive.gpus.allows(n) == (n in listed) for n in range(1, 601))
    assert directive.gpus.counts == tuple(sorted(set(listed)))


@pytest.mark.parametrize(
    ("text", "samples"),
    [
        ("ft: samples=5", 5),
        ("ft:samples=5", 5),
        ("note; ft: samples=5; ft: samples=6", 5),
        ("a note\tft: ft-samples=5 --ft-model=x", 5),
    ],
)
def test_a_comment_holds_the_directive(text: str, samples: int) -> None:
    directive = parse_comment(text, now_s=NOW_S)
    assert directive is not None
    assert directive.samples == samples


@pytest.mark.parametrize("text", ["", "no directive", "draft: samples=5", "left: samples=5"])
def test_a_comment_without_marker_holds_none(text: str) -> None:
    assert parse_comment(text, now_s=NOW_S) is None


def test_a_comment_with_a_bad_word_is_refused() -> None:
    with pytest.raises(DirectiveError, match="write ft: model=NAME"):
        parse_comment("ft: samples 5", now_s=NOW_S)


RECORDED = replace(
    parse_options(FULL, now_s=NOW_S),
    begin_s=1_764_460_000.0,
    shape=ShapeKind.LAUNCHER_PER_NODE,
    req=RequestedShape(8, 2, 2, gpus_per_node=4, nodes_max=4, gpu_type="v100"),
)


@pytest.mark.parametrize("directive", [Directive(), parse_options(FULL, now_s=NOW_S), RECORDED])
def test_a_document_reads_back_to_the_same_directive(directive: Directive) -> None:
    assert from_json(directive.to_json()) == directive


def test_admin_comment_keeps_the_sites_text_and_the_last_marker_counts() -> None:
    text = f'billing=7 ft:{{"v":1,"samples":999}} name ft:{RECORDED.to_json()} tail {{x}}'
    assert extract_from_admin_comment(text) == RECORDED
    assert extract_from_admin_comment("billing=7") is None
    assert extract_from_admin_comment("left:{}") is None


@pytest.mark.parametrize(
    "text",
    [
        'ft:{"v":1,"samples":5',
        'ft:{"v":2}',
        'ft:{"samples":5}',
        'ft:{"v":1,"samples":"5"}',
        'ft:{"v":1,"samples":0}',
        'ft:{"v":1,"samples":true}',
        'ft:{"v":1,"epochs":1e400}',
        'ft:{"v":1,"epochs":NaN}',
        'ft:{"v":1,"epochs":3,"steps":4}',
        'ft:{"v":1,"gpus":"4-2"}',
        'ft:{"v":1,"gpus":["1"]}',
        'ft:{"v":1,"batch_min":8,"batch_max":4}',
        'ft:{"v":1,"quality":["top1",">"]}',
        'ft:{"v":1,"quality":["top1",">",1]}',
        'ft:{"v":1,"shape":"round"}',
        'ft:{"v":1,"req":{"gpus":-1}}',
        'ft:{"v":1,"req":{}}',
        'ft:{"v":1,"req":7}',
        'ft:{"v":1,"deadline_s":-5}',
        'ft:{"v":1,"model":"a b"}',
        'ft:{"v":1,"switch":"yes"}',
        'ft:{"v":true}',
    ],
)
def test_a_damaged_document_is_an_error_and_never_half_a_directive(text: str) -> None:
    with pytest.raises(ProtocolError):
        extract_from_admin_comment(text)


def test_another_version_says_what_to_do() -> None:
    with pytest.raises(ProtocolError, match=r"version 2.*install the Lua module and the daemon"):
        from_json('{"v":2}')


def test_unknown_keys_of_the_same_version_are_ignored() -> None:
    assert from_json('{"v":1,"samples":5,"colour":"red"}').samples == 5


def test_a_document_past_one_kibibyte_is_refused() -> None:
    with pytest.raises(DirectiveError, match="1024"):
        from_json('{"v":1,"colour":"' + "r" * 1024 + '"}')


@given(st.text(max_size=60))
def test_any_admin_comment_is_read_or_refused(text: str) -> None:
    for comment in (text, f"ft:{text}", f"ft:{{{text}}}"):
        try:
            extract_from_admin_comment(comment)
        except (ProtocolError, DirectiveError):
            continue


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.sampled_from(sorted(Directive.__dataclass_fields__)), _json)
def test_no_value_of_a_known_key_breaks_the_reader(key: str, value: Any) -> None:
    text = json.dumps({"v": 1, key: value})
    try:
        directive = from_json(text)
    except (ProtocolError, DirectiveError):
        return
    for number in (directive.epochs, directive.deadline_s, directive.begin_s):
        assert number is None or math.isfinite(number)
    assert from_json(directive.to_json()) == directive
