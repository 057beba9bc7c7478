"""What one cycle of the daemon costs beside a real slurmctld with a long queue.

    python -m tests.bench.control_loop [--jobs 5000] [--cycles 12] [--json FILE]

Starts a containerized cluster, fills it, submits the jobs as ordinary users would, each with
``--ft-*`` options, and lets the daemon's own engine run on the controller: first until everything
is leased and ordered, then for quiet cycles in which nothing changes. Exits with 1 when a target
is missed: a snapshot at least 20 times cheaper than ``squeue --json`` and ``json.loads`` in the
same run; a quiet cycle writes nothing but due lease renewals, at most 5 % of the leased jobs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ci.cluster import DAEMON_USER, Cluster, ClusterSpec

WANTED_RATIO = 20.0
WANTED_SHARE = 0.05
CYCLE_S = 5.0
LEASE_S = 300.0
USERS = ("alice", "bob", "carol")
CONFIG = "/etc/slurm-ext/config.yaml"
FOLDER = "/opt/bench"
INSIDE = Path(__file__).with_name("control_loop_inside.py")
# Each user submits a share of the jobs in one long-lived shell: an exec per job would take minutes.
_SUBMIT = r"""
set -eu
printf '#!/bin/bash\nsleep 600\n' >"$HOME/job.sh"
first=$1 last=$2
for ((i = first; i <= last; i++)); do
    gpus=$((1 << (i / 3 % 3)))
    case $((i % 3)) in
    0) shape="-n $gpus --gpus-per-task=1" ;;
    1) shape="-N1 --ntasks-per-node=1 --gres=gpu:$gpus" ;;
    2) shape="-N1 -n $gpus --gres=gpu:$gpus" ;;
    esac
    sbatch --parsable -o /dev/null -t $((30 + i % 200)) $shape --ft-model=vit-large \
        --ft-samples=$((20000 + 1000 * (i % 97))) --ft-epochs=3 --ft-batch=128 --ft-gpus=1,2,4,8 \
        "$HOME/job.sh" >/dev/null
done
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 only where every target is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=5000, help="pending jobs (%(default)s)")
    parser.add_argument("--cycles", type=int, default=12, help="quiet cycles (%(default)s)")
    parser.add_argument("--settle", type=int, default=60, help="most cycles until quiet")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    if args.jobs < 1 or args.cycles < 1:
        parser.error("--jobs and --cycles must be at least 1")
    with Cluster.start(ClusterSpec(nodes=8, nodes_per_container=8, plugin=True, lua=True)) as own:
        _say(f"cluster {own.name}")
        prepare(own)
        begin = time.monotonic()
        submit(own, args.jobs)
        _say(f"{args.jobs} jobs submitted in {time.monotonic() - begin:.0f} s")
        raw = measure(own, args.cycles, args.settle)
    result = summarise(raw, args.jobs)
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps({**result, "raw": raw}, indent=1) + "\n")
    for miss in result["missed"]:
        print(f"MISSED: {miss}")
    return 1 if result["missed"] else 0


def prepare(cluster: Cluster) -> None:
    """Product, configuration, table, and a job of nobody's concern on every GPU."""
    cluster.install_product()
    folders = ["/etc/slurm-ext", "/var/lib/slurm-ext", "/run/slurm-ext", FOLDER]
    cluster.exec(["install", "-d", "-o", DAEMON_USER, *folders])
    config = {
        "policy": "titan",
        "cycle_s": CYCLE_S,
        "lease_s": LEASE_S,
        "partitions": {"main": {"act": ["order", "lease", "resize", "pin"]}},
    }
    cluster.put(CONFIG, json.dumps(config))
    cluster.exec(["slurm-ext", "table", "import", "--starter"], user=DAEMON_USER, timeout=120)
    cluster.put(f"{FOLDER}/inside.py", INSIDE.read_text())
    blocker = cluster.sbatch("#!/bin/bash\nsleep 7200\n", "-N8", "--gres=gpu:4", "-t", "180")
    cluster.wait_state(blocker, "RUNNING")


def submit(cluster: Cluster, jobs: int) -> None:
    """The jobs, a share from each user, two users at a time."""
    cluster.put(f"{FOLDER}/submit.sh", _SUBMIT)
    step = -(-jobs // len(USERS))
    for number, user in enumerate(USERS):
        first, last = number * step + 1, min(jobs, (number + 1) * step)
        if first <= last:
            argv = ["bash", f"{FOLDER}/submit.sh", str(first), str(last)]
            cluster.exec(argv, user=user, cwd=f"/home/{user}", timeout=1200)
    pending = len(cluster.squeue("%i", "-t", "pending"))
    if pending != jobs:
        raise SystemExit(f"{pending} of {jobs} jobs are pending: the measurement would be another")


def measure(cluster: Cluster, cycles: int, settle: int) -> dict[str, Any]:
    """What the inner half prints."""
    argv = ["python3", f"{FOLDER}/inside.py", CONFIG, str(cycles), str(settle)]
    done = cluster.exec(argv, user=DAEMON_USER, timeout=1200, check=False)
    if done.rc != 0:
        raise SystemExit(f"the inner half failed ({done.rc}):\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def summarise(raw: dict[str, Any], jobs: int) -> dict[str, Any]:
    """Medians over the quiet cycles, the ratio, and what was missed."""
    quiet = raw["quiet"]
    names = ("cycle_s", "snapshot_s", "plan_s", "act_s", "apply_s", "read_back_s", "tell_s")

    def median(name: str) -> float:
        return statistics.median(cycle[name] for cycle in quiet)

    looks = raw["looks"]
    cheap = statistics.median(look["snapshot_s"] for look in looks)
    expensive = statistics.median(look["squeue_s"] + look["loads_s"] for look in looks)
    ratio = expensive / cheap
    missed = []
    if ratio < WANTED_RATIO:
        missed.append(f"a snapshot is {ratio:.1f} times cheaper, wanted {WANTED_RATIO:g}")
    shares = []
    for number, cycle in enumerate(quiet, start=1):
        others = {kind: n for kind, n in cycle["writes"].items() if kind != "lease"}
        if others:
            missed.append(f"quiet cycle {number} wrote {others}")
        if cycle["early_renewals"]:
            missed.append(f"quiet cycle {number} renewed {cycle['early_renewals']} fresh leases")
        if cycle["pending"] != jobs:
            missed.append(f"quiet cycle {number} saw {cycle['pending']} of {jobs} jobs")
        shares.append(cycle["writes"].get("lease", 0) / max(1, cycle["leased"]))
        if shares[-1] > WANTED_SHARE:
            missed.append(f"quiet cycle {number} renewed {shares[-1]:.1%} of the leases")
    largest = max(raw["settling"], key=lambda cycle: sum(cycle["writes"].values()))
    return {
        "jobs": jobs,
        **{name: median(name) for name in names},
        "rpcs": median("rpcs"),
        "rpc_s": median("rpc_s"),
        "look_s": cheap,
        "json_s": expensive,
        "json_bytes": looks[0]["bytes"],
        "snapshot_ratio": ratio,
        "leased": quiet[-1]["leased"],
        "renewed_share_max": max(shares),
        "renewals": [cycle["writes"].get("lease", 0) for cycle in quiet],
        "settling_cycles": len(raw["settling"]),
        "first_cycle_s": raw["settling"][0]["cycle_s"],
        "first_admin_comments_s": raw["settling"][0]["admin_comments_s"],
        "largest_writes": sum(largest["writes"].values()),
        "largest_apply_s": largest["apply_s"],
        "updates": raw["updates"],
        "daemon_rss_mib": raw["daemon_rss_mib"],
        "slurmctld_rss_mib": raw["slurmctld_rss_mib"],
        "rows_from_cache": 1 - raw["rows_parsed"] / raw["rows_read"],
        "missed": missed,
    }


def table(result: dict[str, Any]) -> str:
    """For people."""
    ms = 1000.0
    updates = result["updates"]
    rows = [
        ("pending jobs", f"{result['jobs']}"),
        ("leased", f"{result['leased']}"),
        ("quiet cycle, median", f"{result['cycle_s'] * ms:.0f} ms"),
        ("  snapshot", f"{result['snapshot_s'] * ms:.0f} ms"),
        ("  plan", f"{result['plan_s'] * ms:.0f} ms"),
        ("  act, of which", f"{result['act_s'] * ms:.0f} ms"),
        ("    writing", f"{result['apply_s'] * ms:.0f} ms"),
        ("    reading back", f"{result['read_back_s'] * ms:.0f} ms"),
        ("  documents", f"{result['tell_s'] * ms:.0f} ms"),
        ("slurmctld, RPCs per cycle", f"{result['rpcs']:.0f} in {result['rpc_s'] * ms:.0f} ms"),
        (
            "squeue --json + json.loads",
            f"{result['json_s'] * ms:.0f} ms, {result['json_bytes'] / 1e6:.0f} MB",
        ),
        ("snapshot, in turns with it", f"{result['look_s'] * ms:.0f} ms"),
        ("snapshot cheaper by", f"{result['snapshot_ratio']:.1f} (wanted {WANTED_RATIO:g})"),
        ("renewed per quiet cycle, most", f"{result['renewed_share_max']:.1%} of the leases"),
        ("first cycle", f"{result['first_cycle_s'] * ms:.0f} ms"),
        ("  directives of all jobs", f"{result['first_admin_comments_s'] * ms:.0f} ms"),
        ("cycles until quiet", f"{result['settling_cycles']}"),
        (
            "most writes in one cycle",
            f"{result['largest_writes']} in {result['largest_apply_s'] * ms:.0f} ms",
        ),
        (
            f"{updates['updates']} updates",
            f"{updates['one_process_s'] * ms:.0f} ms in one process, "
            f"{updates['process_each_s'] * ms:.0f} ms in one each",
        ),
        ("rows from the cache", f"{result['rows_from_cache']:.0%}"),
        ("memory of the daemon", f"{result['daemon_rss_mib']:.0f} MiB"),
        ("memory of slurmctld", f"{result['slurmctld_rss_mib'] or 0:.0f} MiB"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
