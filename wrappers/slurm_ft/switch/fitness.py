"""Whether a task of a chain can be trained on the ranks that there are, asked before it is begun.

Answers are words for people, "" where nothing is wrong: a task that does not fit is left out and
named, and never an error here. Nothing is exchanged, and nothing is kept; that every rank comes to
the same decision is `slurm_ft.switch.following`'s to see to.

A task that has begun is measured against its newest complete checkpoint too. One that became
another since would train a mixture of both, which nobody could tell from its result.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurm_ext.domain.errors import ConfigError
from slurm_ft.checkpoint.layout import examine
from slurm_ft.switch.chain import ChainState
from slurm_ft.switch.spread import layout_for
from slurm_ft.train.layout import Layout, Wish, stages_of
from slurm_ft.train.output import fault
from slurm_ft.train.program import check_position
from slurm_ft.train.ranks import Ranks
from slurm_ft.train.task import Task


class Fitness:
    """One rank's answers."""

    def __init__(
        self, chain: ChainState, wish: Wish, environ: Mapping[str, str], ranks: Ranks
    ) -> None:
        self._chain, self._wish, self._environ, self._ranks = chain, wish, environ, ranks

    def layout(self, task: Task) -> Layout:
        """How a task is spread here. Raises ConfigError where it cannot be."""
        return layout_for(task, self._wish, self._environ, self._ranks.world)

    def unfit(self, task: Task) -> str:
        """Why a task cannot be trained here, or not be gone on with."""
        try:
            layout = self.layout(task)
            found = examine(self._chain.checkpoints_of(task)).complete
            if found:
                check_position(found[0].step, found[0].manifest.position, layout, task)
        except ConfigError as exc:
            return str(exc)
        return ""

    def unwritable(self, output: str) -> str:
        """Why this rank's part of a result could not be written into a directory."""
        # The first replica's ranks write, the manifest's among them.
        writes = self._ranks.rank < stages_of(self._environ, self._wish)
        return fault(output) if writes else ""
