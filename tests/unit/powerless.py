"""A user without rights, in this process: what root may look at, tests must be able to lose."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

NOBODY = 65534


@contextlib.contextmanager
def shut(folder: Path) -> Iterator[Path]:
    """``folder`` can be neither listed nor searched by us meanwhile.

    Everything that is imported inside must have been imported before.
    """
    mode = folder.stat().st_mode
    folder.chmod(0)
    root = os.getuid() == 0
    if root:
        os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield folder
    finally:
        if root:
            os.setresuid(0, 0, 0)
        folder.chmod(mode)
