"""What a pipeline switch costs, overlapped against naive, in one run.

    python -m tests.bench.switch [--full] [--json FILE]

Each case runs two tasks one after the other on P ranks, the stages of a pipeline (1F1B of
torch.distributed.pipelining, gloo). Kernels are sleeps, the link between device and host is
emulated with a bandwidth per direction, bytes really move: the device is ordinary memory, what
leaves goes to other memory, and after each switch both sides are compared with what they must be.
The old task is made durable by the checkpoint store (digest, manifest, fsync, rename) below
``--store``, on /dev/shm unless told otherwise: a disk slower than the link would be what is
measured. The clock of a switch stops when the old task's manifest is durable and the new task's
first step is done, for the naive switch too. Its cost is that time minus the two ideal steps.

Units. Two cores that stand for P devices give every event (a kernel's end, a message, a piece
moved, a file hashed) some processor time that a real stage would have to itself. It grows with P
and does not depend on how long a kernel is said to take: at eight stages some 0.13 s of a step, and
half a second of copying, hashing and writing in a switch. That time is the emulation's and not the
switch's, and it is in the naive cost as in the overlapped one, where there is less to hide it. So
one micro-batch takes 40 ms forward and 80 ms backward, long beside an event, and the link is as
slow in proportion: the same units for all numbers of stages, and for both switches. Nothing is
subtracted; what a step took that nothing was moved in is printed beside its ideal length.

Cases: "duplex" (no spare memory), "prefetch" (spare memory for a stage; the load is shorter than
a step), "shared" (three quarters of the layers are a frozen backbone that both tasks have).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from slurm_ft.checkpoint.manifest import Meta
from slurm_ft.checkpoint.store import CheckpointStore
from slurm_ft.session.comms.torch_group import TorchComm
from slurm_ft.switch.links import EmulatedLink
from slurm_ft.switch.naive import switch_naively
from slurm_ft.switch.overlap import HostBuffers, StageSwitch
from slurm_ft.switch.pace import OwnPace
from slurm_ft.switch.plan import Block, plan_stage
from slurm_ft.switch.storages import Held, collect, mirror
from slurm_ft.switch.timeline import Kind, Recorder, Timeline, busy_s

WIDTH = 64
# Above this, what the emulation takes for itself is no longer small beside what it measures.
BUSY = 1.2
# A process that hangs must not hang the benchmark.
RUN_LIMIT_S = 180.0
# The link is slow enough for its time to count beside hashing and writing on two cores, which are
# the same bytes in both switches; a load shorter than a step is what prefetching wants.
STAGE_BYTES, LONG_LOAD_S, SHORT_LOAD_S = 32 << 20, 1.6, 0.7
FORWARD_S, BACKWARD_S, MICRO_BATCHES = 0.04, 0.08, 8
DUPLEX_WANTED, PREFETCH_WANTED, PREFETCH_STRETCH, SHARED_WANTED = 1.6, 3.0, 5.0, 0.8


@dataclass(frozen=True)
class Case:
    """One configuration. Bytes per stage; bytes per second and direction; seconds."""

    stages: int
    stage_bytes: int
    rate: float
    forward_s: float
    backward_s: float
    micro_batches: int
    layers: int = 16
    spare_bytes: int = 0
    shared_layers: int = 0
    how: str = "overlapped"

    @property
    def ideal_step_s(self) -> float:
        pairs = self.micro_batches + self.stages - 1
        return pairs * (self.forward_s + self.backward_s)


class Work(torch.autograd.Function):
    """A kernel that takes so long forward, and so long backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class Layer(nn.Module):
    """Parameters to move, and time to spend. ``gate`` is what a switch makes the layer wait for."""

    def __init__(self, nbytes: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.rand(nbytes // 4, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        # Reading a little of what was moved makes the output depend on the right task.
        return x + self.weight[:WIDTH]


class Stage(nn.Module):
    def __init__(self, case: Case, seed: int) -> None:
        super().__init__()
        size = case.stage_bytes // case.layers
        shared = range(case.shared_layers)
        self.layers = nn.ModuleList(
            Layer(size, layer if layer in shared else seed + layer) for layer in range(case.layers)
        )
        self.case = case
        self.gate: Any = lambda layer: None

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            self.gate(index)
            x = layer(x)
        return Work.apply(x, self.case.forward_s, self.case.backward_s)  # type: ignore[no-any-return]


def _rank(rank: int, case: Case, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=case.stages
    )
    comm = TorchComm(60.0)
    # The saving thread has an exchange of its own: the loop's order of calls is not its.
    saving = TorchComm(60.0)
    store = CheckpointStore(
        Path(folder) / "store", saving, group=dist.new_group(backend="gloo"), keep=1
    )
    outcome = _switch(rank, case, comm, store)
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(outcome))
    comm.barrier()
    dist.destroy_process_group()


def _schedule(case: Case, rank: int, stage: Stage) -> Any:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    example = torch.zeros(1, WIDTH)
    piped = PipelineStage(
        stage,
        rank,
        case.stages,
        torch.device("cpu"),
        input_args=(example.requires_grad_(rank > 0),),
        output_args=(torch.zeros(1, WIDTH, requires_grad=True),),
    )
    return Schedule1F1B(piped, case.micro_batches, loss_fn=lambda y, t: (y - t).square().mean())


def _step(case: Case, rank: int, schedule: Any) -> None:
    rows = case.micro_batches
    inputs = (torch.zeros(rows, WIDTH),) if rank == 0 else ()
    if rank == case.stages - 1:
        schedule.step(*inputs, target=torch.zeros(rows, WIDTH), losses=[])
    else:
        schedule.step(*inputs)


def _blocks(case: Case, held: list[Held]) -> list[Block]:
    made = []
    for entry in held:
        shared = entry.layer < case.shared_layers
        same = entry.digest() if shared else None
        made.append(Block(entry.key, entry.layer, entry.nbytes, not shared, same, same))
    return made


def _switch(rank: int, case: Case, comm: TorchComm, store: CheckpointStore) -> dict[str, Any]:
    stage = Stage(case, 1000 * rank + 100)
    following = Stage(case, 1000 * rank + 500)
    held = collect(list(stage.layers), None)
    incoming = {e.key: e.bytes for e in collect(list(following.layers), None)}
    before = {e.key: e.digest() for e in held}
    link = EmulatedLink(OwnPace(case.rate), OwnPace(case.rate))
    buffers = HostBuffers(link)
    plan = plan_stage(_blocks(case, held), spare_bytes=case.spare_bytes)
    buffers.reserve(plan)
    recorder = Recorder(rank)
    schedule = _schedule(case, rank, stage)
    _step(case, rank, schedule)  # the schedule's first step makes its buffers
    old = {f"stage{rank}": dict(stage.state_dict())}
    durable: dict[str, Any] = {}

    def save(state: Mapping[str, Any]) -> None:
        store.save(1, state, Meta())
        durable["at"] = time.monotonic()
        durable["host"] = state

    comm.barrier()
    start = time.monotonic()
    switch = None
    if case.how == "overlapped":
        switch = StageSwitch(plan, held, incoming, link, buffers, recorder)
        switch.prefetch()
    with recorder.span(Kind.COMPUTE, label="old"):
        _step(case, rank, schedule)
    drained = time.monotonic()
    saver = None
    if switch is not None:
        moving = switch

        def durably() -> None:
            moving.gone()
            with recorder.span(Kind.SAVE, plan.leaves):
                save(durable.pop("state"))

        switch.drained(lambda twins: durable.update(state=mirror(old, twins)))
        stage.gate = switch.ready
        saver = threading.Thread(target=durably)
        saver.start()
    else:
        groups: list[Any] = []
        switch_naively(
            plan,
            held,
            incoming,
            link,
            buffers,
            recorder,
            comm,
            lambda twins: save(mirror(old, twins)),
            lambda: groups.append(dist.new_group(backend="gloo")),
        )
    with recorder.span(Kind.COMPUTE, label="new"):
        _step(case, rank, schedule)
    first = time.monotonic()
    if saver is not None:
        saver.join()
    wrong = [e.key for e in held if not torch.equal(e.bytes, incoming[e.key])]
    wrong += _not_kept(held, before, durable["host"], rank)
    return {
        "start": start,
        "drained": drained,
        "durable": durable["at"],
        "first": first,
        "wrong": wrong,
        "out": plan.leaves,
        "in": plan.comes,
        "spans": [asdict(span) for span in recorder.spans()],
    }


def _not_kept(
    held: list[Held], before: Mapping[str, str], state: Mapping[str, Any], rank: int
) -> list[str]:
    """Blocks whose old content is not what was saved."""
    wrong = []
    for entry in held:
        layer = entry.key.split(".")[0]
        saved = state[f"stage{rank}"][f"layers.{layer}.weight"]
        if Held(entry.key, entry.layer, saved).digest() != before[entry.key]:
            wrong.append(f"old {entry.key}")
    return wrong


def run(case: Case, folder: Path) -> tuple[Timeline, dict[str, Any]]:
    """One switch; its time line, and the cost with what it was made of."""
    place = Path(tempfile.mkdtemp(prefix="switch-", dir=folder))
    try:
        context = mp.start_processes(  # type: ignore[no-untyped-call]
            _rank,
            args=(case, _free_port(), str(place)),
            nprocs=case.stages,
            join=False,
            start_method="fork",
        )
        deadline = time.monotonic() + RUN_LIMIT_S
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{case}: not over within {RUN_LIMIT_S:g} s")
        ranks = [json.loads((place / f"rank-{r}.json").read_text()) for r in range(case.stages)]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    wrong = [key for row in ranks for key in row["wrong"]]
    if wrong:
        raise AssertionError(f"{case}: wrong content after the switch: {wrong[:5]}")
    origin = min(row["start"] for row in ranks)
    from slurm_ft.switch.timeline import Span, shifted

    spans = [
        Span(s["stage"], Kind(s["kind"]), s["start_s"], s["end_s"], s["nbytes"], s["label"])
        for row in ranks
        for s in row["spans"]
    ]
    record = Timeline(
        case.how,
        case.stages,
        tuple(shifted(spans, origin)),
        last_step_s=max(row["drained"] for row in ranks) - origin,
        durable_s=max(row["durable"] for row in ranks) - origin,
        first_step_s=max(row["first"] for row in ranks) - origin,
    )
    return record, {
        "cost_s": record.end_s - 2 * case.ideal_step_s,
        "first_step_cost_s": record.first_step_s - 2 * case.ideal_step_s,
        "out": sum(row["out"] for row in ranks),
        "in": sum(row["in"] for row in ranks),
    }


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def compare(label: str, case: Case, repeats: int, folder: Path) -> dict[str, Any]:
    """Naive and overlapped in turn; the ratio of the median costs."""
    costs: dict[str, list[dict[str, Any]]] = {"naive": [], "overlapped": []}
    lines: dict[str, Timeline] = {}
    plain = []
    for _ in range(repeats):
        for how in costs:
            lines[how], facts = run(replace(case, how=how), folder)
            costs[how].append(facts)
        # Nothing moves while the naive switch's old task makes its last step.
        plain.append(lines["naive"].last_step_s)
    median = {
        how: statistics.median(fact["cost_s"] for fact in facts) for how, facts in costs.items()
    }
    row = {
        "case": label,
        **{key: value for key, value in asdict(case).items() if key != "how"},
        "ideal_step_s": case.ideal_step_s,
        "plain_step_s": statistics.median(plain),
        "load_s": case.stage_bytes / case.rate,
        "naive_s": median["naive"],
        "overlapped_s": median["overlapped"],
        "ratio": median["naive"] / max(median["overlapped"], 1e-9),
        "all_costs": {how: [fact["cost_s"] for fact in facts] for how, facts in costs.items()},
        "bytes": {how: (facts[0]["out"], facts[0]["in"]) for how, facts in costs.items()},
        "timelines": {how: json.loads(line.to_json()) for how, line in lines.items()},
    }
    print(
        f"{label:10} P={case.stages} {case.stage_bytes / 1e6:.0f} MB/stage at"
        f" {case.rate / 1e6:.0f} MB/s  f={case.forward_s * 1e3:.0f}"
        f" b={case.backward_s * 1e3:.0f} ms M={case.micro_batches} K={case.layers}"
        f"  out {row['bytes']['overlapped'][0] / 1e6:.0f} MB"
        f" in {row['bytes']['overlapped'][1] / 1e6:.0f} MB  step {case.ideal_step_s:.2f} s"
        f" (took {row['plain_step_s']:.2f} s)"
        f"  naive {median['naive']:.3f} s overlapped {median['overlapped']:.3f} s"
        f"  ratio {row['ratio']:.2f}",
        flush=True,
    )
    for how, line in lines.items():
        _print_times(how, line)
    return row


def _print_times(how: str, line: Timeline) -> None:
    for stage in range(line.stages):
        mine = [span for span in line.spans if span.stage == stage]
        parts = [
            f"{kind.value} {busy_s((s for s in mine if s.kind is kind), 0, line.end_s):.2f}"
            for kind in Kind
        ]
        idle = line.end_s - busy_s((s for s in mine if s.kind is not Kind.WAIT), 0, line.end_s)
        print(
            f"    {how:10} stage {stage}: {', '.join(parts)}, idle {idle:.2f} of {line.end_s:.2f} s"
        )


def _as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """One row a line, in tenths of a millisecond: time lines are long."""

    def short(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: short(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [short(item) for item in value]
        return round(value, 4) if isinstance(value, float) else value

    lines = ",\n".join(json.dumps(short(row), separators=(",", ":")) for row in rows)
    return f'{{"rows":[\n{lines}\n]}}\n'


def main(argv: list[str] | None = None) -> int:
    """Run the cases and check the ratios."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.switch", description=__doc__)
    parser.add_argument("--full", action="store_true", help="2, 4 and 8 stages, three repeats")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--store", type=Path, default=Path("/dev/shm"), help="durable storage")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--stages", type=int, nargs="+", metavar="P")
    args = parser.parse_args(argv)
    repeats = args.repeats or (3 if args.full else 1)
    stages = args.stages or ((2, 4, 8) if args.full else (2, 4))
    rows = []
    for count in stages:
        base = Case(
            count, STAGE_BYTES, STAGE_BYTES / LONG_LOAD_S, FORWARD_S, BACKWARD_S, MICRO_BATCHES
        )
        quick = replace(base, rate=STAGE_BYTES / SHORT_LOAD_S, spare_bytes=STAGE_BYTES)
        rows.append(compare("duplex", base, repeats, args.store))
        rows.append(compare("prefetch", quick, repeats, args.store))
        rows.append(compare("shared", replace(base, shared_layers=12), repeats, args.store))
    failed = _judge(rows)
    if args.json:
        args.json.write_text(_as_text(rows), encoding="utf-8")
    return 1 if failed else 0


def _judge(rows: list[dict[str, Any]]) -> list[str]:
    failed = []
    busy = max(row["plain_step_s"] / row["ideal_step_s"] for row in rows)
    if busy > BUSY:
        print(f"this machine is busy: steps without a switch take {busy:.2f} times their length")
    duplex = {row["stages"]: row for row in rows if row["case"] == "duplex"}
    for row in rows:
        wanted = {"duplex": DUPLEX_WANTED, "prefetch": PREFETCH_WANTED}.get(row["case"])
        value = row["ratio"]
        if row["case"] == "shared":
            whole = duplex[row["stages"]]
            of_bytes = sum(whole["bytes"]["naive"]) / sum(row["bytes"]["overlapped"])
            value = whole["naive_s"] / row["overlapped_s"]
            wanted = SHARED_WANTED * of_bytes
        ok = value >= (wanted or 0.0)
        verdict = "ok" if ok else "MISSED"
        print(f"{row['case']:10} P={row['stages']}: {value:.2f}, wanted {wanted:.2f}: {verdict}")
        if not ok:
            failed.append(f"{row['case']} P={row['stages']}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
