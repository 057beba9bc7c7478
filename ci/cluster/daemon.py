"""The helper daemon in a cluster: how it is launched, and one for people to try.

That one has the starter table, acts in two partitions and lives in real seconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ci.cluster.harness import Cluster
from ci.cluster.spec import DAEMON_USER

CONFIG = "/etc/slurm-ext/config.yaml"
LOG = "/var/log/slurm-ext/daemon.log"
_FOLDERS = ("/etc/slurm-ext", "/var/lib/slurm-ext", "/var/log/slurm-ext", "/run/slurm-ext")
_ACT = ("order", "lease", "resize", "pin")
_START_LIMIT_S = 30.0


def start_daemon(cluster: Cluster) -> None:
    """Start the one for people; the product must be installed."""
    values = {"partitions": {name: {"act": _ACT} for name in ("main", "preempt")}, "cycle_s": 1}
    launch(cluster, json.dumps(values, indent=1) + "\n", [["--starter"]])


def launch(cluster: Cluster, config: str, tables: Sequence[Sequence[str]]) -> None:
    """Start a daemon and wait for its first cycle.

    ``tables`` are the arguments of one ``table import`` each. Raises ClusterError where the
    daemon does not come to a cycle in time.
    """
    cluster.exec(["install", "-d", "-o", DAEMON_USER, *_FOLDERS])
    cluster.put(CONFIG, config)
    for words in tables:
        cluster.exec(["slurm-ext", "table", "import", *words], user=DAEMON_USER, timeout=120)
    # A session of its own, so that it outlives this command and whoever starts it.
    command = f"setsid slurm-ext daemon >>{LOG} 2>&1 </dev/null & echo $! >/run/slurm-ext/pid"
    cluster.exec(["sh", "-c", command], user=DAEMON_USER)
    cluster.wait(
        lambda: cluster.exec(["test", "-e", "/run/slurm-ext/heartbeat"], check=False).rc == 0,
        _START_LIMIT_S,
        f"heartbeat of the daemon (its log: {LOG})",
    )
