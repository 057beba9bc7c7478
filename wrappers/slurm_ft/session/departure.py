"""Whether there is time to save before leaving: decided once, by rank 0, for all ranks.

The clocks and the knowledge of the ranks differ (one heard a signal, the others did not), and half
of them saving is worse than none: so each tells what it knows, and one pure function decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from slurm_ft import status
from slurm_ft.comm import Comm

# A save under load takes longer than the last one did, so this many times its length must be left.
SAFETY = 2.0


@dataclass(frozen=True, slots=True)
class Word:
    """What one rank tells when all of them are about to leave.

    ``why`` is the status's word, ``None`` where nobody asked this rank, and ``what`` the signal or
    the one who asked. ``left_s`` is the time until it must be gone, ``None`` where it knows of no
    end. ``again`` says that it heard a second signal.
    """

    step: int
    why: str | None = None
    what: str = ""
    left_s: float | None = None
    again: bool = False


@dataclass(frozen=True, slots=True)
class Departure:
    """What all ranks do: finish the save under way, save anew, and what is told about it."""

    finish: bool
    save: bool
    why: str
    note: str = ""


def agree(
    comm: Comm, word: Word, save_s: float | None, *, under_way: bool, limit_s: float
) -> Departure:
    """What all ranks do; a collective call."""
    said = comm.gather(asdict(word), limit_s)
    answer = None
    if said is not None:
        words = [Word(**each) for each in said]
        answer = asdict(decide(words, save_s, under_way=under_way))
    return Departure(**comm.broadcast(answer, limit_s))


def decide(words: Sequence[Word], save_s: float | None, *, under_way: bool) -> Departure:
    """``save_s`` is what the last save took, ``None`` before the first."""
    whys = {word.why for word in words}
    why = status.SIGNALLED if status.SIGNALLED in whys else status.ASKED
    what = next((word.what for word in words if word.what), "")

    def unsaved(reason: str, *, finish: bool = False) -> Departure:
        return Departure(finish, False, why, f"{what}: not saved, {reason}")

    if len({word.step for word in words}) > 1:
        where = ", ".join(f"rank {rank} at {word.step}" for rank, word in enumerate(words))
        return unsaved(
            f"because the ranks are at different steps ({where:.300}): every rank must call step()"
            " equally often"
        )
    if any(word.again for word in words):
        return unsaved("because the signal came again")
    ends = [word.left_s for word in words if word.left_s is not None]
    if not ends or save_s is None:
        return Departure(under_way, True, why, what)
    left_s = min(ends)
    need_s = SAFETY * save_s + (save_s if under_way else 0.0)
    if left_s >= need_s:
        return Departure(under_way, True, why, what)
    return unsaved(
        f"because {left_s:.1f} s are left and {need_s:.1f} s are needed (the last save took"
        f" {save_s:.1f} s)",
        # One that is under way needs less than a new one, and is newer than the last complete one.
        finish=under_way and left_s >= save_s,
    )
