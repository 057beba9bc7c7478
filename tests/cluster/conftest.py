"""Real Slurm clusters for tests: one shared by the whole session, and others made to measure.

A machine without Docker fails these tests instead of skipping them: a skipped check proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ci.cluster import Cluster, ClusterSpec
from tests.cluster import ft
from tests.cluster.runner import lacks_pmix

# Two node containers, so that one can fail while the other goes on.
SHARED_SPEC = ClusterSpec(nodes=4, nodes_per_container=2, name_prefix="slurm-ext-test")

MakeCluster = Callable[..., Cluster]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is a cluster test, also where somebody forgot the marker."""
    here = __file__.rpartition("/")[0]
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The session's cluster; each test gets it with an empty queue and idle nodes."""
    with Cluster.start(SHARED_SPEC) as started:
        yield started


@pytest.fixture(scope="session")
def ranks_cluster() -> Iterator[Cluster]:
    """The session's cluster for jobs under ft-run, with torch, MPI and the product in it."""
    with Cluster.start(ft.SPEC) as started:
        ft.install(started)
        yield started


@pytest.fixture(scope="module")
def ranks(ranks_cluster: Cluster) -> Iterator[Cluster]:
    """The same, left to the next module as it was found: in between, jobs may run side by side."""
    yield ranks_cluster
    ranks_cluster.clear()


@pytest.fixture
def desk(ranks: Cluster) -> Iterator[ft.Desk]:
    """Where a test submits jobs under ft-run; those that are left are cancelled at its end."""
    made = ft.Desk(ranks)
    yield made
    made.cancel()


@pytest.fixture
def pmix(ranks: Cluster) -> None:
    """For tests whose steps start with `srun --mpi=pmix`."""
    if lacks_pmix(ranks):
        pytest.skip(f"Slurm of {ranks.spec.suite} is built without mpi/pmix")


@pytest.fixture(autouse=True)
def _clean_queue(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave the shared cluster to the next test as it was found."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").clear()


@pytest.fixture
def make_cluster() -> Iterator[MakeCluster]:
    """Start a cluster of one's own with fields of ClusterSpec; removed at the test's end."""
    with ExitStack() as stack:

        def make(**fields: Any) -> Cluster:
            spec = ClusterSpec(**{"name_prefix": "slurm-ext-test", **fields})
            return stack.enter_context(Cluster.start(spec))

        yield make
