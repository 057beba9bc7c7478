"""Job scripts that README and docs/ print in full would be planned as they stand."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import pytest

from slurm_ext.domain.forms import form_of
from slurm_ext.domain.script import parse_script
from tests.unit.site.prose import REPOSITORY

_FENCED = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)


def scripts() -> Iterator[tuple[str, str]]:
    for path in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))):
        page = path.read_text()
        blocks = [*_FENCED.findall(page), *map(textwrap.dedent, _INDENTED.findall(page))]
        for number, block in enumerate(block for block in blocks if "#SBATCH --ft-" in block):
            yield f"{path.name}-{number}", block


@pytest.mark.parametrize("script", [pytest.param(text, id=name) for name, text in scripts()])
def test_a_printed_script_asks_for_gpus_and_has_a_form(script: str) -> None:
    """Without GPUs of its own nothing is planned for a job, however many --ft-* lines it has."""
    found = parse_script(script, now_s=0.0)
    assert found.gpus > 0
    assert found.directive.model
    _, shape = form_of(found)
    assert shape.gpus == found.gpus


def test_the_scripts_are_found() -> None:
    names = [name.rpartition("-")[0] for name, _ in scripts()]
    assert names.count("README.md") == 2
    assert {"directives.md", "ft-run.md", "switch.md"} <= set(names)
