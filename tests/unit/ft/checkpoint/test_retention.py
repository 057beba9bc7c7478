"""Which checkpoints stay."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.checkpoint.layout import Complete, Listing, examine
from slurm_ft.checkpoint.manifest import FileEntry, Manifest
from slurm_ft.checkpoint.retention import make_room, superfluous
from tests.unit.ft.checkpoint.written import save


def made(sizes: list[int]) -> tuple[Complete, ...]:
    """Checkpoints of these sizes, the newest first."""
    return tuple(
        Complete(
            Path(f"/c/s{number}"),
            Manifest(
                number,
                len(sizes) - number,
                1,
                0.0,
                "dcp",
                files=(FileEntry("f", size, "0" * 64),),
            ),
        )
        for number, size in enumerate(sizes)
    )


sizes = st.lists(st.integers(0, 100), max_size=12)


@given(sizes, st.integers(-1, 15), st.sets(st.integers(0, 11)))
def test_enough_good_ones_stay_and_the_newest_always(
    each: list[int], keep: int, bad: set[int]
) -> None:
    items = made(each)
    damaged = {f"s{number}" for number in bad}
    gone = superfluous(Listing(Path("/c"), items), keep, damaged)
    stay = [item for item in items if item not in gone]
    good = [item for item in stay if item.path.name not in damaged]
    all_good = [item for item in items if item.path.name not in damaged]
    assert len(good) == min(max(keep, 1), len(all_good))
    assert stay == list(items[: len(stay)])  # only the oldest go
    if items:
        assert items[0] in stay


@given(sizes, st.integers(0, 300), st.integers(0, 600))
def test_room_is_made_by_deleting_the_oldest_and_never_the_newest(
    each: list[int], expected: int, quota: int
) -> None:
    items = made(each)
    gone, lacking = make_room(items, expected, quota)
    stay = items[: len(items) - len(gone)]
    used = sum(item.manifest.own_bytes for item in stay)
    assert tuple(reversed(gone)) == items[len(stay) :]
    if items:
        assert items[0] in stay
    assert lacking == max(0, used + expected - quota)
    if lacking:
        assert len(stay) <= 1  # nothing more could go
    elif gone:
        # Not one more than needed.
        assert used + gone[-1].manifest.own_bytes + expected > quota


def test_ckpt_pile_only_the_last_k_stay_on_disk(tmp_path: Path) -> None:
    """Field case ckpt-pile."""
    for step in range(1, 8):
        save(tmp_path, step, keep=3)
    assert [c.step for c in examine(tmp_path).complete] == [7, 6, 5]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "LATEST") == [
        c.path.name for c in reversed(examine(tmp_path).complete)
    ]
