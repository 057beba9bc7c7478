"""One stage's bytes through a switch: content, order, errors, and the time of two directions."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from slurm_ft.switch.links import EmulatedLink
from slurm_ft.switch.overlap import HostBuffers, StageSwitch, SwitchError
from slurm_ft.switch.pace import OwnPace, SharedPace
from slurm_ft.switch.plan import Block, Mode, Way, cold_plan, plan_stage
from slurm_ft.switch.storages import Held, collect, mark_of, mirror
from slurm_ft.switch.timeline import Kind, Recorder, busy_s

LAYERS = 8


def stage(seed: int, width: int = 64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


def trained(seed: int, width: int = 64) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = stage(seed, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(4, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def contents(held: list[Held]) -> dict[str, Tensor]:
    return {entry.key: entry.bytes.clone() for entry in held}


def facts(held: list[Held], **more: object) -> list[Block]:
    return [Block(entry.key, entry.layer, entry.nbytes, keep=True, **more) for entry in held]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spare", "in_time"), [(0, True), (40_000, True), (10**9, True), (40_000, False)]
)
def test_new_content_is_on_the_device_and_old_content_on_the_host(
    spare: int, in_time: bool
) -> None:
    model, optimizer = trained(1)
    other, other_optimizer = trained(2)
    held = collect(list(model), optimizer)
    wanted = contents(collect(list(other), other_optimizer))
    before = contents(held)
    parameters = list(model.parameters())
    link = EmulatedLink()
    plan = plan_stage(facts(held), spare_bytes=spare)
    early = [move for move in plan.moves if move.way is Way.PREFETCH]
    assert bool(early) == bool(spare)
    saved: dict[str, Tensor] = {}

    def note(twins: Mapping[int, Tensor]) -> None:
        saved.update(mirror(model.state_dict(), twins))

    original = {name: value.clone() for name, value in model.state_dict().items()}
    switch = StageSwitch(plan, held, wanted, link, HostBuffers(link), Recorder(0))
    if in_time:
        switch.prefetch()
    switch.drained(note)
    for layer in range(LAYERS):
        switch.ready(layer)
    assert all(torch.equal(entry.bytes, wanted[entry.key]) for entry in held)
    host = dict(switch.gone())
    assert host.keys() == before.keys()
    assert all(torch.equal(host[key], before[key]) for key in before)
    # The old task's state dictionary, read from its host twins, is what it was.
    assert all(torch.equal(saved[name], original[name]) for name in original)
    # Parameters are the same objects, and compute with the new content.
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    x = torch.randn(3, 64)
    assert torch.equal(model(x), other(x))
    slots = zip(optimizer.state.values(), other_optimizer.state.values(), strict=True)
    assert all(torch.equal(mine[k], theirs[k]) for mine, theirs in slots for k in mine)
    switch.released()


def test_training_goes_on_after_a_switch_as_if_there_had_been_none() -> None:
    model, optimizer = trained(1)
    other, other_optimizer = trained(2)
    held = collect(list(model), optimizer)
    wanted = contents(collect(list(other), other_optimizer))
    link = EmulatedLink()
    plan = plan_stage(facts(held), spare_bytes=30_000)
    switch = StageSwitch(plan, held, wanted, link, HostBuffers(link), Recorder(0))
    switch.prefetch()
    switch.drained()
    switch.all_ready()
    switch.gone()
    for _ in range(3):
        for net, opt in ((model, optimizer), (other, other_optimizer)):
            opt.zero_grad()
            net(torch.ones(4, 64)).square().mean().backward()
            opt.step()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


class Odd(nn.Module):
    """What state hides in: running statistics, dropout, tied weights, a frozen layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        first, last = nn.Linear(16, 16), nn.Linear(16, 16)
        last.weight = first.weight
        still = nn.Linear(16, 16).requires_grad_(False)
        drop = nn.Dropout(0.3)
        self.parts = nn.ModuleList([first, nn.BatchNorm1d(16), drop, still, last])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class OddRun:
    """Momentum or Adam, a schedule, accumulated gradients and bf16, from a seed of its own."""

    def __init__(self, seed: int, adam: bool) -> None:
        self.model = Odd(seed)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer: torch.optim.Optimizer
        if adam:
            self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        else:
            self.optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def steps(self, count: int) -> None:
        for _ in range(count):
            for _ in range(2):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = self.model(torch.randn(8, 16)).float().square().mean()
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()


@pytest.mark.parametrize("adam", [True, False])
@pytest.mark.parametrize("spare", [0, 3000, 10**6])
def test_state_of_every_kind_is_the_new_tasks_after_a_switch(adam: bool, spare: int) -> None:
    """B goes on in A's memory where it stood; training it alone ends in the same bits."""
    alone = OddRun(2, adam)
    torch.manual_seed(50)
    alone.steps(3)
    scheduled, states = alone.schedule.state_dict(), torch.get_rng_state()
    rates = [group["lr"] for group in alone.optimizer.param_groups]
    wanted = contents(collect(list(alone.model.parts), alone.optimizer))
    alone.steps(3)

    here = OddRun(1, adam)
    torch.manual_seed(60)
    here.steps(4)
    held = collect(list(here.model.parts), here.optimizer)
    link = EmulatedLink(piece=100)
    plan = plan_stage(facts(held), spare_bytes=spare)
    switch = StageSwitch(plan, held, wanted, link, HostBuffers(link), Recorder(0))
    switch.prefetch()
    switch.drained()
    switch.all_ready()
    here.schedule.load_state_dict(scheduled)
    for group, rate in zip(here.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    torch.set_rng_state(states)
    here.steps(3)
    there = contents(collect(list(alone.model.parts), alone.optimizer))
    now = contents(collect(list(here.model.parts), here.optimizer))
    assert now.keys() == there.keys()
    assert any("running_mean" in key for key in now)
    assert [key for key in now if not torch.equal(now[key], there[key])] == []


@given(st.integers(1, 70_000), st.data())
def test_a_mark_tells_every_changed_byte(size: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(size)
    content = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    mark = mark_of(content)
    assert mark_of(content.clone()) == mark
    place, by = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 255))
    content[place] += by
    assert mark_of(content) != mark


def test_tied_tensors_move_once_and_stay_tied() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    held = collect([first, second], None)
    assert sorted(entry.key for entry in held) == ["0.bias", "0.weight", "1.bias"]
    wanted = {entry.key: torch.ones(entry.nbytes, dtype=torch.uint8) for entry in held}
    link = EmulatedLink()
    plan = plan_stage(facts(held), spare_bytes=10**6)
    switch = StageSwitch(plan, held, wanted, link, HostBuffers(link), Recorder(0))
    switch.prefetch()
    switch.drained()
    switch.all_ready()
    assert first.weight.data_ptr() == second.weight.data_ptr()


def test_a_frozen_layer_with_the_same_content_does_not_move() -> None:
    model, other = stage(1), stage(2)
    held = collect(list(model), None)
    theirs = {entry.key: entry for entry in collect(list(other), None)}
    with torch.no_grad():
        for mine, frozen in zip(list(model)[:6], list(other)[:6], strict=True):
            frozen.load_state_dict(mine.state_dict())
    blocks = [
        Block(
            entry.key,
            entry.layer,
            entry.nbytes,
            keep=entry.layer >= 6,
            old=entry.digest() if entry.layer < 6 else None,
            new=theirs[entry.key].digest(),
        )
        for entry in held
    ]
    plan = plan_stage(blocks)
    assert {move.block.layer for move in plan.moves if move.comes} == {6, 7}
    assert plan.leaves == plan.comes == sum(e.nbytes for e in held if e.layer >= 6)
    addresses = [entry.bytes.data_ptr() for entry in held]
    recorder = Recorder(0)
    link = EmulatedLink()
    wanted = {key: entry.bytes for key, entry in theirs.items()}
    switch = StageSwitch(plan, held, wanted, link, HostBuffers(link), recorder)
    switch.drained()
    switch.all_ready()
    assert all(torch.equal(entry.bytes, wanted[entry.key]) for entry in held)
    assert [entry.bytes.data_ptr() for entry in held] == addresses
    assert {span.label.split(".")[0] for span in recorder.spans() if span.nbytes} == {"6", "7"}


def test_a_fresh_optimizer_is_cleared_and_not_carried() -> None:
    model, optimizer = trained(1)
    held = collect(list(model), optimizer)
    wanted = contents(collect(list(stage(2)), None))
    blocks = [Block(e.key, e.layer, e.nbytes, keep=True, fresh=e.key not in wanted) for e in held]
    plan = plan_stage(blocks)
    assert plan.comes < plan.leaves
    link = EmulatedLink()
    switch = StageSwitch(plan, held, wanted, link, HostBuffers(link), Recorder(0))
    before = contents(held)
    switch.drained()
    switch.all_ready()
    for entry in held:
        expected = wanted.get(entry.key, torch.zeros_like(entry.bytes))
        assert torch.equal(entry.bytes, expected)
    host = switch.gone()
    assert all(torch.equal(host[key], before[key]) for key in before)


def test_a_mover_that_fails_reaches_everybody_who_waits() -> None:
    class Broken(EmulatedLink):
        def inward(self, device: Tensor, host: Tensor) -> None:
            raise RuntimeError("the link is down")

    model = stage(1)
    held = collect(list(model), None)
    wanted = contents(held)
    switch = StageSwitch(
        plan_stage(facts(held)), held, wanted, Broken(), HostBuffers(Broken()), Recorder(0)
    )
    switch.drained()
    with pytest.raises(SwitchError, match="the link is down"):
        switch.ready(0)
    with pytest.raises(SwitchError, match="the link is down"):
        switch.ready(LAYERS - 1)


def test_a_stuck_mover_is_not_waited_for_beyond_the_limit() -> None:
    link = EmulatedLink(inwards=OwnPace(1.0))
    held = collect(list(stage(1)), None)
    switch = StageSwitch(
        plan_stage(facts(held)), held, contents(held), link, HostBuffers(link), Recorder(0), 0.2
    )
    switch.drained()
    with pytest.raises(SwitchError, match=r"0\.2 s"):
        switch.ready(0)


def test_cold_tasks_and_missing_content_are_refused_with_the_reason() -> None:
    link = EmulatedLink()
    held = collect(list(stage(1)), None)
    cold = cold_plan("only the new task has head")
    with pytest.raises(SwitchError, match="only the new task has head"):
        StageSwitch(cold, held, {}, link, HostBuffers(link), Recorder(0))
    with pytest.raises(SwitchError, match=r"no new content for 0\.bias"):
        StageSwitch(plan_stage(facts(held)), held, {}, link, HostBuffers(link), Recorder(0))


def test_too_little_host_memory_saves_first_and_loads_then() -> None:
    model, other = stage(1), stage(2)
    held = collect(list(model), None)
    wanted = contents(collect(list(other), None))
    plan = plan_stage(facts(held), spare_bytes=10**9, host_bytes=1000)
    assert plan.mode is Mode.SERIAL
    assert "host memory takes 1000" in plan.words
    seen: list[Tensor] = []

    def save(twins: Mapping[int, Tensor]) -> None:
        assert not twins
        seen.extend(value.clone() for value in model.state_dict().values())

    before = [value.clone() for value in model.state_dict().values()]
    link = EmulatedLink()
    switch = StageSwitch(plan, held, wanted, link, HostBuffers(link), Recorder(0))
    switch.prefetch()
    switch.drained(save)
    switch.all_ready()
    assert not switch.gone()
    assert all(torch.equal(a, b) for a, b in zip(seen, before, strict=True))
    assert all(torch.equal(entry.bytes, wanted[entry.key]) for entry in held)


def test_both_directions_go_at_once() -> None:
    """16.8 MB each way at 16 MB/s each: about a second and a block, not two.

    Slow, so that what a busy machine adds is little beside it.
    """
    rate, width = 16e6, 724
    link = EmulatedLink(OwnPace(rate), OwnPace(rate), piece=1 << 18)
    held = collect(list(stage(1, width)), None)
    total = sum(entry.nbytes for entry in held)
    recorder = Recorder(0)
    buffers = HostBuffers(link)
    plan = plan_stage(facts(held))
    buffers.reserve(plan)
    switch = StageSwitch(plan, held, contents(held), link, buffers, recorder)
    start = time.monotonic()
    switch.drained()
    switch.all_ready()
    took = time.monotonic() - start
    alone = total / rate
    assert took < 1.6 * alone
    moves = [span for span in recorder.spans() if span.kind in (Kind.OUT, Kind.IN)]
    both = sum(s.end_s - s.start_s for s in moves) - busy_s(moves, start, start + took)
    assert both > 0.5 * alone, "the two directions hardly overlapped"


def test_a_shared_link_gives_everybody_together_its_rate(tmp_path: Path) -> None:
    paces = [SharedPace(tmp_path / "link", 100e6) for _ in range(2)]
    start = time.monotonic()
    ends = [pace.book(5_000_000) for _ in range(4) for pace in paces]
    # 40 MB in all at 100 MB/s, whoever asks.
    assert ends[-1] - start == pytest.approx(0.4, abs=0.05)
    assert ends == sorted(ends)
    for pace in paces:
        pace.close()


def test_memory_is_let_go_as_soon_as_nobody_needs_it() -> None:
    """The old device memory under prefetched blocks when its content is on the host, the new
    content's host memory when the old one is durable: not at the next switch."""
    held = collect(list(stage(1)), None)
    wanted = contents(collect(list(stage(2)), None))
    link = EmulatedLink()
    switch = StageSwitch(
        plan_stage(facts(held), spare_bytes=10**9),
        held,
        wanted,
        link,
        HostBuffers(link),
        Recorder(0),
    )
    device = [weakref.ref(entry.bytes) for entry in held]
    host = [weakref.ref(value) for value in wanted.values()]
    switch.prefetch()
    switch.drained()
    switch.all_ready()
    switch.gone()
    gc.collect()
    assert not [ref for ref in device if ref() is not None]
    wanted.clear()
    del wanted
    switch.released()
    gc.collect()
    assert not [ref for ref in host if ref() is not None]
