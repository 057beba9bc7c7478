"""Puts this repository's plugin, Lua files and Python package into a running cluster.

Each part is built once, in the controller container, into a staging folder, and the staged files
are copied to every other container. So the host needs neither a compiler nor Slurm's headers, and
an edit in the tree costs a second, not an image.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ci.cluster.errors import ClusterError
from ci.cluster.files import FileSpec, pack, tree
from ci.cluster.spec import ClusterSpec

if TYPE_CHECKING:
    from ci.cluster.harness import Cluster

REPOSITORY = Path(__file__).resolve().parents[2]
_SPANK = REPOSITORY / "spank"
_SITE = REPOSITORY / "site"
_PLUGSTACK = _SITE / "plugstack.conf.d"
_SOURCES = "/usr/local/src/slurm-ext"
_STAGE = "/usr/local/stage"
_SKIP = frozenset({"__pycache__", "build", ".git"})
# What setuptools needs to build the package: the sources and the files that pyproject.toml names.
_PACKAGE_FOLDERS = ("slurm_ext", "wrappers")
_PACKAGE_FILES = ("pyproject.toml", "README.md", "LICENSE")


@dataclass(frozen=True, slots=True)
class Parts:
    """What of the tree goes into a cluster."""

    plugin: bool
    lua: list[FileSpec] = field(default_factory=list)


def find(spec: ClusterSpec) -> Parts:
    """Which parts the spec wants; they must be in the tree."""
    if spec.plugin:
        _require("plugin", _SPANK / "Makefile", _PLUGSTACK)
    if spec.lua:
        _require("lua", _SITE / "job_submit.lua")
    return Parts(spec.plugin, _lua_files() if spec.lua else [])


def _require(name: str, *needed: Path) -> None:
    missing = [str(path) for path in needed if not path.exists()]
    if missing:
        raise ClusterError(
            f"ClusterSpec.{name}=True needs {', '.join(missing)}: set it to False (on the command "
            f"line --no-{name}) for a cluster without it"
        )


def _lua_files() -> list[FileSpec]:
    """job_submit.lua where slurmctld looks for it, and its modules in a folder beside it."""
    files = [FileSpec(f"/etc/slurm/{path.name}", path.read_bytes()) for path in _SITE.glob("*.lua")]
    return files + tree(_SITE / "lua", "/etc/slurm/lua") if (_SITE / "lua").is_dir() else files


def install_plugin(cluster: Cluster, parts: Parts) -> None:
    """Compile the SPANK plugin and install it in every container, running or not yet started."""
    if not parts.plugin:
        return
    files = tree(_SPANK, f"{_SOURCES}/spank", skip=_SKIP)
    files += tree(_PLUGSTACK, f"{_SOURCES}/site/{_PLUGSTACK.name}")
    cluster.unpack(pack(files))
    stage = f"{_STAGE}/spank"
    build = ["make", "-s", "-C", f"{_SOURCES}/spank", "install", f"DESTDIR={stage}"]
    cluster.exec(build, timeout=120)
    # What is left to the administrator: giving the example its effective name.
    rename = 'for file in *.example; do mv "$file" "${file%.example}"; done'
    cluster.exec(["sh", "-ec", rename], cwd=f"{stage}/etc/slurm/plugstack.conf.d")
    _distribute(cluster, stage)


def install_package(cluster: Cluster) -> None:
    """Build the Python package and install it, without its dependencies, in every container."""
    files = [file for name in _PACKAGE_FOLDERS for file in _package_tree(name)]
    files += [
        FileSpec(f"{_SOURCES}/python/{name}", (REPOSITORY / name).read_bytes())
        for name in _PACKAGE_FILES
    ]
    cluster.exec(["rm", "-rf", f"{_SOURCES}/python", f"{_STAGE}/python"])
    cluster.unpack(pack(files))
    pip = ["python3", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    pip += ["--no-build-isolation", "--break-system-packages", "--root-user-action=ignore"]
    cluster.exec([*pip, f"--root={_STAGE}/python", f"{_SOURCES}/python"], timeout=120)
    # A module removed from the tree must not live on from an earlier installation.
    stale = "rm -rf /usr/local/lib/python3*/dist-packages/slurm_*"
    cluster._everywhere(lambda host: cluster.exec(["sh", "-c", stale], container=host))
    _distribute(cluster, f"{_STAGE}/python")
    complaints = cluster.exec(["python3", "-m", "pip", "check"], check=False).stdout
    ours = [line for line in complaints.splitlines() if line.startswith("slurm-ext")]
    if ours:
        raise ClusterError(
            "the image's Python packages do not satisfy pyproject.toml; lower the bound or add the "
            f"package to {Path(__file__).parent / 'image' / 'Dockerfile'}:\n" + "\n".join(ours)
        )


def _package_tree(name: str) -> list[FileSpec]:
    folder = REPOSITORY / name
    return tree(folder, f"{_SOURCES}/python/{name}", skip=_SKIP) if folder.exists() else []


def _distribute(cluster: Cluster, stage: str) -> None:
    """Copy the files of a staging folder of the controller to the same places in every container.

    Only files are packed, never folders: whoever unpacks an existing folder may change its mode for
    a moment, and a `/` that only root may enter, however shortly, breaks MariaDB while it starts.
    """
    archive = f"{stage}.tar"
    pack_files = f"find . ! -type d -print0 | tar --null --files-from=- -cf {archive}"
    cluster.exec(["sh", "-ec", pack_files], cwd=stage)
    packed = cluster.get(archive)
    for host in cluster.containers():
        cluster.unpack(packed, container=host)
