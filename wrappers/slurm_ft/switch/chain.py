"""A chain of tasks on one allocation: its file, what was appended, which tasks are done. No torch.

The file lists tasks as the reference trainer knows them; keys that all of them share stand once::

    common: {model: vit, depth: 12, frozen: backbone, global_batch: 64}
    tasks:
      - {name: birds, seed: 1, steps: 400, output: out/birds, quality: top1>=0.8}
      - {name: cars, seed: 2, steps: 300, output: out/cars}

Tasks appended while the chain runs lie beside the job's other small files, one file each, in the
order of their numbers; the directory belongs to the job's user. The keys of ``common`` are of the
file alone. A task is done when its record says so, and the record is written last: after its final
checkpoint and its result are durable.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_ext.domain.errors import ConfigError
from slurm_ft.checkpoint.hashing import replace_durably, sync_directory, write_new
from slurm_ft.switch.claims import Claims
from slurm_ft.train.task import Task, make_task

# Names become directories.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
_NUMBER = re.compile(r"(\d{1,9})-")
_ADDED = "chain.d"
_GIVEN = "given"
_CLOSED = "closed"
_RECORDS = "chain"
MAX_FILE_BYTES = 1 << 20
MAX_TASKS = 10_000
# Beside the directories of the tasks lie the chain's records and what a store keeps there.
_RESERVED = re.compile(r"chain|LATEST|step-.*")
# Between closing and looking again a chain does one listing of a directory.
_REOPEN_S = 5.0


@dataclass(frozen=True, slots=True)
class Done:
    """Record of a finished task. Times are seconds since the epoch."""

    name: str
    step: int
    metrics: Mapping[str, float]
    attempt: int
    ended_s: float


def read_chain(path: Path, directory: str = "") -> list[Task]:
    """The tasks of a chain's file. Raises ConfigError naming the file, the task and the key.

    ``directory`` is the one that relative outputs are below, "" for that of this process.
    """
    document = _parse(_read(path), path)
    common: Any = {}
    if isinstance(document, dict):
        unknown = sorted(str(key) for key in document.keys() - {"common", "tasks"})
        if unknown:
            raise ConfigError(
                f"{path}: {unknown[0]}", "there is no such key", "the keys are common and tasks"
            )
        common, document = document.get("common") or {}, document.get("tasks")
    if not isinstance(common, dict):
        raise ConfigError(f"{path}: common", "is no mapping", "write lines such as model: vit")
    if not isinstance(document, list) or not document:
        raise ConfigError(str(path), "lists no tasks", "write tasks: and a list")
    if len(document) > MAX_TASKS:
        raise ConfigError(str(path), f"lists more than {MAX_TASKS} tasks", "cut it up")
    return _tasks(document, common, path, _Taken(directory))


def read_task(path: Path) -> Task:
    """One task from a file of its own."""
    return _task_in(_read(path), path)


def _task_in(text: bytes, path: Path) -> Task:
    document = _parse(text, path)
    if isinstance(document, list) or (isinstance(document, dict) and "tasks" in document):
        raise ConfigError(
            str(path), "lists tasks, and one is wanted here", "write each into a file of its own"
        )
    return _tasks([document], {}, path, _Taken())[0]


class _Taken:
    """Names and output directories of tasks. Two results in one directory would be neither's.

    ``directory`` is the one that relative outputs are below, "" for that of this process.
    """

    def __init__(self, directory: str = "", tasks: Iterable[Task] = ()) -> None:
        self._directory = directory
        self._names: set[str] = set()
        self._outputs: dict[str, str] = {}
        for task in tasks:
            self._note(task)

    def take(self, task: Task, place: str) -> None:
        """Raise ConfigError where another task has its name or its output directory."""
        if task.name in self._names:
            raise ConfigError(f"{place}: name={task.name!r}", "is there twice", "rename one")
        if task.output and (other := self._outputs.get(self._place(task))):
            raise ConfigError(
                f"{place}: output={task.output!r}",
                f"is where the result of {other} goes",
                "give each task a directory of its own",
            )
        self._note(task)

    def _note(self, task: Task) -> None:
        self._names.add(task.name)
        if task.output:
            self._outputs.setdefault(self._place(task), task.name)

    def _place(self, task: Task) -> str:
        """Links and relative paths lead to one place."""
        return os.path.realpath(os.path.join(self._directory, task.output))


def _tasks(rows: Sequence[Any], common: Mapping[str, Any], path: Path, taken: _Taken) -> list[Task]:
    found: list[Task] = []
    for index, row in enumerate(rows, start=1):
        place = f"{path}: task {index}"
        if not isinstance(row, dict):
            raise ConfigError(place, "is no mapping", "write lines such as name: birds")
        task = make_task({str(k): v for k, v in {**common, **row}.items()}, place)
        if not _NAME.match(task.name) or "name" not in row:
            raise ConfigError(
                f"{place}: name={row.get('name')!r}",
                "names a directory",
                "write a name of its own of letters, digits and _.-, up to 64",
            )
        if _RESERVED.fullmatch(task.name):
            raise ConfigError(
                f"{place}: name={task.name!r}", "has a meaning beside the tasks", "rename it"
            )
        taken.take(task, place)
        found.append(task)
    return found


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(str(path), f"is longer than {MAX_FILE_BYTES} bytes", "cut it up")
    return text


def _parse(text: bytes, path: Path) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """A key that stands twice is an error: the first one's tasks would be lost silently."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                    if key.value in seen:
                        words = f"{key.value} stands twice"
                        raise yaml.constructor.ConstructorError(None, None, words, key.start_mark)
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text.decode(), Loader)  # a safe loader
    # ValueError: no UTF-8, or a date that there is not. RecursionError: thousands of brackets.
    except (ValueError, RecursionError, yaml.YAMLError) as exc:
        raise _unreadable(path, exc) from exc


def _unreadable(path: Path, exc: Exception) -> ConfigError:
    words = (str(exc).splitlines() or [type(exc).__name__])[0]
    place, mark = str(path), getattr(exc, "problem_mark", None)
    if mark is not None:
        # The first line tells what was being read, and not what is wrong with it.
        place, words = f"{path}: line {mark.line + 1}", getattr(exc, "problem", None) or words
    return ConfigError(place, f"cannot be read ({words})", "name a readable YAML file")


class ChainState:
    """What lies on disk of a running chain.

    ``state_dir`` is the job's directory of small files, ``checkpoint_dir`` that of its checkpoints;
    both are the same in every attempt. ``directory`` is the one in which the job's ranks run, ""
    where that is this process's too: relative outputs are below it. Only rank 0 writes.
    """

    def __init__(self, state_dir: Path, checkpoint_dir: Path, directory: str = "") -> None:
        self._added = state_dir / _ADDED
        self._records = checkpoint_dir / _RECORDS
        self._checkpoints = checkpoint_dir
        self._state = state_dir
        self._directory = directory
        self.claims = Claims(self._added)
        # Appended files as they were read: looking at hundreds of them must cost nothing, since it
        # happens between two tasks.
        self._read: dict[Path, tuple[tuple[int, ...], Task | ConfigError]] = {}

    @property
    def state_dir(self) -> Path:
        """The job's directory of small files."""
        return self._state

    @property
    def folder(self) -> Path:
        """The directory in it that is the chain's."""
        return self._added

    def output_of(self, task: Task) -> str:
        """Where the job's ranks write a task's result; "" where they write none."""
        return os.path.join(self._directory, task.output) if task.output else ""

    def checkpoints_of(self, task: Task) -> Path:
        """Directory of one task's checkpoints."""
        return self._checkpoints / task.name

    def timeline_path(self, number: int) -> Path:
        """File of the time line of one switch, counted over the life of the chain."""
        return self._records / f"switch-{number:04d}.json"

    def next_timeline(self) -> Path:
        """The first of those that is not there yet."""
        number = 0
        while self.timeline_path(number).exists():
            number += 1
        return self.timeline_path(number)

    def all_tasks(self, given: Sequence[Task]) -> list[Task]:
        """Tasks of the file, then those appended so far. Names must differ over both."""
        tasks, wrong = self.look(given)
        if wrong:
            raise wrong[0]
        return tasks

    def look(self, given: Sequence[Task]) -> tuple[list[Task], list[ConfigError]]:
        """The same, with what is wrong with appended ones beside those that can be trained.

        Tasks that were taken out are not there any more. Their names stay taken by those of the
        file.
        """
        removed = self.claims.removed()
        tasks, wrong, taken = list(given), list[ConfigError](), _Taken(self._directory, given)
        for path in sorted(self._added.glob("[0-9]*.yaml")) if self._added.is_dir() else ():
            try:
                task = self._appended(path)
                if task.name in removed:
                    continue
                taken.take(task, str(path))
                tasks.append(task)
            except ConfigError as exc:
                wrong.append(exc)
        return [task for task in tasks if task.name not in removed], wrong

    def _appended(self, path: Path) -> Task:
        try:
            status = path.stat()
        except OSError as exc:
            raise _unreadable(path, exc) from exc
        state = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        known = self._read.get(path)
        if known is None or known[0] != state:
            found: Task | ConfigError
            try:
                found = read_task(path)
            except ConfigError as exc:
                found = exc
            known = self._read[path] = (state, found)
        if isinstance(known[1], ConfigError):
            raise known[1]
        return known[1]

    def announce(self, file: Path) -> None:
        """Say, for `running_chain`, that a chain of this file runs here."""
        self._added.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.reopen()
        lines = f"{file.resolve()}\n{self._checkpoints.resolve()}\n{os.getcwd()}\n"
        replace_durably(self._added / _GIVEN, os.fsencode(lines))

    def append(
        self, path: Path, check: Callable[[Task, Sequence[Task]], None] | None = None
    ) -> Task:
        """Append the task of a file to the chain; it is checked, and copied as it is.

        ``check`` is given the task and those before it, and raises ConfigError to refuse it.
        """
        content = _read(path)
        task = _task_in(content, path)
        given = self.given()
        tasks = self.look(given)[0]
        if any(task.name == other.name for other in (*given, *tasks)):
            raise ConfigError(
                f"{path}: name={task.name!r}", "the chain has a task of this name", "rename it"
            )
        _Taken(self._directory, tasks).take(task, str(path))
        if check is not None:
            check(task, tasks)
        self._added.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._refuse_closed()
        numbers = (_NUMBER.match(place.name) for place in self._added.iterdir())
        number = 1 + max((int(found[1]) for found in numbers if found), default=0)
        while True:
            place = self._added / f"{number:06d}-{task.name}.yaml"
            try:
                # Two appends at once get two numbers: a name is taken by making it.
                write_once(place, content)
                break
            except FileExistsError:
                number += 1
        self.claims.forget(task.name)
        # The chain closes first and looks then; this wrote first and looks now. Either it has seen
        # the task, and opens again, or it has ended, and the task must not be promised.
        until = time.monotonic() + _REOPEN_S
        while self.closed and time.monotonic() < until:
            time.sleep(0.1)
        if self.closed:
            place.unlink(missing_ok=True)
            self._refuse_closed()
        return task

    def remove(self, name: str) -> Task:
        """Take a task out that has not begun. Raises ConfigError where it has, or is not there."""
        given = self.given()
        task = next((task for task in self.look(given)[0] if task.name == name), None)
        if task is None:
            raise ConfigError(name, "the chain has no task of this name", "see slurm-ext chain ls")
        if name in self.done() or not self.claims.remove(name):
            raise ConfigError(
                name, "it has begun, or is done", "only tasks that wait can be taken out"
            )
        if all(task.name != name for task in given):
            for path in self._added.glob(f"[0-9]*-{name}.yaml"):
                if (match := _NUMBER.match(path.name)) and path.name[
                    match.end() :
                ] == f"{name}.yaml":
                    path.unlink(missing_ok=True)
        return task

    @property
    def closed(self) -> bool:
        """Whether the chain has taken up its last task and ends."""
        return (self._added / _CLOSED).exists()

    def close(self) -> None:
        """Take no more tasks. Whoever calls it looks for appended ones once more afterwards."""
        self._added.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_durably(self._added / _CLOSED, b"")

    def reopen(self) -> None:
        """Take tasks again."""
        (self._added / _CLOSED).unlink(missing_ok=True)

    def _refuse_closed(self) -> None:
        if self.closed:
            raise ConfigError(
                str(self._added.parent), "this chain has ended", "start a job with a new chain"
            )

    def given(self) -> list[Task]:
        """The tasks of the chain's own file; none where it was never announced."""
        try:
            file, _, _ = _announced(self._added)
        except (OSError, ValueError):
            return []
        return read_chain(Path(file), self._directory)

    def done(self) -> dict[str, Done]:
        """Records of the tasks that are done, by name."""
        found: dict[str, Done] = {}
        for path in sorted(self._records.glob("done-*.json")) if self._records.is_dir() else ():
            try:
                row = json.loads(path.read_text(encoding="ascii"))
                record = Done(
                    row["name"], row["step"], row["metrics"], row["attempt"], row["ended_s"]
                )
            except (OSError, ValueError, KeyError, TypeError) as exc:
                raise ConfigError(
                    str(path), f"is no record of a task ({exc})", "delete it: the task is redone"
                ) from exc
            found[record.name] = record
        return found

    def record(self, done: Done) -> None:
        """Say that a task is done; durable when this returns."""
        self._records.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = json.dumps(
            {
                "name": done.name,
                "step": done.step,
                "metrics": dict(done.metrics),
                "attempt": done.attempt,
                "ended_s": done.ended_s,
            }
        )
        replace_durably(self._records / f"done-{done.name}.json", text.encode() + b"\n")


def running_chain(state_dir: Path) -> ChainState:
    """The chain of a job, from its directory of small files. Raises ConfigError without one."""
    try:
        _, checkpoint_dir, directory = _announced(state_dir / _ADDED)
        return ChainState(state_dir, Path(checkpoint_dir), directory)
    except (OSError, ValueError) as exc:
        raise ConfigError(
            str(state_dir), "no chain has begun here", "was the job started with ft-run --chain?"
        ) from exc


def _announced(folder: Path) -> tuple[str, str, str]:
    """The chain's file, the directory of its checkpoints, and the one in which its ranks run.

    Raises OSError where nothing was announced, ValueError where it is something else.
    """
    text = os.fsdecode((folder / _GIVEN).read_bytes())
    file, checkpoint_dir, directory = text.removesuffix("\n").split("\n")
    return file, checkpoint_dir, directory


def remaining(tasks: Sequence[Task], done: Mapping[str, Done]) -> list[Task]:
    """Tasks to be trained yet, in order. A done one whose steps were raised is trained on."""
    return [task for task in tasks if task.name not in done or done[task.name].step < task.steps]


def write_once(path: Path, content: bytes) -> None:
    """Make a file that was not there, whole or not at all. Raises FileExistsError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    write_new(temporary, content)
    try:
        os.link(temporary, path)
    finally:
        temporary.unlink()
    sync_directory(path.parent)
