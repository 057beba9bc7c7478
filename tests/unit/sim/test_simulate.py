"""``slurm-ext simulate`` and ``simulate compare`` from the command line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from slurm_ext.cli.main import main
from slurm_ext.cli.simulate import Bar
from slurm_ext.sim.policies import POLICIES

HEAD = "job_id,user,vc,submit_s,duration_s,gpus,state\n"
ROWS = "a,u,v,0,100,4,\nb,u,v,0,50,4,\nc,u,v,10,20,2,\n"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + ROWS)
    return str(path)


@pytest.fixture
def free(tmp_path: Path) -> str:
    """Costs of which there are none."""
    path = tmp_path / "costs.csv"
    path.write_text("kind,model,gpu_type,seconds\ncheckpoint,,,0\n")
    return str(path)


def simulate(*words: str) -> int:
    return main(["simulate", *words])


def test_json_has_numbers_per_policy_and_a_row_per_job(trace, free, tmp_path, capsys):
    out = tmp_path / "out.json"
    words = ["--trace", trace, "--costs", free, "--cluster", "1x4", "--policy", "fifo,srtf"]
    assert simulate(*words, "--json", str(out)) == 0
    document = json.loads(out.read_text())
    assert set(document) == {"policies", "jobs"}
    fifo = document["policies"]["fifo"]
    assert {"median_jct_s", "p95_jct_s", "p99_jct_s", "gpu_utilisation"} <= set(fifo)
    # a 0..100, b 100..150, c 150..170 against b 0..50, c 50..70, a 70..170.
    assert (fifo["avg_jct_s"], fifo["makespan_s"]) == (pytest.approx(410 / 3), 170)
    assert document["policies"]["srtf"]["avg_jct_s"] == pytest.approx(280 / 3)
    assert document["jobs"]["srtf"] == [
        {"job_id": "a", "submit_s": 0, "start_s": 70, "end_s": 170, "gpus": 4},
        {"job_id": "b", "submit_s": 0, "start_s": 0, "end_s": 50, "gpus": 4},
        {"job_id": "c", "submit_s": 10, "start_s": 50, "end_s": 70, "gpus": 2},
    ]
    head, one, two = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["POLICY", "AVG_JCT"]
    assert (one.split()[0], two.split()[0]) == ("fifo", "srtf")
    assert "66.7%" in one  # two of three jobs are slower than under srtf


def test_columns_intervals_density_and_outages(trace, free, tmp_path, capsys):
    outages = tmp_path / "outages.csv"
    outages.write_text("node,down_s,up_s\nn1,0,500\n")
    words = ["--trace", trace, "--costs", free, "--cluster", "1x4", "--noheader", "-o", "%P %M"]
    assert simulate(*words, "--policy", "fifo,backfill", "--interval", "60,fifo=1000") == 0
    # Both start a at 0; fifo goes on at 1000 and 2000, backfill at 120 and 180.
    assert capsys.readouterr().out.splitlines() == ["fifo 0.561", "backfill 0.056"]
    assert simulate(*words, "--policy", "fifo", "--outages", str(outages)) == 0
    assert capsys.readouterr().out == "fifo 0.186\n"
    dense = tmp_path / "dense.json"
    assert simulate(*words, "--policy", "fifo", "--density", "2", "--json", str(dense)) == 0
    assert [row["submit_s"] for row in json.loads(dense.read_text())["jobs"]["fifo"]] == [0, 0, 5]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "best"], "policy 'best': unknown; use one of fifo, "),
        (["--policy", "fifo,fifo"], "fifo is there twice"),
        (["--interval", "titan=x"], "'x' is not 0 or more seconds"),
        (["--interval", "optimus=5"], "'optimus' is not replayed"),
        (["--cluster", "many"], "cluster 'many'"),
        (["--density", "0"], "density"),
        (["--estimate-error", "-5"], "estimate error"),
        (["--outages", "/nowhere"], "/nowhere: cannot be read"),
        (["--costs", "/nowhere"], "/nowhere: cannot be read"),
        (["--json", "/nowhere/x.json"], "/nowhere/x.json: cannot be written"),
        (["--cluster", "1x2", "--strict"], "asks for 4 GPUs"),
        (["--cluster", "1x1"], "no job to replay"),
        (["-o", "%Z"], "'%Z' is not a field"),
    ],
)
def test_what_cannot_be_done_is_one_line(trace, words, said, capsys):
    assert simulate("--trace", trace, "--cluster", "1x4", *words) == 1
    told = capsys.readouterr()
    assert said in told.err
    assert told.err.splitlines()[-1].startswith("slurm-ext: error: ")


def test_without_a_trace_it_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as caught:
        simulate()
    assert caught.value.code == 2
    assert "--trace is needed" in capsys.readouterr().err


def test_bad_rows_are_told_and_skipped_or_refused(tmp_path, free, capsys):
    path = tmp_path / "bad.csv"
    path.write_text(HEAD + ROWS + "d,u,v,soon,5,1,\ne,u,v,1,5,64,\n")
    words = ["--trace", str(path), "--costs", free, "--cluster", "1x4", "--policy", "fifo"]
    assert simulate(*words, "--noheader", "-o", "%j") == 0
    told = capsys.readouterr()
    assert told.out == "3\n"
    assert "bad.csv:5: " in told.err
    assert "job e is left out: it asks for 64 GPUs" in told.err
    assert simulate(*words, "--quiet") == 0
    assert capsys.readouterr().err == ""
    assert simulate(*words, "--strict") == 1
    assert "soon" in capsys.readouterr().err


def test_workloads_that_come_along_and_switches_of_titan(tmp_path, capsys):
    words = ["--trace", "FM-1-vit-large", "--limit", "20", "--noheader", "-o", "%P %a"]
    assert simulate(*words, "--policy", "titan,titan-rigid,srtf", "--no-merge", "--no-switch") == 0
    titan, rigid, srtf = (float(line.split()[1]) for line in capsys.readouterr().out.splitlines())
    assert titan < srtf
    assert titan < rigid
    off = ["--estimate-error", "100", "--seed"]
    assert simulate(*words, "--policy", "srtf", *off, "1") == 0
    one = capsys.readouterr().out
    assert simulate(*words, "--policy", "srtf", *off, "1") == 0
    assert capsys.readouterr().out == one


def test_pipeline_switches_of_the_costs_can_be_left_out(tmp_path, capsys):
    costs = tmp_path / "costs.csv"
    costs.write_text(
        "kind,model,gpu_type,seconds\ncold_start,,,300\npipeline_switch,,,1\nwarm_for,,,1e9\n"
    )
    words = ["--trace", "FM-1-vit-large", "--limit", "30", "--costs", str(costs), "--noheader"]
    lost = []
    for more in ([], ["--no-switch"]):
        assert simulate(*words, "--policy", "fifo", "-o", "%L", *more) == 0
        lost.append(float(capsys.readouterr().out))
    assert lost[0] < lost[1] / 2


def test_every_policy_can_be_asked_for(trace, capsys):
    assert simulate("--trace", trace, "--cluster", "2x4", "--policy", ",".join(POLICIES)) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(POLICIES)


def test_plots(trace, tmp_path):
    folder = tmp_path / "plots"
    assert simulate("--trace", trace, "--cluster", "1x4", "--plots", str(folder)) == 0
    names = {path.name for path in folder.iterdir() if path.stat().st_size > 1000}
    assert names == {"jct.png", "utilisation.png", "gantt.png"}


def test_bar_is_silent_for_a_moment_then_shows_and_cleans_up():
    clock = iter([0.0, 0.5, 2.0, 2.1, 4.0])
    stream = io.StringIO()
    bar = Bar("titan", stream, lambda: next(clock))
    bar(1, 10)
    assert stream.getvalue() == ""
    bar(5, 10)
    bar(6, 10)  # too soon after the last
    bar(8, 10)
    assert stream.getvalue().count("\r") == 2
    assert "5/10 jobs, 2 s left" in stream.getvalue()
    assert "8/10 jobs, 1 s left" in stream.getvalue()
    bar.close()
    assert stream.getvalue().endswith("\r\x1b[K")


# -- compare -------------------------------------------------------------------------------------


def recorded(trace: str, free: str, path: Path, policy: str) -> str:
    words = ["--trace", trace, "--costs", free, "--cluster", "1x4", "--policy", policy]
    assert simulate(*words, "--json", str(path)) == 0
    return str(path)


def test_two_runs_side_by_side(trace, free, tmp_path, capsys):
    one = recorded(trace, free, tmp_path / "a.json", "fifo")
    two = recorded(trace, free, tmp_path / "b.json", "srtf")
    both = recorded(trace, free, tmp_path / "c.json", "fifo,srtf")
    capsys.readouterr()
    assert simulate("compare", one, two) == 0
    lines = capsys.readouterr().out.splitlines()
    (average,) = (line.split() for line in lines if "avg_jct_h" in line)
    assert average == ["fifo|srtf", "avg_jct_h", "0.0380", "0.0259", "0.683"]
    assert lines[-1].endswith(
        "3 common jobs B finishes 2 at least 10 % sooner and 1 at least 10 % later"
    )
    assert simulate("compare", one, both) == 0
    lines = capsys.readouterr().out.splitlines()[3:]
    assert {line.split()[0] for line in lines} == {"fifo"}
    assert all(line.split()[-1] in ("1.000", "-", "later") for line in lines)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"policies": {}, "jobs": 3}', "[" * 5000])
def test_what_is_no_run_is_refused(text, trace, free, tmp_path, capsys):
    good = recorded(trace, free, tmp_path / "a.json", "fifo")
    bad = tmp_path / "bad.json"
    bad.write_text(text)
    assert simulate("compare", good, str(bad)) == 1
    assert "bad.json: not a run of the simulator" in capsys.readouterr().err


def test_runs_without_a_common_policy_are_refused(trace, free, tmp_path, capsys):
    one = recorded(trace, free, tmp_path / "a.json", "fifo,srtf")
    two = recorded(trace, free, tmp_path / "b.json", "backfill")
    assert simulate("compare", one, two) == 1
    assert "no common policy (fifo, srtf; backfill)" in capsys.readouterr().err
    assert simulate("compare", one, str(tmp_path / "absent.json")) == 1


def test_merging_is_asked_for_and_can_be_left_out(capsys):
    words = ["--trace", "FM-1-vit-large", "--limit", "60", "--noheader", "-q", "-o", "%a"]
    words += ["--policy", "titan"]

    def jct(*more: str) -> float:
        assert simulate(*words, *more) == 0
        return float(capsys.readouterr().out)

    plain = jct()
    assert jct("--merge", "1") < plain
    assert jct("--merge", "1", "--no-merge") == plain
    assert jct("--merge", "1,1") > jct("--merge", "1")
    for bad in ("2", "x", "1,-1"):
        with pytest.raises(SystemExit) as caught:
            simulate(*words, "--merge", bad)
        assert caught.value.code == 2


def test_pipeline_switches_of_a_costs_file_can_be_left_out(tmp_path, capsys):
    path = tmp_path / "costs.csv"
    path.write_text(
        "kind,model,gpu_type,seconds\ncheckpoint,,,30\ncold_start,,,46\npipeline_switch,,,6\n"
    )
    words = ["--trace", "FM-1-vit-large", "--limit", "60", "--noheader", "-q", "-o", "%a"]
    words += ["--policy", "titan", "--costs", str(path)]
    assert simulate(*words) == 0
    on = float(capsys.readouterr().out)
    assert simulate(*words, "--no-switch") == 0
    assert on < float(capsys.readouterr().out)
