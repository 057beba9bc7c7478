"""What moves at a switch, and what it costs, without moving anything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.switch.plan import (
    Block,
    Drain,
    Mode,
    Way,
    cold_plan,
    difference,
    plan_stage,
    predicted_s,
)


def blocks(count: int = 4, nbytes: int = 100, **more: bool) -> list[Block]:
    return [Block(f"{i}.w", i, nbytes, **({"keep": True} | more)) for i in range(count)]


def test_each_block_moves_as_its_contents_ask() -> None:
    plan = plan_stage(
        [
            Block("same", 0, 10, keep=False, old="a", new="a"),
            Block("trained", 1, 20, keep=True),
            Block("frozen", 2, 30, keep=False, old="a", new="b"),
            Block("moments", 3, 40, keep=True, fresh=True),
            Block("unused", 4, 50, keep=False, fresh=True),
        ]
    )
    assert [move.way for move in plan.moves] == [
        Way.KEEP,
        Way.SWAP,
        Way.LOAD,
        Way.STORE,
        Way.CLEAR,
    ]
    assert (plan.leaves, plan.comes) == (20 + 40, 20 + 30)


def test_unknown_contents_are_never_taken_for_equal() -> None:
    (move,) = plan_stage([Block("w", 0, 10, keep=False)]).moves
    assert move.way is Way.LOAD


def test_spare_memory_goes_to_the_first_layers_without_a_gap() -> None:
    sizes = [100, 100, 300, 50]
    plan = plan_stage(
        [Block(f"{i}", i, n, keep=True) for i, n in enumerate(sizes)], spare_bytes=260
    )
    assert [move.way for move in plan.moves] == [Way.PREFETCH, Way.PREFETCH, Way.SWAP, Way.SWAP]
    assert plan.prefetched == 200
    assert plan.leaves == plan.comes == sum(sizes)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.integers(1, 1000),
            st.booleans(),
            st.sampled_from([None, "a", "b"]),
            st.sampled_from([None, "a", "b"]),
            st.booleans(),
        ),
        max_size=20,
    ),
    st.integers(0, 5000),
    st.one_of(st.none(), st.integers(0, 5000)),
)
def test_what_must_be_kept_leaves_and_spare_memory_is_never_exceeded(
    rows: list[tuple[int, int, bool, str | None, str | None, bool]],
    spare: int,
    host: int | None,
) -> None:
    given_blocks = [
        Block(str(i), layer, nbytes, keep, old, new, fresh)
        for i, (layer, nbytes, keep, old, new, fresh) in enumerate(rows)
    ]
    plan = plan_stage(given_blocks, spare_bytes=spare, host_bytes=host)
    assert sorted(move.block.key for move in plan.moves) == sorted(b.key for b in given_blocks)
    assert plan.prefetched <= spare
    if plan.mode is Mode.OVERLAPPED and host is not None:
        assert plan.leaves <= host
    for move in plan.moves:
        same = move.block.old is not None and move.block.old == move.block.new
        assert (move.leaves > 0) == (move.block.keep and not same)
        assert (move.comes > 0) == (not move.block.fresh and not same)
    order = [move.block.layer for move in plan.moves]
    assert order == sorted(order)


def test_tasks_of_other_shapes_are_told_apart_by_name() -> None:
    mine = [("head.weight", (10, 64), "f32"), ("body", (64, 64), "f32")]
    assert difference(mine, list(reversed(mine))) is None
    other = [("head.weight", (20, 64), "f32"), ("body", (64, 64), "f32")]
    assert difference(mine, other) == (
        "head.weight was f32[10, 64] and is f32[20, 64] in the new task"
    )
    assert difference(mine, mine[:1]) == "only the old task has body"
    assert difference(mine[:1], mine) == "only the new task has body"
    assert difference(mine, [mine[0], ("body", (64, 64), "bf16")]) is not None


PIPELINE = Drain(stages=4, forward_s=0.02, backward_s=0.04, micro_batches=8)
REPLICAS = Drain(stages=1, forward_s=0.02, backward_s=0.04, micro_batches=8)


def cost(plan_spare: int, drain: Drain, stage: int, host: int | None = None) -> float:
    plan = plan_stage(blocks(16, 25_000_000), spare_bytes=plan_spare, host_bytes=host)
    return predicted_s(plan, drain, stage, out_rate=800e6, in_rate=800e6)


def test_the_drain_hides_the_move_of_late_stages_and_not_of_the_first() -> None:
    # 400 MB at 800 MB/s, both ways at once: half a second and a block.
    assert cost(0, PIPELINE, 0) == pytest.approx(0.5 + 0.03125)
    assert cost(0, PIPELINE, 3) == pytest.approx(0.53125 - 3 * 0.06)
    assert [cost(0, PIPELINE, stage) for stage in range(4)] == sorted(
        (cost(0, PIPELINE, stage) for stage in range(4)), reverse=True
    )


def test_replicas_have_no_drain_so_only_spare_memory_helps() -> None:
    assert cost(0, REPLICAS, 0) == pytest.approx(0.53125)
    assert cost(400_000_000, REPLICAS, 0) == pytest.approx(max(0.0, 0.5 - REPLICAS.step_s()))


def test_a_prefetch_longer_than_a_step_shows_what_is_left_of_it() -> None:
    assert cost(400_000_000, PIPELINE, 0) == 0.0
    short = Drain(stages=4, forward_s=0.002, backward_s=0.004, micro_batches=8)
    assert cost(400_000_000, short, 0) == pytest.approx(0.5 - short.step_s())


def test_too_little_host_memory_costs_both_directions() -> None:
    assert cost(0, PIPELINE, 0, host=1) == pytest.approx(1.0)


def test_a_cold_start_is_not_predicted_from_bytes() -> None:
    with pytest.raises(ValueError, match="measured"):
        predicted_s(cold_plan("other shapes"), PIPELINE, 0, out_rate=1.0, in_rate=1.0)
