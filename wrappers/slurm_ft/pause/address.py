"""Where the store of a step is served, and the key that opens it: one small private file.

It lies in the state directory of the job (mode 0700) as mode 0600, so only the job's user (and
root) can reach the store; the key is made anew for each attempt and never crosses the network.
"""

from __future__ import annotations

import glob
import json
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_ext.domain.errors import ProtocolError

_MOST_BYTES = 4096
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Address:
    """How to reach the store. ``key`` is secret: it is not part of the representation."""

    host: str
    port: int
    attempt: int
    key: bytes

    def __repr__(self) -> str:
        return f"Address({self.host}:{self.port}, attempt {self.attempt})"


def new_key() -> bytes:
    """A key for one attempt."""
    return secrets.token_bytes(_KEY_BYTES)


def address_path(state_dir: Path, job_id: str, attempt: int, step: str = "") -> Path:
    """The file of one step of a job's attempt; steps that run side by side are paused apart."""
    return state_dir / f"{_prefix(job_id, attempt)}{f'.{step}' if step else ''}.key"


def address_paths(state_dir: Path, job_id: str, attempt: int) -> list[Path]:
    """The files of all steps of a job's attempt that there are."""
    return sorted(state_dir.glob(f"{glob.escape(_prefix(job_id, attempt))}.*key"))


def _prefix(job_id: str, attempt: int) -> str:
    # Several jobs may have one state directory.
    return f"pause-{job_id}-{attempt}"


def step_of(environ: Mapping[str, str]) -> str:
    """The step that this process belongs to; empty where Slurm has not started it."""
    step = environ.get("SLURM_STEP_ID", "")
    return step if step.isdecimal() else ""


def write_address(path: Path, address: Address) -> None:
    """Replace the file at once, readable by its owner alone from its first moment."""
    text = json.dumps(
        {
            "host": address.host,
            "port": address.port,
            "attempt": address.attempt,
            "key": address.key.hex(),
        }
    )
    part = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def find_address(state_dir: Path, job_id: str, attempt: int, step: str) -> Address | None:
    """The address of this process's step, ``None`` where there is none (yet).

    Where mpirun is called by the batch script, rank 0 belongs to no step, and ranks on other nodes
    to one by which mpirun has reached them. Raises as `read_address`.
    """
    found = read_address(address_path(state_dir, job_id, attempt, step))
    if found is None and step:
        found = read_address(address_path(state_dir, job_id, attempt))
    return found


def read_address(path: Path) -> Address | None:
    """The address, ``None`` where there is no file (yet).

    Raises ProtocolError where the file is not the user's own and private: then somebody else may
    have written it, and would be obeyed.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise ProtocolError(f"{path}: cannot be read: {exc.strerror}") from exc
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
            raise ProtocolError(
                f"{path}: mode {found.st_mode & 0o777:04o}, expected 0600; not used"
            )
        if found.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
            raise ProtocolError(f"{path}: belongs to user {found.st_uid}; not used")
        data = file.read(_MOST_BYTES + 1)
    try:
        raw = json.loads(data)
        key = bytes.fromhex(raw["key"])
        address = Address(str(raw["host"]), int(raw["port"]), int(raw["attempt"]), key)
    except (ValueError, KeyError, TypeError) as exc:
        raise ProtocolError(f"{path}: not an address of a pause store ({exc})") from exc
    if len(key) != _KEY_BYTES or not 0 < address.port < 65536:
        raise ProtocolError(f"{path}: not an address of a pause store")
    return address
