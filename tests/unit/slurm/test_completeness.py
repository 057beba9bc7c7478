"""An answer that ends early with exit code 0."""

from __future__ import annotations

import pytest

from slurm_ext.domain.errors import SourceMissingError
from slurm_ext.slurm.completeness import MEMORY_S, Completeness


def test_a_ranked_job_without_a_row_is_noticed() -> None:
    with pytest.raises(SourceMissingError, match=r"2 jobs that sprio ranks have no row, e\.g\. 3"):
        Completeness().check_rows({1, 2, 5}, [1, 3, 4], 0.0)


def test_an_empty_answer_with_ranked_jobs_is_noticed() -> None:
    with pytest.raises(SourceMissingError, match="no row"):
        Completeness().check_rows(set(), [7], 0.0)


def test_an_empty_queue_is_an_answer() -> None:
    Completeness().check_rows(set(), [], 0.0)


def test_a_job_submitted_between_the_two_answers_is_no_cut() -> None:
    Completeness().check_rows({1, 2}, [1, 3, 4], 0.0)


def test_a_job_of_the_last_answer_cannot_vanish_at_once() -> None:
    whole = Completeness()
    whole.remember([1, 2, 3], 100.0)
    with pytest.raises(SourceMissingError, match="1 jobs that waited or ran 5 s ago"):
        whole.check_rows({1, 3}, [1], 105.0)
    whole.check_rows({1, 2, 3, 4}, [1], 105.0)


@pytest.mark.parametrize("min_job_age_s", [300.0, 2.0])
def test_memory_is_short_so_that_a_controller_with_lost_state_is_believed(
    min_job_age_s: float,
) -> None:
    whole = Completeness(min_job_age_s)
    whole.remember([1, 2, 3], 100.0)
    whole.check_rows(set(), [], 100.0 + min(MEMORY_S, min_job_age_s))
    with pytest.raises(SourceMissingError):
        whole.check_rows(set(), [], 100.0 + min(MEMORY_S, min_job_age_s) - 0.5)


def test_a_priority_list_that_ends_early_is_noticed() -> None:
    """sprio prints by id: jobs beyond its last row that have long been eligible were cut off."""
    whole = Completeness()
    with pytest.raises(SourceMissingError, match=r"sprio.*2 eligible jobs beyond its last row"):
        whole.check_ranks([(1, 0.0), (2, 0.0), (3, 10.0), (4, 99.0)], [1], 100.0)
    with pytest.raises(SourceMissingError):
        whole.check_ranks([(1, 0.0)], [], 100.0)
    # Job 4 has only just become eligible, job 2 lies before the last row: not a cut.
    whole.check_ranks([(1, 0.0), (2, 0.0), (3, 0.0), (4, 99.0)], [1, 3], 100.0)


def test_what_slurm_never_ranks_is_believed_after_a_minute() -> None:
    whole = Completeness()
    with pytest.raises(SourceMissingError):
        whole.check_ranks([(9, 0.0)], [1], 100.0)
    with pytest.raises(SourceMissingError):
        whole.check_ranks([(9, 0.0)], [1], 100.0 + MEMORY_S - 1)
    whole.check_ranks([(9, 0.0)], [1], 100.0 + MEMORY_S)
    # Once all is well the count begins anew.
    whole.check_ranks([(9, 0.0)], [1, 9], 200.0)
    with pytest.raises(SourceMissingError):
        whole.check_ranks([(9, 0.0)], [1], 210.0)
