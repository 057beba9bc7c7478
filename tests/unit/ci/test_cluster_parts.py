"""The parts of the cluster harness that need no Docker: text, files, ownership, exec channel."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ci.cluster import ClusterError, ClusterSpec, conf, engine, files, ownership
from ci.cluster.harness import parse_key_values


def test_nodes_are_dealt_to_containers() -> None:
    spec = ClusterSpec(nodes=5, nodes_per_container=2)
    assert spec.layout() == {"c1": ("n1", "n2"), "c2": ("n3", "n4"), "c3": ("n5",)}


def test_spec_survives_its_label() -> None:
    spec = ClusterSpec(nodes=3, slurm_conf={"PartitionName": ["a Nodes=ALL", "b Nodes=ALL"]})
    assert ClusterSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("field", ["nodes", "nodes_per_container", "cpus_per_node"])
def test_spec_refuses_nonsense(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        ClusterSpec(**{field: 0})


def test_slurm_conf_overrides_replace_drop_and_repeat() -> None:
    spec = ClusterSpec(
        slurm_conf={"KillWait": "1", "JobRequeue": None, "PartitionName": ["a", "b"]}
    )
    lines = conf.slurm_conf(spec, lua=False).splitlines()
    assert "KillWait=1" in lines
    assert not [line for line in lines if line.startswith("JobRequeue=")]
    assert [line for line in lines if line.startswith("PartitionName=")] == [
        "PartitionName=a",
        "PartitionName=b",
    ]


def test_ports_are_unique_within_a_container() -> None:
    lines = conf.slurm_conf(ClusterSpec(nodes=8, nodes_per_container=4), lua=True).splitlines()
    nodes = [
        dict(item.split("=", 1) for item in line.split()) for line in lines if "NodeAddr" in line
    ]
    places = {(node["NodeAddr"], node["Port"]) for node in nodes}
    assert len(nodes) == len(places) == 8


def test_every_node_has_a_tmpfs_of_its_own_which_its_start_makes() -> None:
    lines = conf.slurm_conf(ClusterSpec(), lua=True).splitlines()
    assert f"TmpFS={conf.NODE_TMP}/%n" in lines
    start = (Path(conf.__file__).parent / "image" / "node.sh").read_text()
    assert f'install -d -m 1777 "{conf.NODE_TMP}/$node"' in start


def test_limits_come_with_accruing_age() -> None:
    enforced = conf.slurm_conf(ClusterSpec(limits=True), lua=True)
    assert "AccountingStorageEnforce=associations,limits,qos\n" in enforced
    assert "PriorityFlags=ACCRUE_ALWAYS\n" in enforced
    assert "ACCRUE_ALWAYS" not in conf.slurm_conf(ClusterSpec(), lua=True)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("No reservations in the system", {}),
        ("JobId=7 JobName=a b Comment=", {"JobId": "7", "JobName": "a b", "Comment": ""}),
        ("TRES=cpu=1,mem=2 NumTasks=4", {"TRES": "cpu=1,mem=2", "NumTasks": "4"}),
    ],
)
def test_scontrol_lines(line: str, expected: dict[str, str]) -> None:
    assert parse_key_values(line) == expected


def test_packed_files_are_young(tmp_path: Path) -> None:
    """slurmctld 24.11 crashes on a job_submit.lua whose time is 0, tar's default."""
    archive = tmp_path / "a.tar"
    archive.write_bytes(files.pack([files.FileSpec("/etc/x", b"text", 0o640)]))
    subprocess.run(["tar", "-xf", str(archive), "-C", str(tmp_path)], check=True)
    unpacked = tmp_path / "etc" / "x"
    assert unpacked.read_bytes() == b"text"
    assert unpacked.stat().st_mode & 0o777 == 0o640
    assert abs(unpacked.stat().st_mtime - time.time()) < 600


def test_owner_is_alive_until_it_ends() -> None:
    program = (
        "from ci.cluster import ownership; print(ownership.this_process(), flush=True); input()"
    )
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as process:
        assert process.stdout is not None
        owner = process.stdout.readline().strip()
        assert not ownership.is_dead(owner)
    assert ownership.is_dead(owner)
    assert not ownership.is_dead(ownership.this_process())


@pytest.mark.parametrize("owner", [ownership.KEPT, "", "other-boot:1:2:3"])
def test_unknown_owners_are_left_alone(owner: str) -> None:
    assert not ownership.is_dead(owner)


# --- the exec channel --------------------------------------------------------------------------

HEAD = b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\n\r\n"


def frame(stream: int, data: bytes) -> bytes:
    return struct.pack(">BxxxL", stream, len(data)) + data


@pytest.fixture
def fake_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """An engine that answers one request with given bytes, and may then fall silent."""
    path = tmp_path / "docker.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(1)
    over = threading.Event()

    def serve(first: bytes, second: bytes, *, silent: bool = False) -> None:
        def run() -> None:
            with listener, listener.accept()[0] as conn:
                conn.recv(65536)
                # A client that has read enough, e.g. a refusal, may hang up before the rest.
                with contextlib.suppress(BrokenPipeError):
                    conn.sendall(first)
                    conn.sendall(second)
                if silent:
                    over.wait(10)

        threading.Thread(target=run, daemon=True).start()

    yield serve
    over.set()


def start() -> tuple[bytes, bytes]:
    return engine._start("id", None, time.monotonic() + 5)


def test_output_that_comes_with_the_header_is_kept(fake_engine: Callable[..., None]) -> None:
    """The SDK loses this output, and with it job ids, on a busy machine."""
    fake_engine(HEAD + frame(1, b"job ") + frame(2, b"oops"), frame(1, b"42\n"))
    assert start() == (b"job 42\n", b"oops")


def test_frame_cut_anywhere_is_put_together(fake_engine: Callable[..., None]) -> None:
    whole = HEAD + frame(1, b"x" * 70_000)
    fake_engine(whole[: len(HEAD) + 3], whole[len(HEAD) + 3 :])
    assert start() == (b"x" * 70_000, b"")


def test_connection_lost_inside_a_frame_is_an_error(fake_engine: Callable[..., None]) -> None:
    fake_engine(HEAD, frame(1, b"123456")[:-2])
    with pytest.raises(ClusterError, match="closed the connection early"):
        start()


def test_refusal_is_shown(fake_engine: Callable[..., None]) -> None:
    fake_engine(b"HTTP/1.1 409 Conflict\r\n\r\n", b"")
    with pytest.raises(ClusterError, match="409 Conflict"):
        start()


def test_silent_engine_is_given_up(fake_engine: Callable[..., None]) -> None:
    fake_engine(HEAD, frame(1, b"half"), silent=True)
    with pytest.raises(ClusterError, match="in time"):
        engine._start("id", None, time.monotonic() + 0.2)
