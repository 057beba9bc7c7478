"""Whether the command is a launcher, which starts the ranks of its node and numbers them itself.

Told by the command where that tells it. Else by what was asked for; where a task stands says
nothing, since the next attempt may stand elsewhere: two tasks with GPUs of their own share a node
today and have one each tomorrow. One task per node with several GPUs, asked for by node, remains:
a script that starts torchrun, or a framework that starts its own ranks. That is a guess, for which
a node's GPUs count, and a job may get others when it comes back. So the first attempt's guess is
kept in the state directory, and holds for the program of that step in all attempts.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# Programs that number the ranks of their node themselves.
_LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed"})
_LAUNCHER_MODULES = frozenset(
    {
        "torch.distributed.run",
        "torch.distributed.launch",
        "accelerate.commands.launch",
        "deepspeed.launcher.runner",
        "deepspeed.launcher.launch",
    }
)
_MOST_BYTES = 512


class Judgement:
    """``because`` is for people. ``guessed``: nothing but the form of the step speaks for it."""

    __slots__ = ("because", "guessed", "launcher")

    def __init__(self, launcher: bool, because: str = "", guessed: bool = False):
        self.launcher = launcher
        self.because = because
        self.guessed = guessed


def judge(
    command: Sequence[str], *, tasks: int, nodes: int, on_node: int, asked: int, per_task: int
) -> Judgement:
    """Judge a command in a step of ``tasks`` (0 = no step) on ``nodes``.

    ``on_node`` GPUs are on this node, ``asked`` tasks per node and ``per_task`` GPUs per task were
    asked for (0 = not asked).
    """
    words = list(command[:6])
    if name := started_by(words):
        return Judgement(True, f"{name} starts ranks")
    # Ours starts no ranks, whatever its place; nor is there anything to judge without a step.
    if not tasks or (_module(words) + ".").startswith("slurm_ft."):
        return Judgement(False)
    if per_task and asked != 1:
        return Judgement(False)
    if tasks != nodes or on_node <= 1:
        return Judgement(False, guessed=True)
    because = f"one task stands on each node, with {on_node} GPUs"
    if asked == 1:
        because = f"--ntasks-per-node=1 was asked for, with {on_node} GPUs on the node"
    return Judgement(True, because, guessed=True)


def keep(directory: str, job: str, step: int, command: Sequence[str], judged: Judgement) -> None:
    """Note the first attempt's guess for the others. Without a directory they guess again."""
    if not directory:
        return
    path = _path(directory, job, step, command)
    text = f"yes {judged.because}" if judged.launcher else "no"
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        return


def recall(directory: str, job: str, step: int, command: Sequence[str]) -> Judgement | None:
    """What an earlier attempt guessed about this program in this step; ``None``: not known."""
    if not directory:
        return None
    try:
        with open(_path(directory, job, step, command), encoding="utf-8", errors="replace") as file:
            word, _, because = file.read(_MOST_BYTES).partition(" ")
    except OSError:
        return None
    if word not in ("yes", "no"):
        return None
    return Judgement(word == "yes", f"{because} when this job began" if because else "")


def started_by(words: Sequence[str]) -> str:
    """Name of the launcher in a command line, with or without its interpreter; empty for none."""
    if not words:
        return ""
    first = os.path.basename(words[0])
    if first in _LAUNCHERS:
        return first
    if not first.startswith("python"):
        return ""
    module = _module(words)
    if module:
        return module if module in _LAUNCHER_MODULES else ""
    script = os.path.basename(_script(words))
    return script if script in _LAUNCHERS else ""


def _module(words: Sequence[str]) -> str:
    """``x.y`` of ``python -u -m x.y``."""
    if not words or not os.path.basename(words[0]).startswith("python"):
        return ""
    for at, word in enumerate(words[1:], 1):
        if word == "-m":
            return words[at + 1] if at + 1 < len(words) else ""
        if not word.startswith("-"):
            return ""
    return ""


def _script(words: Sequence[str]) -> str:
    """The first word that is no option: a script, or what stands in its place."""
    return next((word for word in words[1:] if not word.startswith("-")), "")


def _path(directory: str, job: str, step: int, command: Sequence[str]) -> str:
    import zlib

    # The step alone would not do: a script may leave out what an earlier attempt has done. What
    # follows the program's name may differ, such as the checkpoint that it begins from.
    words = (command[0], _script(command)) if command else ()
    mark = zlib.crc32("\0".join(words).encode(errors="surrogateescape"))
    return os.path.join(directory, f"launcher-{job}-{step}-{mark:08x}")
