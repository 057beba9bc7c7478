"""``slurm-ext simulate`` and ``simulate compare`` from the command line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from slurm_ext.cli.main import main
from slurm_ext.cli.simulate import Bar
from slurm_ext.domain.plan import Plan
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
    assert set(document) == {"setting", "policies", "jobs"}
    assert document["setting"]["jobs_by_gpu_type"] == {"V100": 3}
    fifo = document["policies"]["fifo"]
    assert {"median_jct_s", "p95_jct_s", "p99_jct_s", "gpu_utilisation"} <= set(fifo)
    # a 0..100, b 100..150, c 150..170 against b 0..50, c 50..70, a 70..170.
    assert (fifo["avg_jct_s"], fifo["makespan_s"]) == (pytest.approx(410 / 3), 170)
    assert document["policies"]["srtf"]["avg_jct_s"] == pytest.approx(280 / 3)
    assert document["jobs"]["srtf"] == [
        {"job_id": job, "submit_s": submit, "start_s": start, "end_s": end, "gpus": gpus, **where}
        for job, submit, start, end, gpus in [
            ("a", 0, 70, 170, 4),
            ("b", 0, 0, 50, 4),
            ("c", 10, 50, 70, 2),
        ]
        for where in [{"nodes": "n1", "gpu_type": "V100"}]
    ]
    title, head, one, two = capsys.readouterr().out.splitlines()
    assert title == (
        "trace.csv on 1x4xV100 (4 GPUs): 3 jobs, 0 of them on more than one GPU count;"
        " times in hours"
    )
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
        (["--interval", "titan=x"], "'x' is neither 0 nor 1 to 1e+09 s"),
        (["--interval", "1e-9"], "'1e-9' is neither 0 nor 1 to 1e+09 s"),
        (["--interval", "optimus=5"], "'optimus' is not replayed"),
        (["--cluster", "many"], "cluster 'many'"),
        (["--density", "0"], "density"),
        (["--estimate-error", "-5"], "estimate error: -5 % is not 0 or more"),
        (["--interval", "1e15"], "'1e15' is neither 0 nor 1 to 1e+09 s"),
        (["--table", "/"], "/: cannot be read: Is a directory"),
        (["--outages", "/nowhere"], "/nowhere: cannot be read"),
        (["--costs", "/nowhere"], "/nowhere: cannot be read"),
        (["--json", "/nowhere/x.json"], "/nowhere/x.json: cannot be written"),
        (["--cluster", "1x2", "--strict"], "asks for 4 GPUs"),
        (["--cluster", "1x1"], "no job to replay"),
        (["-o", "%Z"], "'%Z' is not a field"),
        (["-o", "P,a"], "names no field; write e.g. %P"),
    ],
)
def test_what_cannot_be_done_is_one_line(trace, words, said, capsys):
    assert simulate("--trace", trace, "--cluster", "1x4", *words) == 1
    told = capsys.readouterr()
    assert said in told.err
    assert told.err.splitlines()[-1].startswith("slurm-ext: error: ")


def test_json_may_take_the_place_of_the_table(trace, free, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--trace", trace, "--costs", free, "--cluster", "1x4", "--policy", "fifo"]
    assert simulate(*words, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["policies"].keys() == {"fifo"}
    assert not (tmp_path / "-").exists()


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
    left_out = (
        "slurm-ext: 1 of 4 jobs are left out\n"
        "slurm-ext:   1: it asks for 64 GPUs, more than the machine has room for (job e first)\n"
    )
    assert left_out in told.err
    # Numbers without some jobs look better than they are: that is no note to be quiet about.
    out = tmp_path / "out.json"
    assert simulate(*words, "--quiet", "--json", str(out)) == 0
    told = capsys.readouterr()
    assert told.err == left_out
    assert "bad.csv on 1x4xV100 (4 GPUs): 3 of 4 jobs, " in told.out
    setting = json.loads(out.read_text())["setting"]
    assert setting["left_out"] == [["it asks for 64 GPUs, more than the machine has room for", 1]]
    assert (setting["jobs"], setting["bad_rows"]) == (3, 1)
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
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(POLICIES)


def test_plots(trace, tmp_path):
    folder = tmp_path / "plots"
    assert simulate("--trace", trace, "--cluster", "1x4", "--plots", str(folder)) == 0
    names = {path.name for path in folder.iterdir() if path.stat().st_size > 1000}
    assert names == {"jct.png", "utilisation.png", "gantt.png"}


def test_pictures_and_files_that_cannot_be_are_found_out_before_the_replay(
    trace, tmp_path, monkeypatch, capsys
):
    def too_late(*_, **__):
        raise AssertionError("the replay was begun")

    monkeypatch.setattr("slurm_ext.cli.simulate.replay", too_late)
    file = tmp_path / "file"
    file.touch()
    for option, place in (
        ("--json", "/nosuch/x"),
        ("--json", str(tmp_path)),
        ("--plots", str(file)),
        ("--plots", str(file / "below")),
    ):
        assert simulate("--trace", trace, "--cluster", "1x4", option, place) == 1
        assert f"error: {place}: cannot be written: " in capsys.readouterr().err
    monkeypatch.setattr("slurm_ext.cli.plots.find_spec", lambda name: None)
    assert simulate("--trace", trace, "--cluster", "1x4", "--plots", str(tmp_path / "new")) == 1
    assert "pip install '.[plots]'" in capsys.readouterr().err


def test_what_other_policies_found_is_shown_beside_one_that_fails(
    trace, free, tmp_path, monkeypatch, capsys
):
    class Idle:
        name = "fifo"

        def __call__(self, view, now):
            return Plan(self.name, now, {})

    monkeypatch.setitem(POLICIES, "fifo", (Idle, "starts nothing"))
    out = tmp_path / "out.json"
    words = ["--trace", trace, "--costs", free, "--cluster", "1x4", "--json", str(out)]
    assert simulate(*words, "--policy", "fifo,srtf") == 1
    told = capsys.readouterr()
    assert [line.split()[0] for line in told.out.splitlines()[2:]] == ["srtf"]
    assert "policy fifo never started a, b, c" in told.err
    assert set(json.loads(out.read_text())["policies"]) == {"srtf"}


def test_a_machine_without_a_gpu_type_is_taken_for_the_first_of_the_table(tmp_path, capsys):
    """Costs that name the type hold for it: warm starts as well as cold ones."""
    costs = tmp_path / "costs.csv"
    costs.write_text(
        "kind,model,gpu_type,seconds\ncold_start,vit-large,V100,100\n"
        "pipeline_switch,vit-large,V100,5\nwarm_for,,,3600\n"
    )
    words = ["--trace", "FM-1-vit-large", "--limit", "30", "--costs", str(costs)]
    words += ["--policy", "fifo", "-o", "%L"]
    found = []
    for cluster in ("8x4", "8x4xV100"):
        assert simulate(*words, "--cluster", cluster) == 0
        found.append(capsys.readouterr())
    assert found[0].out == found[1].out
    assert "--cluster 8x4 names no GPU type: taken for 8x4xV100" in found[0].err
    assert "taken for" not in found[1].err


def test_it_is_said_that_backfill_knows_limits_that_the_workload_lacks(tmp_path, capsys):
    path = tmp_path / "w.csv"
    path.write_text("job_id,submit_s,duration_s,gpus,limit_s\na,0,9,1,20\nb,0,9,1,\n")
    words = ["--trace", str(path), "--cluster", "1x4"]
    assert simulate(*words, "--policy", "backfill") == 0
    assert "1 of 2 jobs have no time limit in the workload: backfill is told 1.5 times" in (
        capsys.readouterr().err
    )
    assert simulate(*words, "--policy", "srtf") == 0
    assert "no time limit" not in capsys.readouterr().err


def test_given_types_are_counted(tmp_path, capsys):
    path = tmp_path / "w.csv"
    path.write_text("job_id,submit_s,duration_s,gpus\na,0,9,1\nb,0,9,1\nc,0,9,1\n")
    words = ["--trace", str(path), "--cluster", "1x4xV100,2x4xA100", "--policy", "srtf"]
    assert simulate(*words) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line == "jobs by GPU type, which each is given at its submission: V100 1, A100 2"


def test_output_of_sacct_without_a_heading_is_replayed(tmp_path, capsys):
    path = tmp_path / "s.txt"
    path.write_text(
        "1|COMPLETED|2026-01-01T00:00:00|2026-01-01T00:00:05|2026-01-01T00:01:05|"
        "gres/gpu=2|bert-run\n"
    )
    words = ["--trace", str(path), "--cluster", "1x4", "--policy", "fifo", "--noheader", "-o", "%a"]
    assert simulate(*words) == 1
    assert "needs --sacct-columns" in capsys.readouterr().err
    assert simulate(*words, "--format", "sacct") == 1
    assert "--sacct-columns=JobID,State" in capsys.readouterr().err
    names = "JobID,State,Submit,Start,End,AllocTRES,JobName"
    assert simulate(*words, "--sacct-columns", names.replace(",", "|")) == 1
    assert "write JobID,State,Submit,..." in capsys.readouterr().err
    assert simulate(*words, "--sacct-columns", names, "--model-pattern", "bert") == 0
    assert capsys.readouterr().out == "0.017\n"
    assert simulate(*words, "--sacct-columns", names, "--model-pattern", "(") == 1
    assert "--model-pattern='('" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty; name a file"),
        (b"# nothing\n\n", "empty; name a file"),
        (b"job_id;submit_s;gpus\n1;0;2\n", "its columns are separated by semicolons"),
        (b"job_id\tsubmit_s\tgpus\n1\t0\t2\n", "its columns are separated by tabs"),
        ("job_id,submit_s,gpus\n1,0,2\n".encode("utf-16"), "not UTF-8 text (UTF-16?)"),
        (b"id,when\n", "needs the columns job_id, submit_s and gpus"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(data, said, tmp_path, capsys):
    path = tmp_path / "w.csv"
    path.write_bytes(data)
    assert simulate("--trace", str(path)) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trase", "w.csv"], "unrecognized arguments: --trase; do you mean --trace?"),
        (["--counts", "a"], "argument --counts: 'a' is not a whole number from 1 on"),
        (["--limit", "0"], "argument --limit: '0' is not a whole number from 1 on"),
        (["--cluster", "-1x4"], "--cluster: -1x4 looks like an option; write --cluster=-1x4"),
    ],
)
def test_what_is_wrong_with_the_command_line_is_said(words, said, capsys):
    with pytest.raises(SystemExit) as caught:
        simulate(*words)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


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
    assert average == ["fifo|srtf", "avg_jct_h", "0.0380", "0.0259", "0.683", "B"]
    (use,) = (line.split() for line in lines if "gpu_utilisation" in line)
    assert use[-1] == "1.000"  # neither more nor less of it is better
    assert lines[-1].endswith(
        "3 common jobs B finishes 2 at least 10 % sooner and 1 at least 10 % later"
    )
    assert simulate("compare", one, both) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "settings: the same workload, machine and terms"
    assert {line.split()[0] for line in lines[4:]} == {"fifo"}
    assert all(line.split()[-1] in ("1.000", "-", "=", "later") for line in lines[4:])


def test_runs_of_other_workloads_and_machines_are_told_apart(trace, free, tmp_path, capsys):
    one = recorded(trace, free, tmp_path / "a.json", "srtf")
    two = tmp_path / "b.json"
    words = ["--trace", trace, "--costs", free, "--cluster", "1x4xA100", "--policy", "srtf"]
    assert simulate(*words, "--interval", "60", "--json", str(two)) == 0
    capsys.readouterr()
    assert simulate("compare", one, str(two)) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("settings")]
    assert told == [
        "settings differ in cluster: A 1x4xV100, B 1x4xA100",
        "settings differ in jobs_by_gpu_type: A V100=3, B A100=3",
        "settings differ in intervals_s: A srtf=0.0, B srtf=60.0",
    ]
    older = json.loads(two.read_text())
    del older["setting"]
    two.write_text(json.dumps(older))
    assert simulate("compare", one, str(two)) == 0
    assert "settings unknown: " in capsys.readouterr().out


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


def test_numbers_that_are_printed_alike_are_equal(trace, free, tmp_path, capsys):
    one = recorded(trace, free, tmp_path / "a.json", "srtf")
    document = json.loads(Path(one).read_text())
    numbers = document["policies"]["srtf"]
    numbers["gpu_s_held"] *= 1 + 1e-12  # added up in another order
    numbers["makespan_s"] *= 1.01
    two = tmp_path / "b.json"
    two.write_text(json.dumps(document))
    capsys.readouterr()
    assert simulate("compare", one, str(two)) == 0
    lines = {words[1]: words[-1] for words in map(str.split, capsys.readouterr().out.splitlines())}
    assert lines["gpu_h_held"] == "="
    assert lines["makespan_h"] == "A"


# -- waiting limit -------------------------------------------------------------------------------


def test_srtf_has_no_waiting_limit_unless_one_is_asked_for(tmp_path, free, capsys):
    """A queue longer than the limit: nearly every job is past it, and srtf would be fifo."""
    path = tmp_path / "long.csv"
    rows = "".join(f"j{n:02},{n},{3600 * (21 - n)},4\n" for n in range(20))
    path.write_text(f"job_id,submit_s,duration_s,gpus\n{rows}")
    words = ["--trace", str(path), "--costs", free, "--cluster", "1x4", "--noheader", "-o", "%P %a"]
    words += ["--policy", "fifo,srtf,titan"]
    out = tmp_path / "out.json"

    def jct(*more: str) -> tuple[dict[str, float], str]:
        assert simulate(*words, "--json", str(out), *more) == 0
        told = capsys.readouterr()
        return {n: float(h) for n, h in map(str.split, told.out.splitlines())}, told.err

    plain, said = jct()
    assert plain["srtf"] < 0.8 * plain["fifo"]
    assert "waiting limit" not in said
    assert json.loads(out.read_text())["setting"]["waiting_limit_s"] is None
    assert jct("--waiting-limit", "none")[0] == plain
    limited, said = jct("--waiting-limit", "1:00:00")
    assert limited["srtf"] == pytest.approx(limited["fifo"], rel=0.01)
    assert limited["titan"] == pytest.approx(limited["fifo"], rel=0.01)
    for name in ("srtf", "titan"):
        assert f"{name}: 19 of 20 jobs first started after the waiting limit (01:00:00)" in said
    assert "fifo: " not in said
    assert json.loads(out.read_text())["setting"]["waiting_limit_s"] == 3600
    assert "waiting limit" not in jct("--waiting-limit", "30-0")[1]
    with pytest.raises(SystemExit):
        simulate(*words, "--waiting-limit", "soon")
    assert "'soon': not a time; write none, seconds," in capsys.readouterr().err


# -- a table of one's own ------------------------------------------------------------------------

TABLE = "model,gpu_type,placement,local_batch,throughput\n"
WORK = "job_id,submit_s,gpus,model,batch_size,total_samples\na1,0,2,gpt,16,10000\na2,5,4,gpt,16,9\n"


@pytest.fixture
def own(tmp_path: Path) -> list[str]:
    (tmp_path / "table.csv").write_text(f"{TABLE}gpt,H100,2,8,100\ngpt,H100,4,4,9\ngpt,T4,1,x,9\n")
    (tmp_path / "work.csv").write_text(WORK)
    files = ["--trace", str(tmp_path / "work.csv"), "--table", str(tmp_path / "table.csv")]
    return [*files, "--policy", "fifo", "--noheader", "-o", "%j"]


def test_without_a_cluster_the_first_type_of_ones_own_table_is_meant(own, capsys):
    assert simulate(*own) == 0
    told = capsys.readouterr()
    assert told.out == "2\n"
    assert "slurm-ext: no --cluster: taken for 8x4xH100\n" in told.err
    assert "left out" not in told.err


def test_types_that_the_table_has_are_named_with_the_fix(own, tmp_path, capsys):
    assert simulate(*own, "--cluster", "2x4xV100") == 1
    told = capsys.readouterr().err.splitlines()
    reason = "the table has no row for GPU type V100, only for H100, T4"
    assert f"slurm-ext:   2: {reason} (job a1 first)" in told
    assert told[-1].endswith(
        f"no job to replay: {reason}; try --cluster 2x4xH100, or give a --table with rows for that"
        " type"
    )
    # Also where some jobs can be replayed.
    work = tmp_path / "work.csv"
    work.write_text(WORK.replace("samples", "samples,duration_s", 1).replace(",9\n", ",9,60\n"))
    work.write_text(work.read_text().replace(",10000\n", ",10000,\n"))
    assert simulate(*own, "--cluster", "2x4xV100") == 0
    assert "slurm-ext:   try --cluster 2x4xH100, or " in capsys.readouterr().err


@pytest.mark.parametrize("cluster", [[], ["--cluster", "1x4xH100"], ["--cluster", "1x4xV100"]])
def test_bad_rows_of_the_table_are_always_told_and_skipped_or_refused(own, cluster, capsys):
    simulate(*own, *cluster)
    assert "table.csv, line 4, column local_batch: 'x': not a number" in capsys.readouterr().err
    assert simulate(*own, *cluster, "--strict") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "table.csv, line 4, column local_batch" in line


def test_a_workload_without_run_times_is_not_sent_to_table_and_cluster(tmp_path, capsys):
    path = tmp_path / "pollux.csv"
    head = "job_id,submit_s,application,gpus,batch_size,workload,load"
    path.write_text(f"{head}\na,0,cifar10,2,256,1,1.0\n")
    assert simulate("--trace", str(path)) == 1
    said = capsys.readouterr().err
    assert "published Pollux workloads tell no run times; add a column duration_s" in said
    assert "neither --table nor --cluster helps" in said
    path.write_text(f"{head},duration_s\na,0,cifar10,2,256,1,1.0,60\n")
    assert simulate("--trace", str(path)) == 0
    capsys.readouterr()
    path.write_text("job_id,submit_s,gpus\na,0,2\n")
    assert simulate("--trace", str(path)) == 1
    assert (
        "or model, batch_size and total_samples, or replay another one" in capsys.readouterr().err
    )
