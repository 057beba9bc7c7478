"""How long training stands still for a checkpoint, and what three jobs with one backbone store.

    python -m tests.bench.checkpoint [--ranks 2] [--mib 96] [--steps 60] [--pairs 5] [--json FILE]

Real ranks (processes, gloo). A step is emulated: 40 ms of sleep (the accelerator at work), a small
product of matrices, an all-reduce. Per pair, in turns: N steps without a save, N steps with one
asynchronous save that is begun at the fifth and committed when every rank has written, and the same
save made synchronously (digests, fsync and all). The stall is (N steps with - N steps without) /
synchronous save; the median over the pairs counts. Two kinds of state: *sharded* (each rank has its
own part) and *alike* (every rank holds all of it, as in data-parallel training).

Then three jobs whose models share a frozen backbone save three times each into one block store;
what lies on disk afterwards is compared with one copy of the backbone plus the trained parts.

Exits with 1 when a target is missed: stall at most 0.5, disk at most 1.2, every checkpoint loads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slurm_ft.checkpoint.layout import examine
from slurm_ft.checkpoint.store import CheckpointStore
from slurm_ft.session.comms.torch_group import TorchComm, new_gloo_group
from tests.wrappers.ranks import run_ranks, values

WANTED_STALL = 0.5
STRETCH_STALL = 0.25
WANTED_DISK = 1.2
STEP_S = 0.04
MIB = 1 << 20
TENSORS = 24


class _Bench:
    """One rank."""

    def __init__(self, root: Path, mib: int, kind: str) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self.comm = TorchComm(60.0)
        self.store = CheckpointStore(root, self.comm, group=new_gloo_group(), keep=1)
        share = mib // size if kind == "sharded" else mib
        prefix = f"rank{rank}." if kind == "sharded" else ""
        count = share * MIB // 4 // TENSORS
        self.state: dict[str, Any] = {
            f"{prefix}layer{n}": torch.full((count,), float(n)) for n in range(TENSORS)
        }
        self.step = 0
        self.serial = 0

    def steps(self, count: int, save: bool) -> dict[str, float]:
        """Wall time of some steps, and what of it passed inside the store."""
        self.comm.barrier()
        work, inside = torch.randn(128, 128), 0.0
        began = time.monotonic()
        pending = None
        committed = False
        for number in range(count):
            time.sleep(STEP_S)
            work = torch.tanh(work @ work)
            dist.all_reduce(work)
            self.step += 1
            if save and number == 4:
                inside += self._timed(lambda: self.store.start(self._next(), self.state))
            # The same agreement in both kinds of block, begun in one step and read in the next.
            if pending is not None and pending.result() == 0 and save and not committed:
                inside += self._timed(self.store.finish)
                committed = True
            pending = self.comm.start_max(int(number < 4 or not self.store.done()))
        if pending is not None:
            pending.result()
        took = time.monotonic() - began
        return {"took": took, "inside": inside, "in_time": float(committed or not save)}

    def save(self) -> float:
        """Wall time of a synchronous save."""
        self.comm.barrier()
        return self._timed(lambda: self.store.save(self._next(), self.state))

    def _next(self) -> int:
        self.serial += 1
        return self.serial

    @staticmethod
    def _timed(call: Any) -> float:
        began = time.monotonic()
        call()
        return time.monotonic() - began


def _stalls(
    _rank: int, root: str, mib: int, kind: str, count: int, pairs: int
) -> list[dict[str, Any]]:
    bench = _Bench(Path(root), mib, kind)
    bench.steps(10, save=True)  # the first save makes the buffers
    bench.store.finish()
    bench.save()
    found = []
    for _ in range(pairs):
        plain = bench.steps(count, save=False)
        saving = bench.steps(count, save=True)
        bench.store.finish()
        found.append({"plain": plain, "saving": saving, "sync": bench.save()})
    return found


def _measure(kind: str, args: argparse.Namespace, root: Path) -> dict[str, Any]:
    ranks = values(
        run_ranks(
            args.ranks,
            _stalls,
            str(root / kind),
            args.mib,
            kind,
            args.steps,
            args.pairs,
            limit_s=590,
        )
    )
    rows = []
    for number in range(args.pairs):
        each = [rank[number] for rank in ranks]
        plain = max(r["plain"]["took"] for r in each)
        saving = max(r["saving"]["took"] for r in each)
        sync = max(r["sync"] for r in each)
        rows.append(
            {
                "plain_s": plain,
                "saving_s": saving,
                "sync_s": sync,
                "inside_s": max(r["saving"]["inside"] for r in each),
                "stall": (saving - plain) / sync,
                "in_time": all(r["saving"]["in_time"] for r in each),
            }
        )
    return {
        "kind": kind,
        "pairs": rows,
        "stall": statistics.median(row["stall"] for row in rows),
        "inside": statistics.median(row["inside_s"] / row["sync_s"] for row in rows),
        "sync_s": statistics.median(row["sync_s"] for row in rows),
        "in_time": all(row["in_time"] for row in rows),
    }


def _share(_rank: int, root: str, mib: int) -> dict[str, Any]:
    """Three jobs, one after the other."""
    from slurm_ft.session.comms.solo import SoloComm

    rows, width = mib * MIB // 4 // 8 // 1024, 1024
    trained = 0
    loads = True
    for job in range(3):
        torch.manual_seed(0)
        backbone = torch.nn.ModuleList(
            torch.nn.Linear(width, rows, bias=False) for _ in range(8)
        ).requires_grad_(False)
        head = torch.nn.Linear(width, width)
        with torch.no_grad():
            head.weight.fill_(float(job))
        optimizer = torch.optim.AdamW(head.parameters())
        head(torch.ones(1, width)).sum().backward()
        model = torch.nn.ModuleDict({"backbone": backbone, "head": head})
        path = Path(root) / f"job{job}"
        store = CheckpointStore(path, SoloComm(), keep=2, blocks=Path(root) / "blocks")
        for step in range(1, 4):
            optimizer.step()
            store.save(step, {"model": model, "optimizer": optimizer})
        trained += sum(item.manifest.own_bytes for item in examine(path).complete)
        expected = [parameter.clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        store.load({"model": model})
        loads &= all(map(torch.equal, expected, model.parameters()))
    disk = sum(path.stat().st_size for path in Path(root).rglob("*") if path.is_file())
    once = 8 * rows * width * 4
    return {"disk": disk, "backbone": once, "trained": trained, "loads": loads}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 only where every target is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument("--mib", type=int, default=96, help="size of the state (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="steps of a block (%(default)s)")
    parser.add_argument("--pairs", type=int, default=5, help="repetitions (%(default)s)")
    parser.add_argument("--dir", type=Path, help="where to write (a temporary directory)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    failed = []
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        stalls = [_measure(kind, args, Path(name)) for kind in ("sharded", "alike")]
        (share,) = values(
            run_ranks(1, _share, f"{name}/share", args.mib, limit_s=300, distributed=False)
        )
    print(f"{args.ranks} ranks, {args.mib} MiB of state, {args.steps} steps, {args.pairs} pairs")
    print("state     sync save  stall / sync  in the store  per pair")
    for found in stalls:
        each = " ".join(f"{row['stall']:.2f}" for row in found["pairs"])
        print(
            f"{found['kind']:9} {found['sync_s']:8.3f}s  {found['stall']:12.2f}"
            f"  {found['inside']:12.2f}  {each}"
        )
        if not found["in_time"]:
            failed.append(f"{found['kind']}: a save was not over within its block of steps")
        if found["stall"] > WANTED_STALL:
            failed.append(f"{found['kind']}: stall {found['stall']:.2f} > {WANTED_STALL}")
    once = share["backbone"] + share["trained"]
    apart = 3 * 2 * share["backbone"] + share["trained"]  # two checkpoints of each job are kept
    copies = share["disk"] / once
    print(
        f"three jobs: {share['disk'] / MIB:.1f} MiB on disk, {copies:.3f} times a backbone of"
        f" {share['backbone'] / MIB:.1f} MiB and {share['trained'] / MIB:.1f} MiB of trained parts"
        f" (without sharing {apart / once:.2f})"
    )
    if copies > WANTED_DISK:
        failed.append(f"three jobs take {copies:.2f} times one backbone and the trained parts")
    if not share["loads"]:
        failed.append("a checkpoint with shared blocks does not load what was saved")
    if args.json:
        args.json.write_text(json.dumps({"stalls": stalls, "share": share}, indent=1) + "\n")
    for words in failed:
        print(f"MISSED: {words}")
    if not failed:
        stretch = all(found["stall"] <= STRETCH_STALL for found in stalls)
        print("targets met" + (", the stretch target too" if stretch else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
