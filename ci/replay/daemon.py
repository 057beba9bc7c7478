"""The helper daemon of a replay: its configuration in compressed time, its table, its process.

The daemon lives in real seconds like Slurm does, so the table that it is given is the starter table
with every time divided by the scale; the hidden error of a job is in no file that it can read.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable

from ci.cluster import Cluster, ClusterError
from ci.cluster.daemon import LOG, launch
from ci.replay.options import Variant
from slurm_ext.domain.errors import SlurmExtError
from slurm_ext.estimate.starter import STARTER_FILES, starter_text

# The daemon reacts this fast in real time whatever the scale: faster costs more CPU than it gives.
CYCLE_S = 0.25
# What a site would have (s), before it is divided by the scale.
_LEASE_S = 300.0
_GRACE_S = 5.0
_WAITING_LIMIT_S = 86400.0
# The grace ends at a whole second, so that one of 1 s can be over after a few milliseconds, and it
# costs nothing while the daemon lives, which lifts it: better too long than a job that starts in
# its submitted shape because the machine was busy.
_SHORTEST_GRACE_S = 3
# A lease must outlive its renewal by two cycles.
_SHORTEST_LEASE_S = 5

_THROUGHPUT_COLUMNS = {"throughput": 1, "step_time_s": -1, "sync_time_s": -1}
_COST_COLUMNS = {"seconds": -1}


def grace_s(scale: float) -> int:
    """The submit grace that job_submit.lua gives, in whole seconds."""
    return max(_SHORTEST_GRACE_S, round(_GRACE_S / scale))


def lua_config(scale: float) -> str:
    """/etc/slurm/lua/config.lua of the replay."""
    return f"return {{ submit_grace_s = {grace_s(scale)}, tell_users = false }}\n"


def config(variant: Variant, scale: float) -> str:
    """The daemon's configuration file (JSON is YAML)."""
    act = ["order"] if variant is Variant.ORDER else ["order", "lease", "resize", "pin"]
    values = {
        "policy": "titan",
        "partitions": {"main": {"act": act}},
        "cycle_s": CYCLE_S,
        "lease_s": max(_SHORTEST_LEASE_S, round(_LEASE_S / scale)),
        "grace_s": grace_s(scale),
        "waiting_limit_s": _WAITING_LIMIT_S / scale,
    }
    return json.dumps(values, indent=1) + "\n"


def scaled_csv(text: str, columns: dict[str, int], scale: float) -> str:
    """CSV text with the named columns multiplied by ``scale`` to the given power."""
    reader = csv.DictReader(io.StringIO(text))
    out = io.StringIO()
    writer = csv.DictWriter(out, reader.fieldnames or [], lineterminator="\n")
    writer.writeheader()
    for row in reader:
        for column, power in columns.items():
            if row[column]:
                row[column] = f"{float(row[column]) * scale**power:.9g}"
        writer.writerow(row)
    return out.getvalue()


def tables(scale: float) -> dict[str, str]:
    """File name -> CSV text of the starter table in compressed time."""
    throughput, costs = STARTER_FILES
    return {
        "throughput.csv": scaled_csv(starter_text(throughput), _THROUGHPUT_COLUMNS, scale),
        "costs.csv": scaled_csv(starter_text(costs), _COST_COLUMNS, scale),
    }


def start(cluster: Cluster, variant: Variant, scale: float) -> None:
    """Install the product, give it table and configuration, start it, wait for its first cycle."""
    cluster.install_product()
    imports = []
    for name, text in tables(scale).items():
        cluster.put(f"/tmp/{name}", text)
        imports.append(["--strict", f"/tmp/{name}"])
    try:
        launch(cluster, config(variant, scale), imports)
    except ClusterError as exc:
        raise SlurmExtError(f"the daemon did not start: {exc}\n{log_tail(cluster)}") from exc


def require_alive(cluster: Cluster) -> None:
    """Raise when the daemon has died: the rest of the replay would measure plain Slurm."""
    check = cluster.exec(["sh", "-c", "kill -0 $(cat /run/slurm-ext/pid)"], check=False)
    if check.rc != 0:
        raise SlurmExtError(f"the daemon of {cluster.name} has ended\n{log_tail(cluster)}")


def log_tail(cluster: Cluster, lines: int = 20) -> str:
    """The end of the daemon's log."""
    return cluster.exec(["tail", "-n", str(lines), LOG], check=False).stdout


def warnings(log: str) -> Iterable[str]:
    """Lines of the log that tell of trouble."""
    return (line for line in log.splitlines() if '"error"' in line or '"warning"' in line)
