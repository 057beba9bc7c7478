"""Amounts of bytes as people write them: ``500000``, ``200G``, ``1.5T``. Pure.

The letters mean powers of 1024, as in Slurm's ``--mem``; a plain number is bytes, not Slurm's MiB,
because what is measured here are files. Read at the start of every rank: no imports.
"""

from __future__ import annotations

_LETTERS = "KMGTP"
_MOST = 1 << 60


def parse_bytes(text: str) -> int:
    """The amount. Raises ValueError for anything that is not one above 0."""
    word = text.strip().upper().removesuffix("IB").removesuffix("B")
    power = _LETTERS.find(word[-1:]) + 1 if word else 0
    number = word[:-1] if power else word
    if not number.replace(".", "", 1).isdecimal() or not number.isascii():
        raise ValueError(f"{text!r} is no amount of bytes")
    found = int(float(number) * 1024**power)
    if not 0 < found <= _MOST:
        raise ValueError(f"{text!r} is not above 0 bytes, or beyond all disks")
    return found
