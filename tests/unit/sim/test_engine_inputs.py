"""What goes into a replay: the machine, the costs, the outages and the jobs of a trace."""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from slurm_ext.domain.errors import DataError
from slurm_ext.sim.build import Terms, build, truths_for
from slurm_ext.sim.costs import Costs, parse_costs, read_costs
from slurm_ext.sim.hardware import Hardware, NodeGroup, parse_cluster
from slurm_ext.sim.library import COSTS, THROUGHPUT
from slurm_ext.sim.outages import Outage, parse_outages, read_outages
from slurm_ext.sim.overhead import Overhead

# -- the machine ---------------------------------------------------------------------------------


def test_cluster_as_written() -> None:
    plain = parse_cluster("8x4xV100")
    assert (plain.nodes, plain.gpus_per_node, plain.gpu_type, plain.gpus) == (8, 4, "V100", 32)
    assert parse_cluster("8x4") == Hardware(8, 4)
    mixed = parse_cluster("2x4xV100, 1x8xA100")
    assert mixed.groups == (NodeGroup(2, 4, "V100"), NodeGroup(1, 8, "A100"))
    assert (mixed.gpus, mixed.gpus_of("A100")) == (16, 8)
    assert [(n.name, n.gpus, n.gpu_type) for n in mixed.inventory()] == [
        ("n1", 4, "V100"),
        ("n2", 4, "V100"),
        ("n3", 8, "A100"),
    ]
    assert mixed.pools() == {"main:V100": ("n1", "n2"), "main:A100": ("n3",)}


@pytest.mark.parametrize(
    "text", ["", "8", "8x", "x4", "0x4", "8x0", "8x4xV100,", "8x4;2x8", "8x4xV100,2x8", "9999999x4"]
)
def test_other_clusters_are_refused(text: str) -> None:
    with pytest.raises(DataError, match="cluster"):
        parse_cluster(text)


def test_placements_are_what_the_nodes_have_room_for() -> None:
    mixed = Hardware(groups=(NodeGroup(2, 4), NodeGroup(1, 8)))
    assert mixed.placements(4, "") == ((4,),)
    assert mixed.placements(8, "") == ((4, 4), (8,))
    # Three nodes of four: the node of eight is one of them.
    assert mixed.placements(12, "") == ((4, 4, 4), (8, 4))
    assert mixed.placements(16, "") == ()
    assert mixed.placements(17, "") == ()
    assert Hardware(2, 4, pooled=True).placements(7, "") == ((7,),)
    assert Hardware(2, 4).placements(6, "") == ((4, 2),)
    assert Hardware(2, 4).placements(9, "") == ()


# -- costs and outages ---------------------------------------------------------------------------


def test_costs_of_the_package_and_of_a_plain_switch_table() -> None:
    costs = read_costs(COSTS)
    assert costs.checkpoint_s == 30
    assert costs.start_s("vit", "V100") == pytest.approx(34.161)
    assert costs.start_s("vit", "a100") == pytest.approx(134.965)
    assert costs.start_s("unknown", "V100") == 30
    table = parse_costs(["model,gpu_type,task,context_switch_s", "vit,V100,food101,4.5"], "x")
    assert (table.cold_s("vit", "V100"), table.checkpoint_s) == (4.5, 0)


def test_every_kind_of_cost_lands_in_its_place() -> None:
    kinds = {
        "checkpoint": 1,
        "checkpoint_every": 2,
        "start_up": 3,
        "save": 4,
        "requeue_delay": 5,
        "warm_for": 6,
        "scheduling_cycle": 7,
        "launch": 8,
        "epilog": 9,
        "grace": 10,
    }
    lines = ["kind,model,gpu_type,seconds", *(f"{kind},,,{s}" for kind, s in kinds.items())]
    lines += [
        "cold_start,,,20",
        "cold_start,vit,,21",
        "cold_start,,A100,22",
        "cold_start,vit,A100,23",
    ]
    lines += ["pipeline_switch,,,0.7"]
    costs = parse_costs(lines, "x")
    assert costs == Costs(
        checkpoint_s=1,
        checkpoint_every_s=2,
        start_up_s=3,
        save_s=4,
        requeue_delay_s=5,
        warm_for_s=6,
        overhead=Overhead(7, 8, 9, 10),
        cold_switch_s=costs.cold_switch_s,
        pipeline_switch_s={("", ""): 0.7},
    )
    assert [costs.cold_s(*key) for key in [("a", "b"), ("vit", "b"), ("a", "A100")]] == [20, 21, 22]
    assert costs.cold_s("vit", "A100") == 23
    assert costs.warm_s("vit", "A100") == 0.7
    assert costs.warm_s("", "A100") is None  # ranks of an unknown model cannot be kept
    assert costs.without_switch().warm_s("vit") is None


def test_the_template_of_costs_with_its_comments_is_read() -> None:
    head = ["# Seconds that a job pays", "", "kind,model,gpu_type,gpus,seconds,source"]
    assert parse_costs([*head, "cold_start,vit,,,5,x"], "x").cold_s("vit") == 5
    with pytest.raises(DataError, match="x, line 5: unknown kind 'warm'"):
        parse_costs([*head, "# more", "warm,vit,,,5,x"], "x")


def test_rows_of_the_throughput_table_are_costs_too() -> None:
    """What a report on switches writes: of several GPU counts the dearest, and no naive one."""
    lines = [
        "kind,model,gpu_type,gpus,seconds,source",
        "switch,vit,V100,2,0.5,report",
        "switch,vit,V100,8,0.75,report",
        "switch,vit,V100,4,0.25,report",
        "naive_switch,vit,V100,8,9,report",
        "cold_start,vit,V100,8,20,report",
    ]
    costs = parse_costs(lines, "x")
    assert costs.warm_s("vit", "V100") == 0.75
    assert costs.cold_s("vit", "V100") == 20
    assert costs.without_switch().warm_s("vit", "V100") is None


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["a,b"], "no column kind"),
        (["kind,model,gpu_type,seconds", "warp,,,1"], "line 2: unknown kind 'warp'"),
        (["kind,model,gpu_type,seconds", "save,,,soon"], "line 2: 'soon': not a number"),
        (["kind,model,gpu_type,seconds", "save,,,-1"], "not 0 or more"),
        (["kind,model,gpu_type,seconds", "save,,"], "not a number"),
        (["model,gpu_type,context_switch_s", "vit,V100,nan"], "not 0 or more"),
        (["kind,model,gpu_type,seconds", "save,,,5,9"], "line 2: more cells than columns"),
        (["kind,model,gpu_type,seconds", "save,,,5", "save,,,7"], "line 3: save also on line 2"),
        (
            ["kind,model,gpu_type,seconds", "cold_start,vit,V100,5", "cold_start,vit,v100,7"],
            "line 3: a second cold_start of vit on V100",
        ),
        (["kind,model,gpu_type,seconds", "scheduling_cycle,,,1e-9"], "1e-09 is lost in the"),
    ],
)
def test_bad_costs_are_refused_with_their_line(lines: list[str], said: str) -> None:
    with pytest.raises(DataError, match=said):
        parse_costs(lines, "costs.csv")


def test_a_mark_of_byte_order_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    """Spreadsheets write one."""
    costs, outages = tmp_path / "costs.csv", tmp_path / "outages.csv"
    costs.write_bytes(b"\xef\xbb\xbfkind,model,gpu_type,seconds\r\nsave,,,5\r\n")
    outages.write_bytes(b"\xef\xbb\xbfnode,down_s,up_s\r\nn1,5,9\r\n")
    assert read_costs(costs).save_s == 5
    assert read_outages(outages, {"n1"}) == (Outage("n1", 5, 9),)


def test_damaged_gzip_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.csv.gz"
    packed = bytearray(gzip.compress(b"kind,model,gpu_type,seconds\nsave,,,5\n" * 50))
    packed[12:30] = bytes(18)
    path.write_bytes(packed)
    with pytest.raises(DataError, match="cannot be read"):
        read_costs(path)


def test_outages_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "outages.csv"
    path.write_text("node,down_s,up_s\nn1,10,20\nn2,5,\n")
    assert read_outages(path, {"n1", "n2"}) == (Outage("n1", 10, 20), Outage("n2", 5, math.inf))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["node,down_s"], "no column up_s"),
        (["node,down_s,up_s", "n9,1,2"], "line 2: unknown node 'n9'; name one of n1, n2"),
        (["node,down_s,up_s", "n1,2,1"], "not an interval"),
        (["node,down_s,up_s", "n1,nan,"], "not an interval"),
        (["node,down_s,up_s", "n1,x,2"], "not an interval"),
        (["node,down_s,up_s", "n1"], "not an interval"),
        (["node,down_s,up_s", "n1,5,9,7"], "line 2: more cells than columns"),
    ],
)
def test_bad_outages_are_refused_with_their_line(lines: list[str], said: str) -> None:
    with pytest.raises(DataError, match=said):
        parse_outages(lines, "outages.csv", ["n1", "n2"])


# -- jobs of a trace -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """As a reader gives them."""

    job_id: str = "a"
    submit_s: float = 60.0
    duration_s: float | None = None
    gpus: int = 4
    model: str = ""
    batch: int = 0
    samples: float = 0.0
    user: str = ""
    limit_s: float | None = None
    gpu_type: str = ""


ELASTIC = Row(model="vit", batch=128, samples=1e6)
V100 = parse_cluster("8x4xV100")
STARTER = read_costs(COSTS)


def truths(hardware: Hardware) -> dict:
    return truths_for(THROUGHPUT, hardware, STARTER)


def test_elastic_job_follows_the_rule_at_every_count() -> None:
    (job,) = build([ELASTIC], V100, truths(V100), STARTER).jobs
    assert set(job.true_run_s) == {1, 2, 4, 8, 16}  # 12 does not divide the batch
    assert job.true_run_s[1] > job.true_run_s[2] > job.true_run_s[4]
    assert job.start_up_s == pytest.approx(34.161)
    assert job.cold_s == pytest.approx(4.161)
    assert all(c.remaining_s.value == job.true_run_s[c.gpus] for c in job.candidates)
    assert 4 in {c.gpus for c in job.candidates}
    assert job.limit_s == pytest.approx(1.5 * job.true_run_s[4])
    assert job.error_free_s == job.true_run_s[4]


def test_rigid_job_takes_its_recorded_time_and_limit() -> None:
    rows = [Row(duration_s=500.0, limit_s=900.0, gpus=6), Row("b", duration_s=10.0)]
    one, short = build(rows, V100, truths(V100), STARTER).jobs
    assert (one.true_run_s, one.limit_s, one.start_up_s) == ({6: 500.0}, 900.0, 30)
    assert [c.configuration.placement for c in one.candidates] == [(4, 2)]
    # A job cannot start up for longer than it ran.
    assert (short.true_run_s, short.start_up_s) == ({4: 10.0}, 10.0)


def test_known_model_without_a_measured_count_falls_back_on_its_duration() -> None:
    row = replace(ELASTIC, gpus=28, duration_s=77.0)
    (job,) = build([row], V100, truths(V100), STARTER).jobs
    assert job.true_run_s == {28: 77.0}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Row(), "neither its duration nor its samples"),
        (Row(duration_s=5.0, gpus=33), "asks for 33 GPUs, more than"),
        (replace(ELASTIC, gpus=28), "nothing was measured for vit on 28 V100 GPUs as 4+4+4"),
        (replace(ELASTIC, model="gpt"), "the table has no model gpt on V100"),
        (replace(ELASTIC, model="VIT"), "no model VIT on V100; it calls one vit, and case counts"),
        (replace(ELASTIC, batch=0), "its batch is not known"),
    ],
)
def test_jobs_that_cannot_be_replayed_are_said(row: Row, said: str) -> None:
    built = build([row, Row("z", duration_s=1.0)], V100, truths(V100), STARTER)
    assert [job.job_id for job in built.jobs] == ["z"]
    assert said in built.left_out[0]
    assert built.left_out[0].startswith("job a is left out: ")


def test_density_moves_submissions_together() -> None:
    terms = Terms(density=2)
    (job,) = build([Row(duration_s=9.0)], V100, {}, Costs(), terms).jobs
    assert (job.submit_s, job.true_run_s) == (30, {4: 9.0})


def test_estimate_error_is_within_its_factor_the_jobs_own_and_leaves_the_truth() -> None:
    rows = [replace(ELASTIC, job_id=f"j{n}") for n in range(200)]
    known = truths(V100)
    exact = build(rows, V100, known, STARTER).jobs
    terms = Terms(estimate_error=0.5, seed=3)
    off = build(rows, V100, known, STARTER, terms).jobs
    assert [j.true_run_s for j in off] == [j.true_run_s for j in exact]
    factors = [
        (j.candidates[0].remaining_s.value - j.start_up_s)
        / (j.true_run_s[j.candidates[0].gpus] - j.start_up_s)
        for j in off
    ]
    assert 1 / 1.5 <= min(factors) < 0.75
    assert 1.35 < max(factors) <= 1.5
    part = build(rows[150:], V100, known, STARTER, terms).jobs
    assert part == off[150:]
    assert build(rows, V100, known, STARTER, replace(terms, seed=4)).jobs != off


def test_jobs_without_a_type_go_where_least_work_is() -> None:
    mixed = parse_cluster("1x4xV100,2x4xA100")
    rows = [Row(f"j{n}", float(n), duration_s=100.0) for n in range(6)]
    jobs = build(rows, mixed, {}, Costs()).jobs
    assert [j.gpu_type for j in jobs].count("A100") == 4
    named = build([Row(duration_s=1.0, gpu_type="v100")] * 3, mixed, {}, Costs()).jobs
    assert {j.gpu_type for j in named} == {"V100"}
    absent = build([Row(duration_s=1.0, gpu_type="H100")], mixed, {}, Costs())
    assert "wants H100 GPUs" in absent.left_out[0]
    # A machine of one type takes what there is.
    assert build([Row(duration_s=1.0, gpu_type="H100")], V100, {}, Costs()).jobs


def test_types_have_their_own_speed() -> None:
    mixed = parse_cluster("8x4xV100,8x4xA100")
    known = truths(mixed)
    assert known["A100"].switch_s["vit"] == pytest.approx(104.965)
    slow = build([replace(ELASTIC, gpu_type="V100")], mixed, known, STARTER).jobs[0]
    fast = build([replace(ELASTIC, gpu_type="A100")], mixed, known, STARTER).jobs[0]
    assert fast.true_run_s[4] - fast.start_up_s < slow.true_run_s[4] - slow.start_up_s


@pytest.mark.parametrize(
    "terms",
    [{"density": 0}, {"density": math.inf}, {"estimate_error": -1}, {"efficiency_floor": 2}],
)
def test_senseless_terms_are_refused(terms: dict) -> None:
    with pytest.raises(DataError):
        Terms(**terms)
