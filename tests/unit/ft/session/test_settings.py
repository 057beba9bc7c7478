"""What a session reads from its environment."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from slurm_ext.domain.errors import ConfigError
from slurm_ft import variables
from slurm_ft.session.interval import Bounds
from slurm_ft.session.settings import DEFAULT_COLLECTIVE_TIMEOUT_S, read_settings
from slurm_ft.session.signals import parse_signals


def test_an_empty_environment_is_a_laptop() -> None:
    settings = read_settings({})
    assert settings.job_id == "local"
    assert settings.attempt == 0
    assert settings.checkpoint_dir == Path("ft-checkpoints/local")
    assert not settings.under_ft_run
    assert settings.signals == (signal.SIGUSR2, signal.SIGTERM)
    assert settings.collective_timeout_s == DEFAULT_COLLECTIVE_TIMEOUT_S
    assert settings.grace_s is None


def test_slurm_without_ft_run() -> None:
    settings = read_settings(
        {
            "SLURM_JOB_ID": "1235",
            "SLURM_ARRAY_JOB_ID": "1234",
            "SLURM_ARRAY_TASK_ID": "2",
            "SLURM_RESTART_COUNT": "3",
            "SLURM_SUBMIT_DIR": "/home/u",
            "SLURM_JOB_NUM_NODES": "4",
        }
    )
    # sig-array: a task is named by array and task, as requeue needs it.
    assert settings.job_id == "1234_2"
    assert settings.attempt == 3
    assert settings.nodes == 4
    assert settings.checkpoint_dir == Path("/home/u/ft-checkpoints/1234_2")


def test_everything_that_ft_run_says() -> None:
    settings = read_settings(
        {
            variables.JOB: "77",
            variables.ATTEMPT: "2",
            variables.STATUS: "/s/status-0.json",
            variables.PROGRESS: "/p/progress-77.json",
            variables.STATE_DIR: "/s",
            variables.CHECKPOINT_DIR: "/c",
            variables.BLOCK_STORE: "/b",
            variables.SIGNALS: "usr2, SIGTERM,USR2",
            variables.GRACE_S: "60",
            variables.COLLECTIVE_TIMEOUT_S: "300",
            variables.CHECKPOINT_INTERVAL: "30-90",
            variables.MTBF_S: "1000",
            variables.PROGRESS_INTERVAL_S: "0.5",
            variables.GPUS: "8",
            variables.NODES: "2",
            variables.PLAN_DIGEST: "abc",
            variables.PRECISION: "bf16",
            "SLURM_RESTART_COUNT": "9",
        }
    )
    assert settings.under_ft_run
    assert settings.attempt == 2
    assert settings.signals == (signal.SIGUSR2, signal.SIGTERM)
    assert (settings.grace_s, settings.collective_timeout_s) == (60, 300)
    assert settings.bounds == Bounds(30, 90)
    assert (settings.mtbf_s, settings.progress_interval_s) == (1000, 0.5)
    assert (settings.gpus, settings.nodes, settings.plan_digest) == (8, 2, "abc")
    assert settings.plan == {
        variables.GPUS: "8",
        variables.NODES: "2",
        variables.PRECISION: "bf16",
    }
    assert settings.block_store == Path("/b")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (variables.GRACE_S, "soon"),
        (variables.GRACE_S, "-1"),
        (variables.GRACE_S, "nan"),
        (variables.COLLECTIVE_TIMEOUT_S, "0"),
        (variables.COLLECTIVE_TIMEOUT_S, "inf"),
        (variables.MTBF_S, "0"),
        (variables.PROGRESS_INTERVAL_S, "0"),
        (variables.GPUS, "-2"),
        (variables.NODES, "0"),
        (variables.ATTEMPT, "first"),
        (variables.JOB, "../../etc"),
        (variables.SIGNALS, "USR3"),
        (variables.SIGNALS, "KILL"),
        (variables.SIGNALS, " , "),
        (variables.CHECKPOINT_INTERVAL, "often"),
    ],
)
def test_what_cannot_be_used_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read_settings({name: value})


@pytest.mark.parametrize("name", [variables.GRACE_S, variables.GPUS, variables.MTBF_S])
def test_an_empty_variable_is_an_unset_one(name: str) -> None:
    assert read_settings({name: ""}) == read_settings({})


def test_no_grace_at_all_is_a_grace() -> None:
    assert read_settings({variables.GRACE_S: "0"}).grace_s == 0


def test_usr1_is_possible_but_not_the_default() -> None:
    """sig-usr1-nccl: a release of NCCL swallows USR1, so it is never ours by default."""
    assert signal.SIGUSR1 not in read_settings({}).signals
    assert parse_signals("USR1") == (signal.SIGUSR1,)
