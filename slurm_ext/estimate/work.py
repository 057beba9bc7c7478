"""How much of a job is left: declared work, less what its progress reports say. Pure.

For a waiting job, and for one that has not reported since its last start, only what lies in a
checkpoint is done; otherwise everything that it reported. A report is a user's claim: it shortens
the job's own estimate and nothing else, and the speed that it claims may correct the table by a
bounded factor only.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_ext.domain.directive import Directive
from slurm_ext.domain.progress import Progress
from slurm_ext.estimate.history import Habit

MAX_CALIBRATION = 4.0  # a report further from the table than this is not about the same job


@dataclass(frozen=True, slots=True)
class Work:
    """Samples that are left, and how that number came about (empty: as declared)."""

    samples: float
    note: str = ""


def left(
    directive: Directive,
    global_batch: int | None,
    progress: Progress | None,
    habit: Habit,
    *,
    reported: bool,
) -> Work | None:
    """What is left of the work; ``None`` where neither user nor program said enough."""
    total = directive.total_samples(global_batch)
    declared = total is not None
    if total is None:
        total = reported_total(progress)
    if total is None:
        return None
    notes = [] if declared else ["the amount of work is the program's own word"]
    if declared and habit.factor > 1:
        total *= habit.factor
        notes.append(
            f"declared work x {habit.factor:.2f} (median of {habit.runs} past jobs of this user)"
        )
    done = done_samples(progress, reported=reported)
    if done:
        notes.append(f"{min(done, total):.0f} of {total:.0f} samples done")
    return Work(max(0.0, total - done), "; ".join(notes))


def done_samples(progress: Progress | None, *, reported: bool) -> float:
    """Samples that need not be processed again. ``reported``: by the attempt that runs now."""
    if progress is None:
        return 0.0
    if reported:
        return float(progress.samples)
    # An attempt that has not saved yet began from a checkpoint that is still there.
    kept = max(progress.last_checkpoint_step or 0, progress.restored_step or 0)
    if not kept or progress.step <= 0:
        return 0.0
    return progress.samples * min(1.0, kept / progress.step)


def reported_total(progress: Progress | None) -> float | None:
    """Samples that the program intends in all; ``None`` where it does not say."""
    if progress is None:
        return None
    if progress.total_samples is not None:
        return float(progress.total_samples)
    if progress.total_steps is None or progress.step <= 0 or not progress.samples:
        return None
    return progress.total_steps * progress.samples / progress.step


def calibration(progress: Progress | None, predicted: float | None) -> float:
    """Reported over predicted throughput at the reported GPU count; 1 where it says nothing."""
    if progress is None or not predicted or progress.samples_per_s <= 0:
        return 1.0
    ratio = progress.samples_per_s / predicted
    return ratio if 1 / MAX_CALIBRATION <= ratio <= MAX_CALIBRATION else 1.0
