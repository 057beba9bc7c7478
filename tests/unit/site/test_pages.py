"""What README, the pages of site/ and docs/design.md name has to exist."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import yaml

from slurm_ext.cli.main import COMMANDS, build_parser
from slurm_ext.control.config import Config
from slurm_ext.domain.options import BY_NAME
from tests.unit.site import prose

LUA_KEYS = set(
    re.findall(r"^    (\w+) =", (prose.SITE / "lua/config.lua.example").read_text(), re.M)
)
# Words with an underscore that are no keys: kinds of costs in the throughput table.
OTHER_WORDS = {"slurm_ft", "cold_start"}
every_page = pytest.mark.parametrize("page", prose.PAGES, ids=prose.name)


@every_page
def test_paths_exist(page: Path):
    for path in prose.paths(page.read_text()):
        assert list(prose.REPOSITORY.glob(path.rstrip("/"))), path


@every_page
def test_links_lead_somewhere(page: Path):
    for target in prose.links(page.read_text()):
        assert (page.parent / target).exists(), target


@every_page
def test_commands_are_taken_by_the_parser(page: Path):
    for arguments in prose.commands(page.read_text()):
        if len(arguments) == 1 and arguments[0] in COMMANDS:
            continue  # only the command's name is mentioned
        build_parser().parse_args(arguments)  # exits, and so fails, where it does not know one


@every_page
def test_directive_options_exist(page: Path):
    assert prose.ft_options(page.read_text()) <= set(BY_NAME)


@every_page
def test_keys_exist(page: Path):
    words = {w for w in prose.spans(page.read_text()) if re.fullmatch(r"[a-z]+(_[a-z]+)+", w)}
    assert words <= set(Config.model_fields) | LUA_KEYS | OTHER_WORDS


@every_page
def test_nothing_is_left_to_fill_in(page: Path):
    assert not re.search(r"@@|TODO|FIXME|\bXXX\b", page.read_text())


def test_the_commands_of_both_readmes_are_seen():
    """The tests above must not pass because they find nothing."""
    root = {tuple(c[:1]) for c in prose.commands((prose.REPOSITORY / "README.md").read_text())}
    assert {("explain",), ("queue",), ("pin",), ("check",), ("daemon",), ("release",)} <= root
    site = list(prose.commands((prose.SITE / "README.md").read_text()))
    assert ["table", "import", "--starter"] in site
    assert ["release", "--resume"] in site
    assert "site/lua/*.lua" in prose.paths((prose.SITE / "README.md").read_text())


@pytest.mark.parametrize(
    "page", [p for p in prose.READMES if p.is_relative_to(prose.SITE)], ids=prose.name
)
def test_a_folder_of_site_holds_what_its_readme_says(page: Path):
    """And nothing that it does not say."""
    named = {cell.rstrip("/") for cell in prose.first_cells(page.read_text())}
    present = {p.name for p in page.parent.iterdir()} - {"README.md"}
    files = {cell for cell in named if (page.parent / cell).exists()}
    assert present <= files
    # A first cell that is no file here has to be no file name at all, or an absolute path.
    assert not [cell for cell in named - files if "." in cell and not cell.startswith("/")]


def test_the_partitions_that_site_readme_shows_are_configuration():
    shown = [b for b in prose.blocks((prose.SITE / "README.md").read_text()) if "partitions:" in b]
    assert len(shown) == 1
    lines = textwrap.dedent(shown[0]).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("partitions:"))
    text = "\n".join(line for line in lines[start:] if not line or line.startswith((" ", "part")))
    # The commented lines are the next steps: each of them has to be right as well.
    acts = re.findall(r"act: (\[[^]]*\])", text)
    assert len(acts) == 3
    for act in acts:
        Config.model_validate({"partitions": {"main": {"act": yaml.safe_load(act)}}})
    assert Config.model_validate(yaml.safe_load(text)).acting


def test_the_partitions_that_the_readme_shows_are_configuration():
    text = (prose.REPOSITORY / "README.md").read_text()
    found = [span for span in prose.spans(text) if span.startswith("partitions:")]
    assert found
    for span in found:
        assert Config.model_validate(yaml.safe_load(span)).acting


def test_the_two_lines_for_an_existing_job_submit_lua_are_the_ones_we_ship():
    ours = (prose.SITE / "job_submit.lua").read_text().rstrip().splitlines()[-2:]
    for page in (prose.REPOSITORY / "README.md", prose.SITE / "README.md"):
        lines = prose.code_lines(page.read_text())
        assert ours == lines[(at := lines.index(ours[0])) : at + 2], page
