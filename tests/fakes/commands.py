"""Fake Slurm commands on PATH that answer with what a real Slurm 24.11.5 printed.

They are strict where the real ones are: an option, column or keyword that the real command would
refuse is refused, and an environment that would change its output makes it fail. So a mistake in
an argument list fails a test instead of passing by. ``scontrol update`` knows the recorded jobs and
writes down what it was told. Faults per command: ``hang``, ``hang-child`` (a wrapper script
whose child hangs), ``fail``, ``signal``, ``cut`` (in the middle of a row) and ``short`` (whole rows
missing, exit code 0).

    commands = FakeCommands(tmp_path, data / "24.11")
    monkeypatch.setenv("PATH", commands.path())
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

COMMANDS = ("squeue", "sprio", "scontrol", "sdiag", "sacctmgr", "id")
FAULTS = frozenset({"", "hang", "hang-child", "fail", "signal", "cut", "short"})


class FakeCommands:
    """Puts the commands into a directory; ``log()`` gives the updates that were written."""

    def __init__(self, folder: Path, recorded: Path) -> None:
        self.folder = folder
        self._log = folder / "updates.log"
        self._log.touch()
        self.set_faults()
        here = str(Path(__file__).resolve().parent)
        for command in COMMANDS:
            script = folder / command
            script.write_text(
                f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {here!r})\n"
                f"import replay\nreplay.main({command!r}, {str(folder)!r}, {str(recorded)!r})\n"
            )
            script.chmod(script.stat().st_mode | stat.S_IXUSR)

    def path(self) -> str:
        """PATH with the fakes first."""
        return f"{self.folder}{os.pathsep}{os.environ['PATH']}"

    def set_faults(self, **faults: str) -> None:
        """How each command goes wrong from now on, e.g. ``squeue="cut"``."""
        if not set(faults) <= set(COMMANDS) or not set(faults.values()) <= FAULTS:
            raise ValueError(f"unknown command or fault in {faults}")
        for command in COMMANDS:
            (self.folder / f"fault.{command}").write_text(faults.get(command, ""))

    def log(self) -> list[str]:
        """Lines of ``scontrol update``, in their order."""
        return self._log.read_text().splitlines()
