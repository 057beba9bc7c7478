"""Whether a result can be written where it is to go, tried before anything is trained. No torch.

Tried where the directory would be made: in the nearest one that is there. The directory itself is
not made, since many a task is never reached. A disk that is full now may be well when the result
comes; what is refused somebody has to mend.
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

# They pass by themselves, or are mended without a change of the directory's name.
_PASSES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EIO, errno.EINTR})


def fault(output: str) -> str:
    """Why nothing can be written into the directory; "" = it can, or it may later."""
    if not output:
        return ""
    place = Path(os.path.abspath(output))
    try:
        while not os.path.lexists(place):
            place = place.parent
        probe = place / f".trial-{secrets.token_hex(8)}"
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        probe.unlink()
    except OSError as exc:
        if exc.errno in _PASSES:
            return ""
        return f"output={output!r}: nothing can be written into {place} ({exc.strerror})"
    return ""
