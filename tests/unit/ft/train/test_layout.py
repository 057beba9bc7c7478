"""Layouts of the reference trainer: the global batch is kept, or the job does not start."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.errors import ConfigError
from slurm_ft.train.layout import Layout, Wish, resolve_layout

PLAN = {
    "FT_GPUS": "4",
    "FT_LOCAL_BATCH": "8",
    "FT_ACCUMULATION": "2",
    "FT_GLOBAL_BATCH": "64",
    "FT_STAGES": "2",
    "FT_MICRO_BATCHES": "4",
    "FT_PRECISION": "bf16",
    "FT_GRAD_CHECKPOINTING": "yes",
}


def test_a_plan_is_taken_as_it_is():
    layout = resolve_layout(PLAN, Wish(), world=4, global_batch=64)
    assert layout == Layout(4, 8, 2, 2, 4, "1f1b", "bf16", True)
    assert (layout.replicas, layout.round_samples, layout.micro_samples) == (2, 16, 4)


def test_options_win_over_the_plan():
    wish = Wish(local_batch=16, accumulation=1, stages=1, micro_batches=1, precision="fp32")
    layout = resolve_layout(PLAN, wish, world=4, global_batch=64)
    assert layout == Layout(4, 16, 1, 1, 1, "1f1b", "fp32", True)
    off = Wish(grad_checkpointing=False)
    assert not resolve_layout(PLAN, off, world=4, global_batch=64).grad_checkpointing


def test_the_plans_micro_batches_are_for_the_plans_stages():
    """A plan without a pipeline says one micro-batch; --stages alone must be enough."""
    plan = {"FT_GPUS": "4", "FT_STAGES": "1", "FT_MICRO_BATCHES": "1"}
    layout = resolve_layout(plan, Wish(stages=4), world=4, global_batch=64)
    assert (layout.stages, layout.micro_batches) == (4, 4)
    assert resolve_layout(PLAN, Wish(stages=2), world=4, global_batch=64).micro_batches == 4
    assert resolve_layout({"FT_MICRO_BATCHES": "2"}, Wish(), world=4, global_batch=64) == Layout(
        4, 16, 1, 1, 2
    )
    wish = Wish(stages=4, micro_batches=8)
    assert resolve_layout(plan, wish, world=4, global_batch=64).micro_batches == 8


def test_without_a_plan_the_ranks_share_the_batch():
    assert resolve_layout({}, Wish(), world=4, global_batch=64).local_batch == 16
    small = resolve_layout({}, Wish(max_local_batch=6), world=4, global_batch=64)
    assert (small.local_batch, small.accumulation) == (4, 4)
    given_one = resolve_layout({}, Wish(accumulation=8), world=4, global_batch=64)
    assert (given_one.local_batch, given_one.accumulation) == (2, 8)


@pytest.mark.parametrize(
    ("environ", "wish", "world", "batch", "words"),
    [
        (PLAN, Wish(), 2, 64, "local batch 8 x 2 ranks x accumulation 2 is 32 (the plan is for 4"),
        (PLAN, Wish(), 4, 128, "global_batch=128"),
        ({}, Wish(), 3, 64, "3 ranks cannot share it evenly"),
        ({}, Wish(local_batch=5), 4, 64, "local_batch=5"),
        ({}, Wish(accumulation=3), 4, 64, "accumulation=3"),
        ({}, Wish(stages=3), 4, 64, "stages=3"),
        ({}, Wish(stages=2, micro_batches=5), 4, 64, "micro_batches=5"),
        ({}, Wish(stages=4, micro_batches=2), 4, 64, "1F1B over 4 stages"),
        ({}, Wish(precision="fp8"), 1, 64, "fp32, tf32, bf16"),
        ({"FT_PRECISION": "fp16"}, Wish(), 1, 64, "fp16"),
        ({"FT_LOCAL_BATCH": "all"}, Wish(), 1, 64, "FT_LOCAL_BATCH='all'"),
        ({"FT_STAGES": "0"}, Wish(), 1, 64, "FT_STAGES=0"),
        ({"FT_GRAD_CHECKPOINTING": "perhaps"}, Wish(), 1, 64, "perhaps"),
    ],
)
def test_what_would_train_something_else_is_refused(environ, wish, world, batch, words):
    with pytest.raises(ConfigError) as caught:
        resolve_layout(environ, wish, world=world, global_batch=batch)
    assert words in str(caught.value)


@given(
    replicas=st.integers(1, 6),
    stages=st.integers(1, 4),
    local=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    step=st.integers(1, 10**6),
)
def test_a_step_takes_the_same_samples_whatever_the_layout(
    replicas, stages, local, accumulation, step
):
    layout = Layout(replicas * stages, local, accumulation, stages, 1)
    taken = [
        number
        for replica in range(replicas)
        for index in range(accumulation)
        for number in layout.samples_of(step, replica, index)
    ]
    batch = layout.global_batch
    assert sorted(taken) == list(range((step - 1) * batch, step * batch))


def test_ranks_of_one_pipeline_are_neighbours():
    layout = Layout(gpus=6, stages=3)
    assert [layout.place_of(rank) for rank in range(6)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
