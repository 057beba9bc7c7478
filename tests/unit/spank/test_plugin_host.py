"""The plugin's C tests, and what its object must look like to Slurm."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest


def test_the_stub_host_checks_pass(spank_build: Path) -> None:
    log = (spank_build / "check.log").read_text()
    match = re.search(r"^(\d+) checks, 0 failed$", log, re.MULTILINE)
    assert match, log
    assert int(match[1]) > 200


def test_only_what_slurm_looks_for_is_visible(spank_build: Path) -> None:
    """Another plugin in the same process must not meet our symbols."""
    if not shutil.which("nm"):
        pytest.skip("no nm on this machine (package binutils)")
    library = spank_build / "stub.so"
    objects = [*spank_build.glob("stub_*.o"), *spank_build.glob("[!s]*.o")]
    subprocess.run(
        ["cc", "-shared", "-o", str(library), *map(str, objects)], check=True, timeout=30
    )
    table = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    visible = {line.split()[-1] for line in table.splitlines()}
    assert visible == {
        "plugin_name",
        "plugin_type",
        "slurm_spank_exit",
        "slurm_spank_init",
        "slurm_spank_init_post_opt",
        "slurm_spank_user_init",
    }
