"""The manual pages are what the generator prints, say everything, and are sound roff."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess

import pytest

from slurm_ext.cli import roff
from slurm_ext.cli.main import COMMANDS, build_parser
from slurm_ext.cli.manual import ADMINISTRATOR, PAGES, main, page, subcommands
from slurm_ext.domain.options import OPTIONS
from tests.unit.site.prose import SITE

MAN = SITE / "man"
EVERY = sorted(p.name for p in MAN.iterdir() if p.suffix != ".md")


def plain(text: str) -> str:
    """A page's words without roff's escapes."""
    text = re.sub(r"\\f[BIRP]|\\&", "", text).replace("\\-", "-").replace("\\(aq", "'")
    return text.replace("\\(ti", "~").replace("\\(dq", '"').replace("\\e", "\\")


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_committed_page_is_the_printed_one(name: str, capsys: pytest.CaptureFixture[str]):
    assert main(["--emit", name]) == 0
    printed = capsys.readouterr().out
    assert (MAN / name).read_text() == printed, f"python -m slurm_ext.cli.manual --emit {name}"


def every_parser() -> list[argparse.ArgumentParser]:
    found, todo = [], list(subcommands(build_parser()).values())
    while todo:
        parser = todo.pop()
        found.append(parser)
        todo += subcommands(parser).values()
    return found


@pytest.mark.parametrize("parser", every_parser(), ids=lambda p: p.prog)
def test_every_option_of_every_command_is_told_on_the_right_page(parser: argparse.ArgumentParser):
    command = parser.prog.split()[1]
    name = "slurm-ext-daemon.8" if command in ADMINISTRATOR else "slurm-ext.1"
    text = plain(page(name))
    section = text.partition(f".SS {parser.prog}\n")[2].partition("\n.S")[0]
    assert section
    for action in parser._actions:
        if "--help" in action.option_strings:
            continue
        for option in action.option_strings:
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", section), option
        if action.help and not isinstance(action, argparse._SubParsersAction):
            assert action.help[1:] in section
    other = "slurm-ext.1" if command in ADMINISTRATOR else "slurm-ext-daemon.8"
    assert f".SS {parser.prog}\n" not in plain(page(other))


def test_administrators_commands_exist():
    assert set(ADMINISTRATOR) < set(COMMANDS)


def test_every_directive_option_is_told_with_its_bounds_and_environment():
    text = plain(page("slurm-ext-directives.7"))
    for option in OPTIONS:
        assert f"{option.flag}={option.metavar}" in text
        assert option.twin in text
        assert option.doc.replace("`", "") in text
    assert "launcher-per-node" in text  # the part behind the options


def test_pages_refer_to_pages_that_exist():
    own = set(EVERY)
    for name in EVERY:
        references = re.findall(r"\b(slurm-ext[\w-]*)\s?\((\d)\)", plain((MAN / name).read_text()))
        assert references
        assert {f"{page}.{section}" for page, section in references} <= own


@pytest.mark.parametrize("name", EVERY)
def test_roff_is_sound(name: str):
    """What groff would warn of, without groff: unknown requests and escapes, unbalanced blocks."""
    requests = []
    for line in (MAN / name).read_text().splitlines():
        if line.startswith('.\\"'):
            continue
        assert not line.startswith("'"), line
        if line.startswith("."):
            requests.append(line.split()[0])
        escapes = re.findall(r"\\(\(..|f.|.)", line)
        assert set(escapes) <= {
            "-", "&", "e", "fB", "fI", "fR",
            *("(aq", "(ga", "(ha", "(ti", "(dq", "(bu"),
        }, line  # fmt: skip
        assert line == line.rstrip()
    known = {".TH", ".SH", ".SS", ".PP", ".TP", ".IP", ".BR", ".I", ".B", ".br", ".sp"}
    assert set(requests) <= known | {".nf", ".fi", ".RS", ".RE", ".nh", ".ad"}
    assert requests.count(".nf") == requests.count(".fi")
    assert requests.count(".RS") == requests.count(".RE")
    assert requests.count(".TH") == 1


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
@pytest.mark.parametrize("name", EVERY)
def test_groff_has_no_warnings(name: str):
    argv = ["groff", "-ww", "-man", "-Tutf8", "-z", str(MAN / name)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_text_cannot_become_a_request_or_an_escape():
    assert roff.text(".sh and \\n") == "\\&.sh and \\en"
    assert roff.text("'quoted'") == "\\(aqquoted\\(aq"
    assert roff.marked("`.x` and a-b") == "\\fB.x\\fR and a\\-b"
    assert roff.marked(".x `y`").startswith("\\&.")


def test_markdown_is_translated_whole_or_not_at_all():
    text = "# T\n\n<!-- no -->\n\ntwo\nlines\n\n## Part\n\n* one\n  more\n* two\n\n"
    text += "```sh\n.a\n\nb\n```\n"
    assert roff.from_markdown(text) == [
        *(".PP", "two lines", ".SH PART", ".IP \\(bu 2", "one more", ".IP \\(bu 2", "two"),
        *(".PP", ".RS 4", ".nf", "\\&.a", ".sp", "b", ".fi", ".RE"),
    ]
    for bad in ("### deeper", "> quoted", "- dash", "a `lone quote", "```\nopen"):
        with pytest.raises(ValueError, match=r"not understood|twin|fence"):
            roff.from_markdown(bad)


def test_tables_become_tagged_paragraphs():
    text = "| A | B | C |\n|---|---|---|\n| `x` | 1 \\| 2 | 3 |\n"
    assert roff.from_markdown(text) == [".TP", "\\fBx\\fR", "B: 1 | 2. C: 3."]
    with pytest.raises(ValueError, match="zip"):
        roff.from_markdown("| A | B |\n|---|---|\n| x | 1 | 2 |\n")
