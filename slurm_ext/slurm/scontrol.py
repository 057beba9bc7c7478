"""Many requests through one ``scontrol`` process, read from its standard input.

scontrol prints an error and goes on with the next line, and its exit code says only that something
failed. So after each update a line follows that is no command: scontrol answers it on stderr
("invalid keyword: ..."), in order with the errors, which tells to which update an error belongs,
and that the update was carried out at all. 500 updates take 0.4 s in one process, 2 s in 500.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from slurm_ext.domain.action import Action, ActionResult
from slurm_ext.domain.errors import SlurmCommandError
from slurm_ext.slurm.process import CommandRunner

ARGV = ("scontrol",)
# A build without readline reads its input in pieces of 4 KiB and takes the rest of a longer line
# for another command; such an update gets a process of its own.
MAX_LINE = 4000
_ID = re.compile(r"\d+(?:\+\d+)?(?:_(?:\d+|\[[\d,-]+\]))?", re.ASCII)
_KEYWORD = re.compile(r"[A-Za-z]+", re.ASCII)
# scontrol splits at blanks and takes quotes and backslashes apart; control characters end lines.
_VALUE = re.compile(r"[^\s\"'\\;\x00-\x1f\x7f]*")
# Answers after which nobody knows what was written.
_UNREACHABLE = re.compile(
    r"unable to contact slurm controller|socket timed out|zero bytes were transmitted"
    r"|connection (?:refused|reset)|communication (?:connection )?failure|resource temporarily",
    re.IGNORECASE,
)
# A limit on top of the runner's own: slurmctld takes about 0.2 ms per update, under load far more.
_SECONDS_PER_UPDATE = 0.05


def update_words(action: Action) -> list[str]:
    """``update JobId=... k=v ...`` as words. Raises ValueError for what cannot be sent safely."""
    if not _ID.fullmatch(action.job_id):
        raise ValueError(f"{action.job_id!r} is not a job id that scontrol takes")
    words = ["update", f"JobId={action.job_id}"]
    for keyword, value in action.fields:
        if not _KEYWORD.fullmatch(keyword) or not _VALUE.fullmatch(value):
            raise ValueError(f"{keyword}={value!r} cannot be written in one word")
        words.append(f"{keyword}={value}")
    return words


def apply_updates(runner: CommandRunner, actions: Sequence[Action]) -> list[ActionResult]:
    """Write the actions in their order; one result each.

    Raises SlurmCommandError where it is unknown which of them were carried out.
    """
    results: list[ActionResult] = []
    batch: list[tuple[Action, str]] = []
    for action in actions:
        try:
            words = update_words(action)
        except ValueError as exc:
            results.extend(_send(runner, batch))
            batch = []
            results.append(ActionResult(action, False, f"not sent: {exc}"))
            continue
        line = " ".join(words)
        if len(line) > MAX_LINE:
            results.extend(_send(runner, batch))
            batch = []
            results.append(_send_alone(runner, action, words))
        else:
            batch.append((action, line))
    results.extend(_send(runner, batch))
    return results


def _send(runner: CommandRunner, batch: Sequence[tuple[Action, str]]) -> list[ActionResult]:
    if not batch:
        return []
    mark = f"mark{secrets.token_hex(6)}x"
    text = "".join(f"{line}\n{mark}{index}\n" for index, (_, line) in enumerate(batch))
    limit = runner.timeout_s + _SECONDS_PER_UPDATE * len(batch)
    answer = runner.run(ARGV, stdin=text, timeout_s=limit, check=False)
    results: list[ActionResult] = []
    errors: list[str] = []
    for line in answer.stderr.splitlines():
        if line.endswith(f"{mark}{len(results)}"):
            results.append(ActionResult(batch[len(results)][0], not errors, "; ".join(errors)))
            errors = []
            if len(results) == len(batch):
                break
        elif line.strip():
            errors.append(line.strip())
    if len(results) < len(batch):
        raise SlurmCommandError(
            ARGV,
            answer.rc,
            f"ended after {len(results)} of {len(batch)} updates: {'; '.join(errors)}",
        )
    _raise_if_unreachable(results)
    return results


def _send_alone(runner: CommandRunner, action: Action, words: list[str]) -> ActionResult:
    answer = runner.run([*ARGV, *words], check=False)
    message = "; ".join(line.strip() for line in answer.stderr.splitlines() if line.strip())
    result = ActionResult(action, answer.rc == 0, message)
    _raise_if_unreachable([result])
    return result


def _raise_if_unreachable(results: Sequence[ActionResult]) -> None:
    for result in results:
        if not result.ok and _UNREACHABLE.search(result.message):
            raise SlurmCommandError(ARGV, 1, f"{result.action.job_id}: {result.message}")
