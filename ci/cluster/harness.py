"""A real Slurm in Docker for tests and demonstrations: start, use, break, mend and remove it.

    with Cluster.start(ClusterSpec(nodes=8)) as cluster:
        job_id = cluster.sbatch("#!/bin/bash\\nsrun hostname\\n", "-N2", user="alice")
        cluster.wait(lambda: cluster.job(job_id)["JobState"] == "COMPLETED", 30, "the job's end")

One controller container (`ctl`: munge, MariaDB, slurmdbd, slurmctld; also the login node) and node
containers (`c1`...), each with several slurmd, on a private network. Everything a cluster makes
carries its label and is removed by `stop()`, which also runs on an exception, on Ctrl-C and at the
interpreter's end. Clusters are independent of each other.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import docker
from docker.errors import APIError, NotFound
from docker.types import EndpointConfig, IPAMConfig, IPAMPool

from ci.cluster import conf, engine, image, ownership, site_parts
from ci.cluster.engine import Completed
from ci.cluster.errors import ClusterError, ClusterTimeoutError, CommandError
from ci.cluster.files import FileSpec, pack, single_file
from ci.cluster.registry import LABEL_NAME, LABEL_OWNER, LABEL_SPEC, remove, running, sweep
from ci.cluster.spec import CONTROLLER, ClusterSpec

# Volumes that every container of a cluster sees, as on a site with a shared file system: suffix ->
# mount point.
_VOLUMES = {
    "etc": "/etc/slurm",
    "home": "/home",
    "spool": "/var/spool/slurm-ext",
}
# slurmd and slurmstepd use namespaces, priorities and ptrace; --privileged is not needed.
_CAPABILITIES = ["SYS_ADMIN", "SYS_NICE", "SYS_PTRACE"]
_READY_LIMIT_S = 90.0
_POLL_S = 0.1
_ENDING_S = 2.0
_NEED_RESUME = ("down", "drain", "fail")
# Once it has read its configuration again, slurmctld runs under the name of Debian's file.
_CONTROLLER_PROCESS = "slurmctld(-wlm)?"
_KEY_VALUE = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_/:]*)=")

Progress = Callable[[str], None]


def _quiet(_: str) -> None:
    """Progress that nobody wants to see."""


def _let_sigterm_unwind() -> None:
    """Make SIGTERM leave through `finally` and atexit like Ctrl-C does, unless it has a handler."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))


class Cluster:
    """A running cluster; make one with `Cluster.start` or find one with `Cluster.attach`."""

    def __init__(self, client: docker.DockerClient, name: str, spec: ClusterSpec) -> None:
        self._client = client
        self.name = name
        self.spec = spec
        self._stopped = False

    # --- life --------------------------------------------------------------------------------

    @classmethod
    def start(
        cls, spec: ClusterSpec | None = None, *, keep: bool = False, progress: Progress = _quiet
    ) -> Cluster:
        """Return a cluster whose nodes are all idle; `keep` leaves it up after this process."""
        spec = spec or ClusterSpec()
        client = engine.connect()
        sweep(client)
        tag = image.ensure_image(client, spec.suite, progress, ranks=spec.ranks)
        name = f"{spec.name_prefix}-{secrets.token_hex(3)}"
        cluster = cls(client, name, spec)
        if not keep:
            _let_sigterm_unwind()
            atexit.register(cluster.stop)
        try:
            progress(f"starting {name}: {spec.nodes} nodes in {len(spec.layout())} containers")
            cluster._create(tag, ownership.KEPT if keep else ownership.this_process())
            cluster.await_ready()
        except BaseException as exc:
            cause = cluster._why_ended() if isinstance(exc, ClusterError | APIError) else None
            cluster.stop()
            if cause is not None:
                raise ClusterError(cause) from exc
            raise
        return cluster

    @classmethod
    def attach(cls, name: str) -> Cluster:
        """Return the running cluster of that name."""
        client = engine.connect()
        try:
            labels = client.containers.get(f"{name}-{CONTROLLER}").labels
        except NotFound as exc:
            known = ", ".join(running(client)) or "none"
            raise ClusterError(f"no cluster is called {name} (running: {known})") from exc
        return cls(client, name, ClusterSpec.from_json(labels[LABEL_SPEC]))

    def stop(self) -> None:
        """Remove every container, volume and network of this cluster; harmless when repeated."""
        if not self._stopped:
            remove(self._client, self.name)
            self._stopped = True
        atexit.unregister(self.stop)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _create(self, tag: str, owner: str) -> None:
        labels = {LABEL_NAME: self.name, LABEL_OWNER: owner}
        hosts = (CONTROLLER, *self.spec.layout())
        network, addresses = self._create_network(labels, hosts)
        for suffix in _VOLUMES:
            self._client.volumes.create(f"{self.name}-{suffix}", labels=labels)
        parts = site_parts.find(self.spec)
        munge_key = secrets.token_bytes(128)
        for host in hosts:
            container = self._create_container(tag, host, network, addresses, labels)
            files = [FileSpec("/etc/munge/munge.key", munge_key, 0o400)]
            if host == CONTROLLER:
                # Docker fills a new volume from the image when its first container is created; that
                # is this one.
                texts = conf.etc_slurm(self.spec, lua=bool(parts.lua))
                files += [FileSpec(f"/etc/slurm/{n}", t.encode()) for n, t in texts.items()]
                files += parts.lua
            container.put_archive("/", pack(files))
        # The plugin is compiled while MariaDB starts, and is there before a slurmd looks for it.
        self._container(CONTROLLER).start()
        site_parts.install_plugin(self, parts)
        self._everywhere(lambda host: self._container(host).start())

    def _create_network(
        self, labels: Mapping[str, str], hosts: Sequence[str]
    ) -> tuple[str, dict[str, str]]:
        """Make the network, with a fixed address for each host, also after a cut."""
        network_name = f"{self.name}-net"
        # Docker accepts fixed addresses only in a subnet that was given; so it chooses one first.
        for _ in range(10):
            probe = self._client.networks.create(f"{network_name}-probe", labels=dict(labels))
            probe.reload()
            subnet = probe.attrs["IPAM"]["Config"][0]["Subnet"]
            probe.remove()
            ipam = IPAMConfig(pool_configs=[IPAMPool(subnet=subnet)])
            try:
                self._client.networks.create(
                    network_name, driver="bridge", ipam=ipam, labels=dict(labels)
                )
            except APIError:
                # Another cluster took the subnet in between.
                continue
            base = ipaddress.ip_network(subnet).network_address
            # .1 is the gateway.
            return network_name, {host: str(base + 2 + i) for i, host in enumerate(hosts)}
        raise ClusterError(f"Docker found no free subnet for {network_name}")

    def _create_container(
        self,
        tag: str,
        host: str,
        network: str,
        addresses: Mapping[str, str],
        labels: Mapping[str, str],
    ) -> Any:
        if host == CONTROLLER:
            command = ["/usr/local/lib/cluster/controller.sh"]
        else:
            nodes = self.spec.layout()[host]
            command = ["/usr/local/lib/cluster/node.sh", str(self.spec.gpus_per_node), *nodes]
        endpoint = EndpointConfig(
            self._client.api._version, ipv4_address=addresses[host], aliases=[host]
        )
        return self._client.containers.create(
            tag,
            command,
            name=f"{self.name}-{host}",
            hostname=host,
            labels={**labels, LABEL_SPEC: self.spec.to_json()},
            network=network,
            networking_config={network: endpoint},
            # Ranks meet at the name that Slurm has for the first node.
            extra_hosts={
                **addresses,
                **{n: addresses[c] for c, nodes in self.spec.layout().items() for n in nodes},
            },
            cap_add=_CAPABILITIES,
            security_opt=["seccomp=unconfined"],
            volumes={
                f"{self.name}-{suffix}": {"bind": target, "mode": "rw"}
                for suffix, target in _VOLUMES.items()
            },
            environment={"TZ": "UTC", "LANG": "C.UTF-8"},
        )

    # --- commands ----------------------------------------------------------------------------

    def exec(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        container: str = CONTROLLER,
        check: bool = True,
        timeout: float = 60.0,
        stdin: str | bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Completed:
        """Run argv as a user; with `check`, a non-zero exit code raises CommandError."""
        done = engine.run_in(
            self._client,
            f"{self.name}-{container}",
            argv,
            user=user,
            stdin=stdin,
            env=env,
            cwd=cwd,
            timeout_s=timeout,
        )
        if check and done.rc != 0:
            where = f"{self.name}-{container} as {user}"
            raise CommandError(argv, where, done.rc, done.stdout, done.stderr)
        return done

    def sbatch(
        self, script: str, *options: str, user: str = "alice", env: Mapping[str, str] | None = None
    ) -> int:
        """Submit a script from the user's home and return the job id."""
        argv = ["sbatch", "--parsable", *options]
        done = self.exec(argv, user=user, stdin=script, env=env, cwd=f"/home/{user}")
        return int(done.stdout.strip().split(";")[0])

    def job(self, job_id: int | str) -> dict[str, str]:
        """The fields of `scontrol show job`, as text; for assertions, never for decisions."""
        done = self.exec(["scontrol", "--oneliner", "--details", "show", "job", str(job_id)])
        return parse_key_values(done.stdout.splitlines()[0])

    def squeue(self, fields: str = "%i|%T|%u|%r", *options: str) -> list[list[str]]:
        """Rows of squeue, split at |; finished jobs are seen with the option --states=all."""
        done = self.exec(["squeue", "--noheader", f"--format={fields}", *options])
        return [line.split("|") for line in done.stdout.splitlines()]

    def accounting(
        self, job_id: int, fields: str = "JobID,State,User,AllocTRES"
    ) -> list[list[str]]:
        """Rows of sacct for the job and its steps."""
        done = self.exec(["sacct", "-nP", "-j", str(job_id), f"--format={fields}"])
        return [line.split("|") for line in done.stdout.splitlines()]

    def node_states(self) -> dict[str, str]:
        done = self.exec(["sinfo", "--noheader", "--Node", "--format=%N|%T"])
        return dict(line.split("|") for line in done.stdout.splitlines())

    def wait(
        self,
        predicate: Callable[[], object],
        limit_s: float,
        what: str,
        *,
        poll_s: float = _POLL_S,
    ) -> None:
        """Return when the predicate is true; after limit_s raise, showing queue and nodes."""
        deadline = time.monotonic() + limit_s
        while not predicate():
            if time.monotonic() > deadline:
                raise ClusterTimeoutError(
                    f"{self.name}: no {what} within {limit_s:g} s\n{self._situation()}"
                )
            time.sleep(poll_s)

    def wait_state(self, job_id: int, *states: str, limit_s: float = 60.0) -> dict[str, str]:
        """Wait until the job is in one of the states and return its fields."""
        seen: dict[str, str] = {}

        def arrived() -> bool:
            seen.clear()
            seen.update(self.job(job_id))
            return seen["JobState"] in states

        self.wait(arrived, limit_s, f"job {job_id} in state {' or '.join(states)}")
        return seen

    def clear(self, limit_s: float = 60.0) -> None:
        """Cancel every job, delete reservations, resume nodes; return when all nodes are idle."""
        # Only the first component of a heterogeneous job can be cancelled by its number.
        rows = self.squeue("%A|%i")
        jobs = sorted({raw for raw, job in rows if "+" not in job or job.endswith("+0")})
        if jobs:
            self.exec(["scancel", *jobs])
        for line in self.exec(["scontrol", "--oneliner", "show", "reservation"]).stdout.split("\n"):
            name = parse_key_values(line).get("ReservationName")
            if name:
                self.exec(["scontrol", "delete", f"ReservationName={name}"])
        self.wait(lambda: not self.squeue("%A"), limit_s, "empty queue")
        # Other states, such as idle* after a restart of slurmctld, mend by themselves.
        ill = [n for n, state in self.node_states().items() if state.startswith(_NEED_RESUME)]
        if ill:
            self.exec(["scontrol", "update", f"NodeName={','.join(ill)}", "State=RESUME"])
        self.wait(self._all_idle, limit_s, "idle nodes")

    # --- files -------------------------------------------------------------------------------

    def put(
        self,
        path: str,
        content: bytes | str,
        *,
        mode: int = 0o644,
        owner: str = "root",
        container: str = CONTROLLER,
    ) -> None:
        """Write a file; its folder must exist."""
        data = content.encode() if isinstance(content, str) else content
        uid, gid = self.ids(owner)
        archive = pack([FileSpec(path, data, mode, uid, gid)])
        self._container(container).put_archive("/", archive)

    def get(self, path: str, *, container: str = CONTROLLER) -> bytes:
        """Read a file; FileNotFoundError when there is none."""
        try:
            chunks, _ = self._container(container).get_archive(path)
        except NotFound as exc:
            raise FileNotFoundError(f"{self.name}-{container}:{path}") from exc
        return single_file(b"".join(chunks))

    def unpack(self, archive: bytes, *, container: str = CONTROLLER, at: str = "/") -> None:
        """Unpack a tar archive."""
        self._container(container).put_archive(at, archive)

    def pack_up(self, path: str, *, container: str = CONTROLLER) -> bytes:
        """A tar archive of a folder, as Docker makes it (the folder's own name is its root)."""
        chunks, _ = self._container(container).get_archive(path)
        return b"".join(chunks)

    def ids(self, user: str) -> tuple[int, int]:
        """uid and gid of a user of the image."""
        if user == "root":
            return 0, 0
        row = self.exec(["getent", "passwd", user]).stdout.split(":")
        return int(row[2]), int(row[3])

    def install_product(self) -> None:
        """Install this repository's Python package in every container; the network is not used."""
        site_parts.install_package(self)

    # --- faults ------------------------------------------------------------------------------

    def kill_node(self, container: str) -> None:
        """Kill everything in a node container at once, like a power cut."""
        self._container(container).kill()

    def start_node(self, container: str) -> None:
        """Start a killed node container again."""
        self._container(container).start()

    def pause_node(self, container: str) -> None:
        """Freeze a container: connections stay open and nothing answers."""
        self._container(container).pause()

    def unpause_node(self, container: str) -> None:
        self._container(container).unpause()

    def cut_off(self, container: str) -> None:
        """Pull a container's network cable; its processes go on."""
        self._client.networks.get(f"{self.name}-net").disconnect(f"{self.name}-{container}")

    def reconnect(self, container: str) -> None:
        """Plug the cable back in, under the same address."""
        target = self._container(container)
        hosts = (CONTROLLER, *self.spec.layout())
        network = self._client.networks.get(f"{self.name}-net")
        subnet = ipaddress.ip_network(network.attrs["IPAM"]["Config"][0]["Subnet"])
        address = str(subnet.network_address + 2 + hosts.index(container))
        network.connect(target, ipv4_address=address, aliases=[container])

    def stop_slurmctld(self, *, kill: bool = False) -> None:
        """End slurmctld, orderly or with SIGKILL, and return when it is gone."""
        if kill:
            self._save_usage()
        signal = "KILL" if kill else "TERM"
        self.exec(["pkill", f"-{signal}", "-x", _CONTROLLER_PROCESS])
        self.wait(
            lambda: self.exec(["pgrep", "-x", _CONTROLLER_PROCESS], check=False).rc != 0,
            60,
            "end of slurmctld",
        )

    def _save_usage(self) -> None:
        """Have the usage of all accounts written: 26.05 does not start on a saved state without it.

        slurmctld writes it every five minutes and when it ends or reads its configuration again,
        so one that is killed younger than that stays down ("No Assoc usage file to recover").
        """
        there = ["test", "-s", f"{conf.STATE}/assoc_usage"]
        if self.exec(there, check=False).rc == 0:
            return
        self.exec(["scontrol", "reconfigure"])
        self.wait(lambda: self.exec(there, check=False).rc == 0, 30, "saved usage of accounts")
        self.wait(self._controller_answers, 60, "answer of slurmctld")

    def start_slurmctld(self) -> None:
        """Start slurmctld and return when it answers."""
        self.exec(["slurmctld"])
        self.wait(self._controller_answers, 60, "answer of slurmctld")

    def restart_slurmctld(self, *, kill: bool = False) -> None:
        self.stop_slurmctld(kill=kill)
        self.start_slurmctld()

    def reconfigure(self, **slurm_conf: Any) -> None:
        """Change keys of slurm.conf on top of the spec and let Slurm read it again."""
        merged = ClusterSpec(
            **{
                **{name: getattr(self.spec, name) for name in ClusterSpec.__dataclass_fields__},
                "slurm_conf": {**self.spec.slurm_conf, **slurm_conf},
            }
        )
        lua = b"JobSubmitPlugins=lua" in self.get("/etc/slurm/slurm.conf")
        self.put("/etc/slurm/slurm.conf", conf.slurm_conf(merged, lua=lua))
        self.exec(["scontrol", "reconfigure"])
        self.spec = merged
        self.wait(self._controller_answers, 60, "answer of slurmctld")

    # --- inside ------------------------------------------------------------------------------

    def await_ready(self, limit_s: float = _READY_LIMIT_S) -> None:
        """Return when slurmctld answers and every node is idle; fail when a container has ended."""

        def ready() -> bool:
            cause = self._ended()
            if cause is not None:
                raise ClusterError(cause)
            return self._controller_answers() and self._all_idle()

        self.wait(ready, limit_s, "idle nodes")

    def logs(self, container: str = CONTROLLER, lines: int = 60) -> str:
        """The last lines of a container's own output and, where it runs, of Slurm's log files."""
        text: str = self._container(container).logs(tail=lines).decode(errors="replace")
        with contextlib.suppress(APIError, ClusterError):
            tail = ["bash", "-c", f"tail -n {lines} /var/log/slurm/*.log"]
            text += self.exec(tail, container=container, check=False).stdout
        return text

    def containers(self) -> tuple[str, ...]:
        """Short names of all containers: ctl, c1, ..."""
        return (CONTROLLER, *self.spec.layout())

    def _ended(self) -> str | None:
        """What the first container that ended by itself said, if any did."""
        for host in self.containers():
            with contextlib.suppress(NotFound):
                if self._container(host).status in {"exited", "dead"}:
                    return f"{self.name}-{host} ended:\n{self.logs(host)}"
        return None

    def _why_ended(self) -> str | None:
        """As _ended, for a failed start: a container that is just ending explains more than a
        command that failed in it, and the engine notes the end a moment later."""
        deadline = time.monotonic() + _ENDING_S
        while (cause := self._ended()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return cause

    def _all_idle(self) -> bool:
        states = self.node_states()
        return len(states) == self.spec.nodes and set(states.values()) == {"idle"}

    def _controller_answers(self) -> bool:
        try:
            ping = self.exec(["scontrol", "ping"], check=False, timeout=10)
        except CommandError:
            # It did not end in time: slurmctld is there and busy, or waits for the accounting.
            return False
        return ping.rc == 0 and "is UP" in ping.stdout

    def _situation(self) -> str:
        """Queue and nodes for an error message; must not raise in place of the first error."""
        try:
            queue = self.exec(["squeue", "-o", "%i %u %T %r %N"], check=False, timeout=10)
            nodes = self.exec(["sinfo", "-N", "-o", "%N %T %E"], check=False, timeout=10)
            return f"{queue.stdout}{queue.stderr}{nodes.stdout}{nodes.stderr}"
        except (ClusterError, APIError) as exc:
            return f"(the controller does not answer: {exc})"

    def _container(self, short_name: str) -> Any:
        return self._client.containers.get(f"{self.name}-{short_name}")

    def _everywhere(self, action: Callable[[str], object]) -> None:
        """Do the same for all containers at once; the first error is raised."""
        with ThreadPoolExecutor(max_workers=8) as pool:
            for _ in pool.map(action, self.containers()):
                pass


def parse_key_values(line: str) -> dict[str, str]:
    """Split `Key=value Key=value` as scontrol prints it; a value reaches to the next key."""
    marks = list(_KEY_VALUE.finditer(line))
    ends = [*(mark.start() for mark in marks[1:]), len(line)]
    # Without any key there is one end too many.
    return {m.group(1): line[m.end() : end].strip() for m, end in zip(marks, ends, strict=False)}
