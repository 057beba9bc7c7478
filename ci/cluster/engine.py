"""The connection to Docker, and running a command inside a container.

`docker exec` is done here on a socket of our own instead of through the SDK's `exec_start`: the SDK
reads the HTTP header through a buffered reader and the output through the raw socket below it, so
output that arrives together with the header is silently lost. On a busy machine that turns a job id
into an empty string (docker 7.x; reproducible by delaying the client a little after the request).
It also lets us send stdin and keep a deadline.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlparse

import docker
from docker.errors import DockerException

from ci.cluster.errors import ClusterError, CommandError, DockerMissingError

_DEFAULT_HOST = "unix:///var/run/docker.sock"
# An API call of the engine may wait for disk (removing volumes, copying archives); commands have
# their own limits.
_API_TIMEOUT_S = 120
_STDERR_STREAM = 2
# coreutils' timeout: exit code after TERM, and after KILL.
_TIMED_OUT = frozenset({124, 137})


@dataclass(frozen=True, slots=True)
class Completed:
    """A finished command, like subprocess.CompletedProcess with text output."""

    argv: tuple[str, ...]
    rc: int
    stdout: str
    stderr: str


def connect() -> docker.DockerClient:
    """Return a client whose engine answered, or say how to get one."""
    host = os.environ.get("DOCKER_HOST", _DEFAULT_HOST)
    try:
        client = docker.from_env(timeout=_API_TIMEOUT_S)
        client.ping()
    except DockerException as exc:
        raise DockerMissingError(
            f"no Docker engine answers at {host}: start dockerd (ci/test and ci/demo do so when "
            f"run as root), add your user to the group docker, or set DOCKER_HOST ({exc})"
        ) from exc
    return client


def run_in(
    client: docker.DockerClient,
    container: str,
    argv: Sequence[str],
    *,
    user: str = "root",
    stdin: str | bytes | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    timeout_s: float = 60.0,
) -> Completed:
    """Run argv in a container; a command past its limit is killed and raises CommandError."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    # The engine offers no way to end an exec from outside, so coreutils' timeout does it from
    # inside.
    wrapped = ["timeout", "-k", "2", f"{timeout_s:g}", *argv]
    created = client.api.exec_create(
        container,
        wrapped,
        user=user,
        stdin=data is not None,
        environment=dict(env) if env else None,
        workdir=cwd,
    )
    # Ten seconds above the command's own limit: then the engine itself hangs.
    deadline = time.monotonic() + timeout_s + 10.0
    stdout, stderr = _start(created["Id"], data, deadline)
    rc = _exit_code(client, created["Id"], deadline)
    out, err = stdout.decode(errors="replace"), stderr.decode(errors="replace")
    if rc in _TIMED_OUT and time.monotonic() > deadline - 10.0:
        raise CommandError(argv, container, rc, out, f"{err}\n(killed after {timeout_s:g} s)")
    return Completed(tuple(argv), rc, out, err)


def _exit_code(client: docker.DockerClient, exec_id: str, deadline: float) -> int:
    # The output's end can be seen a moment before the engine has noted the exit.
    while (state := client.api.exec_inspect(exec_id))["Running"] or state["ExitCode"] is None:
        if time.monotonic() > deadline:
            raise ClusterError("the Docker engine did not finish an exec in time")
        time.sleep(0.005)
    return int(state["ExitCode"])


def _dial(timeout_s: float) -> socket.socket:
    url = urlparse(os.environ.get("DOCKER_HOST", _DEFAULT_HOST))
    if url.scheme == "unix":
        conn = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        conn.settimeout(timeout_s)
        conn.connect(url.path)
        return conn
    if url.scheme in {"tcp", "http"} and not os.environ.get("DOCKER_TLS_VERIFY"):
        return socket.create_connection((url.hostname, url.port or 2375), timeout=timeout_s)
    raise ClusterError(f"DOCKER_HOST={url.geturl()}: only unix:// and plain tcp:// are supported")


def _start(exec_id: str, stdin: bytes | None, deadline: float) -> tuple[bytes, bytes]:
    """Start a prepared exec and return its stdout and stderr."""
    body = b'{"Detach": false, "Tty": false}'
    head = (
        f"POST /exec/{exec_id}/start HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\n"
        f"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    streams = {1: bytearray(), _STDERR_STREAM: bytearray()}
    with _dial(timeout_s=10.0) as conn:
        conn.sendall(head.encode() + body)
        received = _Buffer(conn, deadline)
        status = received.until(b"\r\n\r\n")
        if b" 101 " not in status.split(b"\r\n", 1)[0]:
            raise ClusterError(f"the engine refused to start an exec: {status.decode()[:300]}")
        if stdin is not None:
            conn.sendall(stdin)
            conn.shutdown(socket.SHUT_WR)
        # Frames: one byte stream number, three unused, four length (big endian), then that many
        # bytes.
        while header := received.exactly(8, allow_end=True):
            stream, length = struct.unpack(">BxxxL", header)
            streams[stream] += received.exactly(length)
    return bytes(streams[1]), bytes(streams[_STDERR_STREAM])


class _Buffer:
    """Bytes from a socket under one deadline; nothing read is ever dropped."""

    def __init__(self, conn: socket.socket, deadline: float) -> None:
        self._conn = conn
        self._deadline = deadline
        self._data = bytearray()

    def _more(self) -> bool:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise ClusterError("the Docker engine did not finish an exec in time")
        self._conn.settimeout(left)
        try:
            chunk = self._conn.recv(65536)
        except TimeoutError as exc:
            raise ClusterError("the Docker engine did not finish an exec in time") from exc
        self._data += chunk
        return bool(chunk)

    def until(self, mark: bytes) -> bytes:
        while (end := self._data.find(mark)) < 0:
            if not self._more():
                raise ClusterError("the Docker engine closed the connection early")
        return self._take(end + len(mark))

    def exactly(self, count: int, *, allow_end: bool = False) -> bytes:
        while len(self._data) < count:
            if not self._more():
                if allow_end and not self._data:
                    return b""
                raise ClusterError("the Docker engine closed the connection early")
        return self._take(count)

    def _take(self, count: int) -> bytes:
        taken = bytes(self._data[:count])
        del self._data[:count]
        return taken
