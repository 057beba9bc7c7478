"""The mark that an administrator took everything back, and that the daemon shall only observe.

``slurm-ext release`` beside a living daemon would be undone in the next cycle; so it leaves this
mark, and the daemon observes until ``slurm-ext release --resume`` removes it. The mark lies beside
the journal: it survives a reboot, since a decision of a person should.
"""

from __future__ import annotations

from pathlib import Path

from slurm_ext.control.files import is_there, replace_file
from slurm_ext.domain.errors import DataError


def released_mark(journal: Path) -> Path:
    """Where the mark lies."""
    return journal.with_name(journal.name + ".released")


def is_released(journal: Path) -> bool:
    """Whether the daemon shall only observe. Raises DataError where that cannot be told."""
    return is_there(released_mark(journal))


def set_released(journal: Path, words: str) -> None:
    """Leave the mark; ``words`` say who did it and when."""
    path = released_mark(journal)
    try:
        replace_file(path, words.encode() + b"\n", durable=True)
    except OSError as exc:
        raise DataError(str(path), f"cannot be written: {exc}", "run as the daemon's user") from exc


def clear_released(journal: Path) -> bool:
    """Remove the mark; whether there was one."""
    path = released_mark(journal)
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise DataError(str(path), f"cannot be removed: {exc}", "run as the daemon's user") from exc
    return True
