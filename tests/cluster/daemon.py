"""A slurm-ext daemon inside a cluster, started, killed and made to stumble by tests."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ci.cluster import DAEMON_USER, Cluster

HOME = "/var/lib/slurm-ext"
SPOOL = "/var/spool/slurm-ext"
WORK = "/tmp/slurm-ext-test"
CONFIG = f"{WORK}/config.yaml"
TABLE = f"{WORK}/table.sqlite"
LOG = f"{WORK}/log"
MODE = f"{WORK}/mode"

# A daemon that does something in the middle of a cycle: dies, or runs a command, at the first time
# that it enters a stage, or is about to write an action of a kind ("write:shape"). Only the stage
# hook and the door to Slurm differ from the product.
ENTRY = """
import argparse, contextlib, os, signal, subprocess, sys
from pathlib import Path
from slurm_ext.cli import daemon
from slurm_ext.cli.backend import open_backend
from slurm_ext.control.config import load_config
from slurm_ext.control.cycle import Engine
from slurm_ext.control.logs import setup_logging

CONFIG, WHERE, COMMAND = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
armed = True

def stumble(where):
    global armed
    if where != WHERE or not armed:
        return
    armed = False
    if not COMMAND:
        os.kill(os.getpid(), signal.SIGKILL)
    subprocess.run(["sh", "-c", COMMAND], check=True, timeout=60)

class Faulty(Engine):
    @contextlib.contextmanager
    def _stage(self, name):
        stumble(name)
        with super()._stage(name):
            yield

class Door:
    def __init__(self, backend):
        self._backend = backend
    def __getattr__(self, name):
        return getattr(self._backend, name)
    def apply(self, actions):
        for kind in dict.fromkeys(action.kind.value for action in actions):
            stumble(f"write:{kind}")
        return self._backend.apply(actions)

config = load_config(CONFIG)
setup_logging(config.log_level)
args = argparse.Namespace(once=False, observe=False)
engine = Faulty(config, Door(open_backend(config)))
sys.exit(daemon.serve(engine, lambda: load_config(CONFIG), lambda config: None, args))
"""
# Stands before the real squeue in the daemon's PATH, and does what the file says.
SQUEUE = f"""#!/bin/sh
case "$(cat {MODE})" in
hang) exec sleep 300 ;;
fail) echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1 ;;
cut) /usr/bin/squeue "$@" | head -c 400; exit 0 ;;
cut-rows) /usr/bin/squeue "$@" | head -n 2; exit 0 ;;
esac
exec /usr/bin/squeue "$@"
"""


@dataclass(slots=True)
class Daemon:
    """The daemon of one cluster. Not started until `start`."""

    cluster: Cluster
    pid: int = 0
    keys: dict[str, Any] = field(default_factory=dict)

    def prepare(self, **keys: Any) -> None:
        """A fresh state: configuration, table, empty journal and spool."""
        self.keys = {
            "cycle_s": 0.5,
            "lease_s": 30,
            "command_timeout_s": 5,
            "heartbeat": f"{HOME}/heartbeat",
            "table": TABLE,
            "table_every_s": 1,
            "partitions": {"main": {"act": ["order", "lease", "resize", "pin"]}},
            **keys,
        }
        # As root: users own their parts of the spool.
        self.cluster.exec(["sh", "-c", f"rm -rf {HOME}/* {SPOOL}/plans {SPOOL}/[0-9]*"])
        self.sh(f"mkdir -p {WORK}/bin; : >{LOG}; echo ok >{MODE}")
        self.put(CONFIG, json.dumps(self.keys))
        self.sh(f"test -e {TABLE} || slurm-ext table import --starter --config {CONFIG}")
        self.put(f"{WORK}/faulty.py", ENTRY)
        self.put(f"{WORK}/bin/squeue", SQUEUE, mode=0o755)

    def put(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file of the daemon's user."""
        self.cluster.put(path, text, mode=mode, owner=DAEMON_USER)

    def sh(self, script: str, **options: Any) -> str:
        """Run a shell script as the daemon's user."""
        done = self.cluster.exec(["sh", "-c", script], user=DAEMON_USER, **options)
        return str(done.stdout)

    # -- life ------------------------------------------------------------------------------------

    def start(self, *, path: str = "") -> None:
        """Start the daemon as installed; ``path`` goes before its PATH."""
        before = f"PATH={path}:$PATH " if path else ""
        self._launch(f"{before}exec slurm-ext daemon --config {CONFIG}")

    def start_faulty(self, where: str, *, command: str = "") -> None:
        """Start a daemon that dies at a stage or write, or runs ``command`` there and goes on."""
        # Quoted by JSON: a valid shell double-quoted word for the simple commands of these tests.
        self._launch(f"exec python3 {WORK}/faulty.py {CONFIG} {where} {json.dumps(command)}")

    def _launch(self, command: str) -> None:
        out = self.sh(f"setsid sh -c '{command}' >>{LOG} 2>&1 </dev/null & echo $!")
        self.pid = int(out)

    @property
    def alive(self) -> bool:
        """Whether the process runs; a zombie does not."""
        state = self.sh(f"cut -d' ' -f3 /proc/{self.pid}/stat 2>/dev/null || true").strip()
        return state not in ("", "Z")

    def signal(self, name: str) -> None:
        """Send a signal."""
        self.sh(f"kill -{name} {self.pid}")

    def wait_end(self, limit_s: float = 30.0) -> None:
        """Wait until the process has ended."""
        self.cluster.wait(lambda: not self.alive, limit_s, "end of the daemon")

    def stop(self, name: str = "TERM") -> None:
        """End the daemon; no error where it does not run."""
        if self.pid and self.alive:
            self.signal(name)
            self.wait_end()

    # -- what it did -----------------------------------------------------------------------------

    def log(self) -> list[dict[str, Any]]:
        """The log lines."""
        text = self.sh(f"cat {LOG}")
        lines = []
        for line in text.splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError as exc:
                raise AssertionError(
                    f"the daemon printed something that is no log line:\n{text}"
                ) from exc
        return lines

    def logged(self, words: str) -> int:
        """How many log lines contain these words."""
        return sum(words in json.dumps(line) for line in self.log())

    def beat(self) -> dict[str, Any]:
        """The last heartbeat, empty where there is none."""
        text = self.sh(f"cat {HOME}/heartbeat 2>/dev/null || true")
        return json.loads(text) if text else {}

    def wait_cycles(self, number: int = 2, limit_s: float = 30.0) -> None:
        """Wait until so many further cycles have completed."""
        before = self.beat().get("cycle", 0)
        self.cluster.wait(
            lambda: self.beat().get("cycle", 0) >= before + number, limit_s, f"{number} cycles"
        )

    def ours(self) -> dict[str, dict[str, Any]]:
        """The ledger, by job id."""
        # Read-only: opening must not create the file that the daemon is about to make.
        script = (
            "import sqlite3, sys; db = sqlite3.connect(f'file:{sys.argv[1]}?mode=ro', uri=True);"
            " print(chr(10).join(j + chr(9) + e for j, e in db.execute('SELECT * FROM ledger')))"
        )
        done = self.cluster.exec(
            ["python3", "-c", script, f"{HOME}/journal.sqlite"], user=DAEMON_USER, check=False
        )
        rows = (line.split("\t", 1) for line in done.stdout.splitlines() if line)
        return {job: json.loads(entry) for job, entry in rows}
