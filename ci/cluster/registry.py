"""Which clusters exist on this engine, and removing one entirely.

Docker's labels are the only register: nothing to keep in step on disk, and a cluster whose start
was interrupted half-way is found like any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus

import docker
from docker.errors import APIError, NotFound

from ci.cluster import engine, ownership

LABEL_NAME = "slurm-ext.cluster"
LABEL_OWNER = "slurm-ext.cluster.owner"
LABEL_SPEC = "slurm-ext.cluster.spec"
_REMOVAL_LIMIT_S = 30


def running(client: docker.DockerClient | None = None) -> dict[str, str]:
    """Every cluster of this engine: name -> owner."""
    client = client or engine.connect()
    found: dict[str, str] = {}
    for labels in _labels(client):
        found[labels[LABEL_NAME]] = labels.get(LABEL_OWNER, "")
    return dict(sorted(found.items()))


def _labels(client: docker.DockerClient) -> Iterator[dict[str, str]]:
    """Containers, volumes and networks: an interrupted start may have left any of them."""
    only = {"label": LABEL_NAME}
    for row in client.api.containers(all=True, filters=only):
        yield row["Labels"]
    for row in client.api.volumes(filters=only)["Volumes"] or []:
        yield row["Labels"]
    for row in client.api.networks(filters=only):
        yield row["Labels"]


def sweep(client: docker.DockerClient | None = None) -> list[str]:
    """Remove clusters whose owner died without doing so; return their names."""
    client = client or engine.connect()
    gone = [name for name, owner in running(client).items() if ownership.is_dead(owner)]
    for name in gone:
        remove(client, name)
    return gone


def remove(client: docker.DockerClient, name: str) -> None:
    """Remove everything labelled with this cluster's name."""
    only = {"label": f"{LABEL_NAME}={name}"}
    ids = [row["Id"] for row in client.api.containers(all=True, filters=only)]
    with ThreadPoolExecutor(max_workers=8) as pool:
        for _ in pool.map(partial(_remove_container, client), ids):
            pass
    # Somebody else may be removing the same cluster.
    for row in client.api.networks(filters=only):
        with contextlib.suppress(NotFound):
            client.api.remove_network(row["Id"])
    for row in client.api.volumes(filters=only)["Volumes"] or []:
        with contextlib.suppress(NotFound):
            client.api.remove_volume(row["Name"], force=True)


def _remove_container(client: docker.DockerClient, container: str) -> None:
    with contextlib.suppress(NotFound):
        try:
            client.api.remove_container(container, force=True, v=True)
        except APIError as exc:
            if exc.status_code != HTTPStatus.CONFLICT:
                raise
            # Somebody else's removal is in progress; network and volumes are free only after it.
            client.api.wait(container, timeout=_REMOVAL_LIMIT_S, condition="removed")
