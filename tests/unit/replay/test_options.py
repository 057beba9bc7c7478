"""The command line of the demonstration."""

from __future__ import annotations

import pytest

from ci.replay.options import Options, Variant, parse


def test_default_is_the_short_demonstration() -> None:
    assert parse([]) == Options()
    assert Options().jobs == 30
    assert not Options().full


def test_full_replays_every_job() -> None:
    options = parse(["--full", "--seed=7", "--nodes", "16", "--workload", "FM-2-vit"])
    assert (options.jobs, options.full, options.seed) == (None, True, 7)
    assert (options.nodes, options.workload) == (16, "FM-2-vit")


def test_variants_are_chosen_by_name_in_a_fixed_order() -> None:
    assert parse(["--variants=slurm_ext,plain"]).variants == (Variant.PLAIN, Variant.FULL)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--full", "--time-scale=61"], "at most 60"),
        (["--full", "--jobs=3"], "leave out --jobs"),
        (["--jobs=0"], "at least 1"),
        (["--nodes=0"], "at least 1"),
        (["--time-scale=0.5"], "at least 1"),
        (["--variants=plain,fast"], "some of plain, order, slurm_ext"),
        (["--variants="], "some of plain"),
        (["--gantt=x.bmp"], ".png or .svg"),
    ],
)
def test_nonsense_is_refused_with_the_way_out(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
