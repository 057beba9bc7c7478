"""Tasks of the reference trainer: read strictly, and what follows from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.errors import ConfigError
from slurm_ft.train.task import ModelKind, Target, Task, make_task


def test_values_may_be_text_as_options_and_variables_bring_them():
    task = make_task({"model": "decoder", "steps": "12", "learning_rate": "1e-3"}, "here")
    assert (task.model, task.steps, task.learning_rate) == (ModelKind.DECODER, 12, 1e-3)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stepz": 3}, "stepz"),
        ({"steps": 0}, "steps=0"),
        ({"steps": "many"}, "steps='many'"),
        ({"steps": 1.5}, "steps=1.5"),
        ({"steps": True}, "steps=True"),
        ({"model": "cnn"}, "vit or decoder"),
        ({"heads": 3}, "does not divide dim=64"),
        ({"patch": 5}, "does not divide image=16"),
        ({"frozen": "most"}, "none, backbone or a number"),
        ({"frozen": 6}, "at most 5 layers"),
        ({"learning_rate": "nan"}, "learning_rate=nan"),
        ({"quality": "top5>=0.8"}, "top1"),
        ({"quality": "top1>0.8"}, "top1>=0.8"),
        ({"quality": "top1>=high"}, "not a number"),
        ({"quality": "top1>=0.8", "model": "decoder"}, "token_accuracy"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_place_and_fix(values, words):
    with pytest.raises(ConfigError) as caught:
        make_task(values, "file.yaml")
    assert words in str(caught.value)
    assert "file.yaml" in str(caught.value)


def test_frozen_counts_the_embedding_first_and_never_the_head():
    frozen = [Task(depth=4, frozen=words).frozen_layers for words in ("none", "1", "5", "backbone")]
    assert frozen == [0, 1, 5, 5]


def test_a_target_holds_both_ways_and_never_for_nan():
    assert Target("top1", ">=", 0.8).kept(0.8)
    assert not Target("top1", ">=", 0.8).kept(0.79)
    assert Target("loss", "<=", 0.5).kept(0.5)
    assert not Target("loss", "<=", 0.5).kept(float("nan"))
    assert not Target("top1", ">=", 0.8).kept(float("nan"))


@given(st.integers(0, 50), st.integers(1, 400))
def test_the_learning_rate_rises_to_its_top_and_then_only_falls(warmup, steps):
    task = Task(steps=steps, warmup_steps=warmup, learning_rate=1.0)
    rates = [task.learning_rate_at(step) for step in range(1, steps + 1)]
    assert all(0.0 < rate <= 1.0 for rate in rates)
    rising, falling = rates[:warmup], rates[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    if falling:
        assert rates[-1] == pytest.approx(0.1)
