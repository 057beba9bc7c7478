"""The cluster's Docker images: built once per content of `image/`, then found by their tags.

There are two: Slurm alone, and on top of it torch and MPI for clusters whose jobs really train.

The base is a local `debian:SUITE-slim` where there is one, else a pull, else debootstrap (root
only; some 40 s): a machine without a registry but with Debian's package mirror can do everything.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
from docker.errors import APIError, ImageNotFound

from ci.cluster.errors import ImageError

REPOSITORY = "slurm-ext-cluster"
LABEL = "slurm-ext.cluster.image"
_CONTEXT = Path(__file__).parent / "image"
_RANKS_CONTEXT = _CONTEXT / "ranks"
_DEBOOTSTRAP_LIMIT_S = 900
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy")

Progress = Callable[[str], None]


def tag_of(suite: str, *, ranks: bool = False) -> str:
    """The image's name; it changes whenever a file of its build context does."""
    digest = hashlib.sha256(suite.encode())
    for context in (_CONTEXT, _RANKS_CONTEXT) if ranks else (_CONTEXT,):
        for path in sorted(path for path in context.iterdir() if path.is_file()):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{REPOSITORY}:{suite}{'-ranks' if ranks else ''}-{digest.hexdigest()[:12]}"


def ensure_image(
    client: docker.DockerClient,
    suite: str,
    progress: Progress = lambda _: None,
    *,
    ranks: bool = False,
) -> str:
    """Return the image's tag, building it when needed; two processes never build at once.

    ``ranks``: with torch and MPI.
    """
    tag = tag_of(suite, ranks=ranks)
    base = tag_of(suite)
    with _one_builder():
        if _exists(client, tag):
            return tag
        if not _exists(client, base):
            _ensure_base(client, suite, progress)
            _build(client, base, suite, _CONTEXT, {"SUITE": suite}, progress)
        if ranks:
            _build(client, tag, suite, _RANKS_CONTEXT, {"BASE": base}, progress)
    return tag


@contextmanager
def _one_builder() -> Iterator[None]:
    path = Path(tempfile.gettempdir()) / f"slurm-ext-cluster-image-{os.getuid()}.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _exists(client: docker.DockerClient, tag: str) -> bool:
    try:
        client.images.get(tag)
    except ImageNotFound:
        return False
    return True


def _ensure_base(client: docker.DockerClient, suite: str, progress: Progress) -> None:
    base = f"debian:{suite}-slim"
    if _exists(client, base):
        return
    progress(f"pulling {base}")
    try:
        client.images.pull("debian", f"{suite}-slim")
        return
    except (APIError, ImageNotFound) as exc:
        reason = str(exc)
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise ImageError(
            f"{base} can be neither pulled ({reason}) nor made here, which needs root and "
            f"debootstrap: `apt-get install debootstrap` and start again as root, or load {base} "
            f"into Docker"
        )
    progress(f"no registry; making {base} with debootstrap")
    with tempfile.TemporaryDirectory(prefix="slurm-ext-base-") as folder:
        root = Path(folder) / "root"
        made = subprocess.run(
            ["debootstrap", "--variant=minbase", suite, str(root)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DEBOOTSTRAP_LIMIT_S,
            check=False,
        )
        if made.returncode != 0:
            raise ImageError(f"debootstrap {suite} failed:\n{(made.stdout + made.stderr)[-2000:]}")
        archive = Path(folder) / "base.tar"
        subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True)
        client.api.import_image_from_file(str(archive), repository="debian", tag=f"{suite}-slim")


def _build(
    client: docker.DockerClient,
    tag: str,
    suite: str,
    context: Path,
    arguments: dict[str, str],
    progress: Progress,
) -> None:
    progress(f"building {tag} (once; half a minute to a few minutes, by the network)")
    proxies = {name: os.environ[name] for name in _PROXY_VARIABLES if name in os.environ}
    tail: list[str] = []
    for event in client.api.build(
        path=str(context),
        tag=tag,
        buildargs={**arguments, **proxies},
        labels={LABEL: suite},
        # A build container on the bridge has no name service on some machines; the host's network
        # always has.
        network_mode="host",
        rm=True,
        forcerm=True,
        decode=True,
    ):
        line = str(event.get("stream", "")).strip()
        if line:
            tail = [*tail[-40:], line]
        if line.startswith("Step "):
            progress(line[:110])
        if "error" in event:
            raise ImageError(f"building {tag}: {event['error']}\n" + "\n".join(tail))
    if not _exists(client, tag):
        raise ImageError(f"building {tag} ended without an image:\n" + "\n".join(tail))
