"""The C and the Lua writing of the directive grammar, each as a process that answers lines.

A line is ``NOW<TAB>option<TAB>value...``; the answer ``ok<TAB>canonical<TAB>json`` or
``err<TAB>message``. Values are escaped so that any byte can be tried.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SPANK = ROOT / "spank"
LUA_MODULE = ROOT / "site" / "lua"
LUAS = tuple(name for name in ("lua5.1", "lua5.4") if shutil.which(name))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a peer said; ``json`` is empty where it refused."""

    ok: bool
    text: str
    json: str = ""


class Peer:
    """A running process that answers one line for each line."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(env)
        )

    def ask(self, now_s: int, given: Sequence[tuple[str, bytes]]) -> Answer:
        """The peer's answer for these options, in this order."""
        words = [str(now_s).encode()]
        for name, value in given:
            words += [name.encode(), escape(value)]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\t".join(words) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline().decode("latin-1").rstrip("\n")
        if not line:
            raise AssertionError(f"the peer died on {given!r} (exit {self._process.wait()})")
        kind, *rest = line.split("\t")
        return Answer(kind == "ok", rest[0], rest[1] if len(rest) > 1 else "")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)


def escape(value: bytes) -> bytes:
    """Bytes as printable text that the peers turn back."""
    return b"".join(bytes([b]) if 32 <= b < 127 and b != 0x5C else b"\\x%02x" % b for b in value)


def build(target: Path) -> Path:
    """Build the stub-host binaries into ``target`` and run the C tests."""
    result = subprocess.run(
        ["make", "-s", "-C", str(SPANK), "check", f"BUILD={target}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if result.returncode:
        raise AssertionError(f"make check failed:\n{result.stdout}\n{result.stderr}")
    (target / "check.log").write_text(result.stdout)
    return target
