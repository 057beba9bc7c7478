"""Resources in all the spellings that Slurm prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.tres import Tres, memory_mib, parse_gpu_request, parse_tres

DATA = Path(__file__).resolve().parents[2] / "data" / "slurm"


def test_an_allocation() -> None:
    tres = parse_tres("cpu=3,mem=3000M,node=3,billing=3,gres/gpu=12,gres/gpu:v100=12")
    assert tres == Tres(3, 3000, 3, 12, {"v100": 12})
    assert tres.gpu_type == "v100"


def test_types_are_parts_of_the_total_not_added_to_it() -> None:
    assert parse_tres("gres/gpu=6,gres/gpu:h100=2,gres/gpu:h200=4").gpus == 6
    assert parse_tres("gres/gpu:h100=2,gres/gpu:h200=4").gpus == 6
    assert parse_tres("gres/gpu:h100=2,gres/gpu:h200=4").gpu_type == ""


@pytest.mark.parametrize("text", ["", "(null)", "N/A", "cpu=1,mem=512M,node=1,billing=1"])
def test_no_gpu_named_is_none_not_zero(text: str) -> None:
    assert parse_tres(text).gpus is None


@pytest.mark.parametrize(
    ("text", "gpus", "types"),
    [
        ("gres/gpu:4", 4, {}),
        ("gres/gpu:v100:4", 4, {"v100": 4}),
        ("gres/gpu", 1, {}),
        ("gres/gpu:v100", 1, {"v100": 1}),
        ("gres:gpu:4", 4, {}),
        ("gpu:tesla:8(S:0-7)", 8, {"tesla": 8}),
        ("gpu:tesla:0(IDX:N/A)", 0, {"tesla": 0}),
        ("gpu:a100:2(IDX:0,2-3),gpu:h100:1(IDX:1)", 3, {"a100": 2, "h100": 1}),
        ("gres/gpu:h100:1,gres/gpu:h200:1", 2, {"h100": 1, "h200": 1}),
        ("cpu=2,gres/gpu=1", 1, {}),
        ("gres/gpu=2", 2, {}),
        ("gpu:1g.5gb:7", 7, {"1g.5gb": 7}),
        ("gres/shard:8", None, {}),
        ("N/A", None, {}),
    ],
)
def test_requests_and_node_gres(text: str, gpus: int | None, types: dict[str, int]) -> None:
    found = parse_gpu_request(text)
    assert (found.gpus, dict(found.gpu_types)) == (gpus, types)


def test_a_hundred_nodes_of_a_real_site() -> None:
    """Other Gres (pfsdir, gpfs, overlay) beside the GPUs never count as GPUs."""
    rows = (DATA / "text" / "ood_sinfo_gres_100nodes.txt").read_text().splitlines()
    seen = 0
    for row in rows:
        gres, used = row.split()[1:3]
        configured, held = parse_gpu_request(gres).gpus or 0, parse_gpu_request(used).gpus or 0
        assert 0 <= held <= configured <= 8
        seen += configured
    assert len(rows) == 100
    assert seen > 100


@pytest.mark.parametrize(
    ("text", "mib"),
    [("4000M", 4000), ("250G", 256000), ("1.50T", 1572864), ("512K", 1), ("128500M", 128500)],
)
def test_memory(text: str, mib: int) -> None:
    assert memory_mib(text) == mib


@pytest.mark.parametrize("text", ["", "4x", "G", "-1G"])
def test_memory_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match="amount of memory"):
        memory_mib(text)


@given(st.text(max_size=80))
def test_a_request_never_raises(text: str) -> None:
    found = parse_gpu_request(text)
    assert found.gpus is None or found.gpus >= 0
    assert sum(found.gpu_types.values()) <= (found.gpus or 0)
