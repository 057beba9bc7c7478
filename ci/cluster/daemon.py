"""The helper daemon in a cluster for people: starter table, acting everywhere, real seconds."""

from __future__ import annotations

import json

from ci.cluster.harness import Cluster
from ci.cluster.spec import DAEMON_USER

CONFIG = "/etc/slurm-ext/config.yaml"
LOG = "/var/log/slurm-ext/daemon.log"
_FOLDERS = ("/etc/slurm-ext", "/var/lib/slurm-ext", "/var/log/slurm-ext", "/run/slurm-ext")
_ACT = ("order", "lease", "resize", "pin")
_START_LIMIT_S = 30.0


def start_daemon(cluster: Cluster) -> None:
    """Start it and wait for its first cycle; the product must be installed."""
    cluster.exec(["install", "-d", "-o", DAEMON_USER, *_FOLDERS])
    values = {"partitions": {name: {"act": _ACT} for name in ("main", "preempt")}, "cycle_s": 1}
    cluster.put(CONFIG, json.dumps(values, indent=1) + "\n")
    cluster.exec(["slurm-ext", "table", "import", "--starter"], user=DAEMON_USER, timeout=120)
    # A session of its own, so that it outlives this command.
    command = f"setsid slurm-ext daemon >>{LOG} 2>&1 </dev/null & echo $! >/run/slurm-ext/pid"
    cluster.exec(["sh", "-c", command], user=DAEMON_USER)
    cluster.wait(
        lambda: cluster.exec(["test", "-e", "/run/slurm-ext/heartbeat"], check=False).rc == 0,
        _START_LIMIT_S,
        f"heartbeat of the daemon (its log: {LOG})",
    )
