"""Files of ours: replaced as a whole, and "is it there?" answered or refused, never guessed.

Readers of a replaced file see the old text or the new one, never a part.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from slurm_ext.domain.errors import DataError


def is_there(path: Path) -> bool:
    """Whether there is anything at ``path``; DataError where its directory does not let us look."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as exc:
        raise DataError(
            str(path),
            f"cannot be looked at: {exc.strerror}",
            "run as the daemon's user, or mend the rights of its directory",
        ) from exc
    return True


def replace_file(path: Path, data: bytes, *, mode: int = 0o644, durable: bool = False) -> None:
    """Write ``data`` beside ``path`` and move it into place.

    ``durable`` forces it to disk first. It is off for what is written again every cycle: losing
    such a file in a power failure is a slow start, and an fsync per job and cycle is not.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    # O_EXCL: the name is ours alone, even in a directory that others may write to.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
