"""The checkpoint store on real ranks: what is saved is what is loaded, on any number of them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurm_ft.checkpoint.errors import CheckpointError, LostPeerError
from slurm_ft.checkpoint.layout import LATEST, examine
from slurm_ft.checkpoint.manifest import MANIFEST, Meta
from slurm_ft.checkpoint.store import CheckpointStore
from slurm_ft.session.comms.solo import SoloComm
from tests.wrappers.checkpoint_ranks import (
    mesh_here,
    open_store,
    replicated,
    sharded,
    small_model,
    train,
)
from tests.wrappers.ranks import run_ranks, values

WHOLE = torch.arange(24 * 5, dtype=torch.float32).reshape(24, 5)


def _moments(_rank: int, root: str) -> None:
    model, optimizer = small_model(1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, 3)
    scheduler.step()
    store = open_store(root)
    store.save(3, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    expected = train(model, optimizer, 4)

    model, optimizer = small_model(2)
    optimizer.param_groups[0]["setting_of_a_newer_torch"] = 5
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loaded = open_store(root).load({"model": model, "optimizer": optimizer, "scheduler": scheduler})

    assert loaded is not None
    assert loaded.step == 3
    assert loaded.random[0] == "python"
    assert scheduler.last_epoch == 1
    assert optimizer.param_groups[0]["setting_of_a_newer_torch"] == 5
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)  # the scheduler's, not 0.01
    assert train(model, optimizer, 4) == expected  # bit-equal: same data, same moments


def test_an_optimizer_that_has_not_stepped_gets_its_moments_back(tmp_path: Path) -> None:
    # In a process of its own: torch's autograd does not survive the forks of other tests.
    values(run_ranks(1, _moments, str(tmp_path), distributed=False))


def test_plain_values_nested_at_will_come_back_as_they_were(tmp_path: Path) -> None:
    def state() -> dict[str, Any]:
        return {"cursor": {"epoch": 0, "seen": torch.zeros(3), "deep": {}}, "more": {}, "count": 0}

    saved = state()
    saved["cursor"] |= {"epoch": 4, "seen": torch.arange(3.0), "deep": {"er": [1, 2]}}
    saved["cursor"]["other"] = torch.ones(1)  # the program has no key for it, nor any use
    saved["more"] |= {7: {"x": torch.ones(2)}, "list": [torch.ones(1), {"q": 2}], "none": {}}
    saved["count"] = 9
    open_store(tmp_path).save(1, saved)

    fresh = state()
    seen = fresh["cursor"]["seen"]
    open_store(tmp_path).load(fresh)

    assert fresh["count"] == 9
    assert fresh["cursor"]["seen"] is seen  # in place
    assert torch.equal(seen, torch.arange(3.0))
    assert set(fresh["cursor"]) == {"epoch", "seen", "deep"}
    assert (fresh["cursor"]["epoch"], fresh["cursor"]["deep"]) == (4, {"er": [1, 2]})
    assert set(fresh["more"]) == {7, "list", "none"}
    assert torch.equal(fresh["more"][7]["x"], torch.ones(2))
    assert torch.equal(fresh["more"]["list"][0], torch.ones(1))
    assert fresh["more"]["list"][1] == {"q": 2}


def test_random_states_go_on_where_they_were(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    random.seed(5)
    torch.manual_seed(5)
    store.save(1, {"x": torch.zeros(1)}, Meta(position={"index": 12}))
    expected = (random.random(), torch.rand(3).tolist())
    random.seed(6)
    torch.manual_seed(6)
    loaded = store.load({"x": torch.zeros(1)})
    assert loaded is not None
    assert loaded.position == {"index": 12}
    assert (random.random(), torch.rand(3).tolist()) == expected


def test_the_state_of_the_call_is_saved_even_where_it_changes_at_once(tmp_path: Path) -> None:
    x = torch.zeros(1 << 20)
    store = open_store(tmp_path)
    for step in (1, 2, 3):  # the later ones reuse the buffers
        x.fill_(step)
        store.start(step, {"x": x})
        x.fill_(-1)
        saved = store.finish()
        assert saved is not None
        fresh = torch.empty(1 << 20)
        store.load({"x": fresh})
        assert torch.equal(fresh, torch.full_like(fresh, step))


def test_a_second_start_finishes_the_first(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.start(1, {"x": torch.ones(3)})
    store.start(2, {"x": torch.ones(3)})
    first = store.latest()
    assert first is not None
    assert first.step == 1
    assert store.finish() is not None
    assert store.finish() is None


def _save_everywhere(rank: int, root: str, how: str) -> list[int]:
    mesh = mesh_here()
    size = dist.get_world_size()
    store = open_store(root, keep=1)
    state = {
        "sharded": sharded(WHOLE.clone(), mesh),
        "alike": replicated(WHOLE * 2, mesh),
        "plain": WHOLE * 3,
        "own": {f"rank{rank}": torch.full((2,), float(rank))},
        "step": 0,
    }
    sizes = []
    torch.manual_seed(100 + rank)
    for step in (1, 2, 3):
        state["step"] = step
        meta = Meta(position={"rank": rank}, plan={"gpus": size})
        if how == "sync":
            store.save(step, state, meta)
        else:
            store.start(step, state, meta)
            while not store.done():  # training goes on: its collectives are on another group
                dist.all_reduce(torch.ones(8))
                if dist.get_world_size() > 1:
                    break
            store.finish()
        sizes.append(store._buffers.bytes)
    return sizes


def _load_everywhere(rank: int, root: str) -> dict[str, Any]:
    mesh = mesh_here()
    state = {
        "sharded": sharded(torch.zeros_like(WHOLE), mesh),
        "alike": replicated(torch.zeros_like(WHOLE), mesh),
        "plain": torch.zeros_like(WHOLE),
        "step": 0,
    }
    loaded = open_store(root).load(state)
    assert loaded is not None
    assert torch.equal(state["sharded"].full_tensor(), WHOLE)  # type: ignore[union-attr]
    assert torch.equal(state["alike"].to_local(), WHOLE * 2)  # type: ignore[union-attr]
    assert torch.equal(state["plain"], WHOLE * 3)  # type: ignore[arg-type]
    return {
        "step": state["step"],
        "loaded": loaded.step,
        "random": torch.initial_seed() == 0 or list(loaded.random),
        "position": dict(loaded.position),
        "draw": torch.rand(1).item(),
    }


@pytest.mark.parametrize("how", ["sync", "async"])
def test_four_ranks_save_and_any_number_loads(tmp_path: Path, how: str) -> None:
    sizes = values(run_ranks(4, _save_everywhere, str(tmp_path), how))
    for size in (4, 2, 3, 1):
        found = values(run_ranks(size, _load_everywhere, str(tmp_path)))
        assert [f["step"] for f in found] == [3] * size
        assert [f["loaded"] for f in found] == [3] * size
        assert len({f["draw"] for f in found}) == size  # no two ranks draw alike
        here = [{"rank": r} if size == 4 else {"rank": 0} for r in range(size)]
        assert [f["position"] for f in found] == here
    if how == "async":
        # From the second save on a rank stages its own share only.
        assert sum(s[2] for s in sizes) < sum(s[0] for s in sizes) / 2
    manifest = json.loads((tmp_path / "step-000000000003" / MANIFEST).read_text())
    assert manifest["world_size"] == 4
    assert manifest["plan"] == {"gpus": 4}
    assert manifest["torch"] == torch.__version__
    assert len(manifest["rng"]) == 4


def _sharded_optimizer(rank: int, root: str, load: bool) -> list[list[float]]:
    mesh = mesh_here()
    torch.manual_seed(3)
    layer = torch.nn.Linear(6, 8, bias=False)
    layer.weight = torch.nn.Parameter(sharded(layer.weight.detach().clone(), mesh))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    store = open_store(root)
    if load:
        with torch.no_grad():
            layer.weight.zero_()
        assert store.load({"model": layer, "optimizer": optimizer}) is not None
    steps = 1 if load else 2
    seen = []
    for step in range(steps):
        loss = (layer(replicated(torch.ones(2, 6), mesh)) ** 2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(layer.weight.full_tensor().flatten().tolist())  # type: ignore[operator]
        if step == 0 and not load:
            store.save(1, {"model": layer, "optimizer": optimizer})
    moment = optimizer.state[layer.weight]["exp_avg"]
    assert isinstance(moment, type(layer.weight.data))
    assert moment.placements == layer.weight.placements
    return [seen[-1]]


def test_moments_of_sharded_parameters_are_made_sharded(tmp_path: Path) -> None:
    (expected, _) = values(run_ranks(2, _sharded_optimizer, str(tmp_path), False))
    for size in (2, 3):
        for found in values(run_ranks(size, _sharded_optimizer, str(tmp_path), True)):
            assert found[0] == pytest.approx(expected[0], abs=1e-6)


def _collide(rank: int, root: str, key: str, check: str) -> str:
    store = open_store(root, check_replicas=check)
    state = {"layers.0": torch.ones(4), key: torch.full((4,), float(rank))}
    try:
        store.save(1, state)
    except CheckpointError as exc:
        store.save(2, {"fine": torch.ones(1)})  # the job goes on
        return str(exc)
    return ""


def test_ranks_that_hold_different_values_under_one_key_are_told(tmp_path: Path) -> None:
    for words in values(run_ranks(2, _collide, str(tmp_path), "stage", "first")):
        assert "stage: rank 0 has" in words
        assert "a key of its own" in words
    assert [c.step for c in examine(tmp_path).complete] == [2]
    assert values(run_ranks(2, _collide, str(tmp_path / "b"), "stage", "never")) == ["", ""]


def _stages(rank: int, root: str) -> list[Any]:
    """Save and load keys of this rank's own; the values, and the keys that torch was given."""
    store = open_store(root)
    given: list[list[str]] = []
    load = torch.distributed.checkpoint.load

    def noting(state_dict: dict[str, Any], **options: Any) -> None:
        given.append(sorted(state_dict))
        load(state_dict, **options)

    torch.distributed.checkpoint.load = noting
    key = f"stage{rank}"
    store.save(1, {key: torch.full((4,), float(rank + 1)), f"note{rank}": {"of": rank}})
    state = {key: torch.zeros(4), f"note{rank}": {"of": -1}}
    store.load(state)
    return [state[key].tolist(), state[f"note{rank}"], given]


def test_torch_compares_no_keys_of_ranks_that_have_their_own(tmp_path: Path) -> None:
    """Releases up to 2.6 warn on each rank at each resume of a pipeline, where they can."""
    for rank, (found, note, given) in enumerate(values(run_ranks(2, _stages, str(tmp_path)))):
        assert found == [rank + 1.0] * 4
        assert note == {"of": rank}
        assert given == [[]]


def _one_cannot(rank: int, root: str) -> list[str]:
    """Rank 1's part of the second save fails; the third is fine again."""
    store = open_store(root)
    words = []
    for step in (1, 2, 3):
        real = os.fsync
        if rank == 1 and step == 2:

            def full(_fd: int) -> None:
                raise OSError(28, "No space left on device")

            os.fsync = full
        try:
            store.start(step, {f"part{rank}": torch.full((4,), float(step))})
            store.finish()
            words.append("")
        except CheckpointError as exc:
            words.append(str(exc))
        finally:
            os.fsync = real
    return words


def test_a_disk_that_is_full_for_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    for words in values(run_ranks(3, _one_cannot, str(tmp_path))):
        assert words[0] == words[2] == ""
        assert "rank 1" in words[1]
        assert "No space left on device" in words[1]
    assert [c.step for c in examine(tmp_path).complete] == [3, 1]
    assert examine(tmp_path).unfinished == ()


def _one_hangs(rank: int, root: str, over: str) -> list[str]:
    """Rank 1's disk hangs during the second save, longer than the store waits."""
    store = open_store(root, limit_s=1.0, keep=9)
    told: list[str] = []
    real = os.fsync

    def hang(handle: int) -> None:
        while not os.path.exists(over):
            time.sleep(0.01)
        real(handle)

    def attempt(step: int) -> None:
        try:
            store.start(step, {f"part{rank}": torch.full((4,), float(step))})
            store.finish()
            told.append("")
        except CheckpointError as exc:
            told.append(str(exc))

    attempt(1)
    os.fsync = hang if rank == 1 else real
    began = time.monotonic()
    attempt(2)
    attempt(3)
    told.append(f"{time.monotonic() - began:.1f}")
    Path(over).touch()
    os.fsync = real
    until = time.monotonic() + 20
    while store._abandoned is not None and not store._abandoned.done():
        assert time.monotonic() < until
        time.sleep(0.01)
    store.comm.barrier()
    attempt(4)
    return told


def test_a_disk_that_hangs_fails_the_save_and_not_the_job(tmp_path: Path) -> None:
    found = values(run_ranks(2, _one_hangs, str(tmp_path / "c"), str(tmp_path / "over")))
    for told in found:
        assert told[0] == told[4] == ""
        assert "not saved within 1 s" in told[1]
        assert "an earlier save" in told[2]
        assert float(told[3]) < 5.0
    # What ran over its limit became complete in the end, and harmed nothing.
    assert [c.step for c in examine(tmp_path / "c").complete] == [4, 2, 1]


def _one_stops(rank: int, root: str) -> str:
    """Rank 1 is stopped, main thread and all."""
    from slurm_ft.session.comms.torch_group import TorchComm

    store = CheckpointStore(
        Path(root), TorchComm(2.0), group=dist.new_group(backend="gloo"), limit_s=60.0
    )
    store.start(1, {f"part{rank}": torch.ones(4)})
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    try:
        store.finish()
    except LostPeerError:
        return f"{time.monotonic() - began:.1f}"
    return "saved"


def test_a_rank_that_does_not_answer_is_not_waited_for_beyond_the_limit(tmp_path: Path) -> None:
    first, second = run_ranks(2, _one_stops, str(tmp_path), limit_s=7.0)
    assert second.code == -signal.SIGKILL  # by the test, being stopped for ever
    assert first.code == 0, first.error
    assert float(first.value) < 6.0


def test_damage_is_found_before_anything_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path, keep=3)
    for step in (1, 2):
        store.save(step, {"x": torch.full((100,), float(step))})
    data = tmp_path / "step-000000000002" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1  # same size
    data.write_bytes(content)
    x = torch.zeros(100)
    loaded = open_store(tmp_path).load({"x": x})
    assert loaded is not None
    assert loaded.step == 1
    assert torch.equal(x, torch.ones(100))
    assert "step-000000000002 is damaged" in caplog.text


def test_where_nothing_usable_is_left_a_person_must_decide(tmp_path: Path) -> None:
    open_store(tmp_path).save(1, {"x": torch.ones(1)})
    (tmp_path / "step-000000000001" / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="no usable checkpoint is left"):
        open_store(tmp_path).load({"x": torch.zeros(1)})


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(1, {"x": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"Missing key.*head\.weight"):
        store.load({"x": torch.ones(1), "head.weight": torch.ones(1)})


def test_going_back_to_an_earlier_step_is_not_undone(tmp_path: Path) -> None:
    store = open_store(tmp_path, keep=3)
    for step in (10, 20):
        store.save(step, {"x": torch.full((1,), float(step))})
    back = examine(tmp_path).complete[1]
    x = torch.zeros(1)
    store.load({"x": x}, back)
    store.save(15, {"x": x})
    newest = store.latest()
    assert newest is not None
    assert newest.step == 15
    store.save(20, {"x": x + 1})  # the other step 20 is not overwritten in place
    newest = store.latest()
    assert newest is not None
    assert newest.path.name == "step-000000000020.1"
    assert (tmp_path / LATEST).read_text() == "step-000000000020.1\n"


def test_what_another_user_wrote_is_not_unpickled(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a file away")
    store = open_store(tmp_path)
    store.save(1, {"x": torch.ones(1)})
    inside = tmp_path / "step-000000000001" / ".metadata"
    os.chown(inside, 12345, 12345)
    with pytest.raises(CheckpointError, match="belongs to user 12345"):
        store.load({"x": torch.zeros(1)})
    os.chown(inside, 0, 0)
    inside.chmod(0o664)
    with pytest.raises(CheckpointError, match="may be changed by others"):
        store.load({"x": torch.zeros(1)})


def test_a_quota_keeps_the_last_complete_one(tmp_path: Path) -> None:
    x = torch.zeros(1 << 18)  # 1 MiB
    store = open_store(tmp_path, keep=5, quota_bytes=int(2.5 * x.nbytes))
    for step in (1, 2, 3):
        store.save(step, {"x": x})
    assert [c.step for c in examine(tmp_path).complete] == [3, 2]
    tight = open_store(tmp_path, keep=5, quota_bytes=int(1.5 * x.nbytes))
    with pytest.raises(CheckpointError, match="quota"):
        tight.save(4, {"x": x})
    assert 3 in [c.step for c in examine(tmp_path).complete]
    # A growing state is seen at the commit at the latest.
    grown = open_store(tmp_path, keep=5, quota_bytes=int(3.5 * x.nbytes))
    with pytest.raises(CheckpointError, match="quota"):
        grown.save(5, {"x": torch.zeros(4 << 18)})
    assert 3 in [c.step for c in examine(tmp_path).complete]
    assert examine(tmp_path).unfinished == ()


def test_meta_that_has_no_json_form_fails_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(CheckpointError, match="JSON"):
        store.save(1, {"x": torch.ones(1)}, Meta(extra={"no": {1, 2}, "t": object()}))
    with pytest.raises(CheckpointError, match="JSON"):
        store.save(1, {"x": torch.ones(1)}, Meta(position={"t": object()}))
    assert examine(tmp_path).complete == ()


def test_a_copied_directory_loads(tmp_path: Path) -> None:
    open_store(tmp_path / "a").save(1, {"x": torch.ones(1)})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert open_store(tmp_path / "b").load({"x": torch.zeros(1)}) is not None


def test_several_ranks_need_a_group() -> None:
    class Two(SoloComm):
        size = 2

    with pytest.raises(CheckpointError, match="gloo process group"):
        CheckpointStore(Path("/nowhere"), Two())
