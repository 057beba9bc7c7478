"""Which test stands for which failure that was reported from the field.

The ids are those of real reports in public trackers; each stands for a whole kind of failure. A
case that belongs to a part that does not exist yet is listed in LATER, so that none is forgotten.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# id -> (what happens if one is careless, file, name of the test)
CASES = {
    "badconstraints-exclusive": (
        "an exclusive job requeued after a node failure is taken for a held one",
        "tests/unit/slurm/test_parse_jobs.py",
        "test_badconstraints_exclusive_is_no_hold",
    ),
    "hold-then-priority": (
        "a write lifts or freezes a job that somebody holds",
        "tests/fakes/contract.py",
        "test_a_person_s_hold_is_seen_as_one",
    ),
    "freeze": (
        "Priority= takes a job out of multifactor for good",
        "tests/unit/slurm/test_parse_rest.py",
        "test_freeze",
    ),
    "eligible-121s": (
        "a requeued job is not eligible for two minutes and nobody plans with that",
        "tests/unit/control/test_reconcile.py",
        "test_slurms_requeue_delay_is_lifted_for_a_start",
    ),
    "requeue-storm": (
        "requeues of a job, or of a whole rack, without a bound",
        "tests/unit/control/test_resume.py",
        "test_requeue_storm_each_cause_has_its_own_growing_cooldown",
    ),
    "preempt-cancel-cluster": (
        "a site cancels what it preempts, and everybody waits for the job to come back",
        "tests/unit/cli/test_check.py",
        "test_preempt_cancel_cluster_the_fix_names_the_mode",
    ),
    "sig-array": (
        "one task of an array that comes back takes the whole array with it",
        "tests/wrappers/test_launch_leaving.py",
        "test_sig_array_only_the_task_is_requeued",
    ),
    "sig-usr1-nccl": (
        "NCCL swallows USR1, so nothing is saved",
        "tests/wrappers/test_launch_leaving.py",
        "test_sig_usr1_nccl_is_warned_about",
    ),
    "sig-handler-work": (
        "a save inside a signal handler stops half-way",
        "tests/unit/ft/session/test_session_alone.py",
        "test_a_signal_saves_and_asks_for_requeue_then_the_next_attempt_goes_on",
    ),
    "sig-term-only": (
        "only TERM arrives, and it is taken for the end",
        "tests/wrappers/test_launch_leaving.py",
        "test_sig_term_only",
    ),
    "sig-one-rank": (
        "one rank hears the signal, the others wait for it in a collective",
        "tests/wrappers/test_session.py",
        "test_one_ranks_signal_is_enough_and_nothing_is_lost",
    ),
    "sig-in-collective": (
        "a rank inside a collective never runs its handler",
        "tests/wrappers/test_session.py",
        "test_a_rank_in_a_collective_leaves_before_the_grace_is_over",
    ),
    "sig-30s": (
        "torchrun's agent kills after 30 s, whatever grace Slurm gives",
        "tests/wrappers/test_launch_torchrun.py",
        "test_sig_30s_a_save_longer_than_the_agent_s_patience",
    ),
    "sig-bash": (
        "the program below a shell is not told",
        "tests/wrappers/test_launch_programs.py",
        "test_sig_bash_a_program_below_a_shell_saves_all_the_same",
    ),
    "sig-step-race": (
        "the step that a requeue tears down counts as a crash",
        "tests/wrappers/test_launch_programs.py",
        "test_other_ranks_leave_when_rank_0_has_decided",
    ),
    "log-overwrite": (
        "a requeue truncates the job's output",
        "tests/wrappers/test_launch_leaving.py",
        "test_log_overwrite_is_warned_about",
    ),
    "timeout-order": (
        "time-outs in an order in which the wrong one fires first",
        "tests/unit/ft/launch/test_timeouts.py",
        "test_timeout_order",
    ),
    "ckpt-atomic": (
        "a kill in the middle of a save leaves half a checkpoint, and it is loaded",
        "tests/wrappers/test_checkpoint_kill.py",
        "test_ckpt_atomic_killed_at_random_moments",
    ),
    "ckpt-pile": (
        "every preemption leaves one more checkpoint until the disk is full",
        "tests/unit/ft/checkpoint/test_retention.py",
        "test_ckpt_pile_only_the_last_k_stay_on_disk",
    ),
    "straggler-hidden": (
        "after a collective all ranks look equally slow",
        "tests/wrappers/test_session.py",
        "test_the_straggler_shows_before_the_collective",
    ),
    "pause-lock-peers": (
        "one rank stops, the others wait for it in a collective until they die",
        "tests/wrappers/test_pause.py",
        "test_the_naive_pause_kills_the_job",
    ),
    "pause-restore-fails": (
        "what was paused cannot be brought back, and the job hangs",
        "tests/unit/ft/pause/test_machines.py",
        "test_a_failed_restore_sends_the_job_back",
    ),
    "pause-nvls": (
        "device state is dumped although NVLS is on, and can never be restored",
        "tests/unit/ft/pause/test_nccl_settings.py",
        "test_nvls_forbids_dumping_device_state",
    ),
    "watchdog": (
        "a pause longer than the collective time-out lets the watchdog kill the job",
        "tests/wrappers/test_pause.py",
        "test_a_pause_longer_than_the_collective_timeout",
    ),
    "pg-abort-kills": (
        "aborting a process group ends the process before anything is cleaned up",
        "tests/unit/ft/pause/test_nccl_settings.py",
        "test_modes_that_end_the_process",
    ),
    "nodes>min": (
        "more required nodes than the node count keep a job pending for ever",
        "tests/unit/control/test_reconcile.py",
        "test_pins_are_never_longer_than_the_node_count",
    ),
    "hostlist-leading-zero": (
        "n[09-10] becomes n010",
        "tests/unit/domain/test_nodelist.py",
        "test_expand",
    ),
    "gpus-not-in-%b": (
        "--gpus jobs count as jobs without GPUs",
        "tests/unit/slurm/test_parse_jobs.py",
        "test_gpus_not_in_percent_b",
    ),
    "gpu-vanished": (
        "a node that lost a GPU still gets work",
        "tests/unit/slurm/test_parse_nodes.py",
        "test_gpu_vanished",
    ),
    "multi-qos reload": (
        "usage counters are wrong after a restart of slurmctld",
        "tests/unit/control/test_limits.py",
        "test_jobs_that_were_let_go_count_as_running",
    ),
    "json-list-state": (
        "job_state is a string or a list",
        "tests/unit/slurm/test_state.py",
        "test_json_list_state",
    ),
    "json-24.05": (
        "numbers are numbers or objects",
        "tests/unit/slurm/test_json_documents.py",
        "test_json_24_05_numbers",
    ),
    "squeue-gone-id": (
        "one purged job id fails the whole call",
        "tests/fakes/contract.py",
        "test_squeue_gone_id",
    ),
    "rpc-storm": (
        "one command per job and poll",
        "tests/unit/slurm/test_cli_backend.py",
        "test_rpc_storm",
    ),
    "spank-error": (
        "an error on the remote side drains the node",
        "spank/tests/test_plugin.c",
        "nothing_fails_on_a_compute_node",
    ),
    "gang-floor-blocks": (
        "a job is started in part, or nothing is decided at all",
        "tests/unit/policy/test_titan.py",
        "test_a_gang_starts_whole_or_waits_and_says_so",
    ),
    "starvation": (
        "a large job waits for ever behind a stream of small ones",
        "tests/unit/policy/test_titan.py",
        "test_a_stream_of_short_jobs_cannot_starve_a_large_one",
    ),
}

LATER = {
    "preempt-het, hot-spare-extra, ckpt-aware-victim": "fail-slow detection and preemption",
}


@pytest.mark.parametrize("case", CASES)
def test_each_case_has_its_test(case: str) -> None:
    _, path, name = CASES[case]
    text = (ROOT / path).read_text(encoding="utf-8")
    assert name in text, f"{case}: {path} has no {name}"


def test_no_case_is_listed_twice() -> None:
    later = [word for words in LATER for word in re.split(r",\s*", words)]
    assert len(later) == len(set(later))
    assert not set(later) & set(CASES)
