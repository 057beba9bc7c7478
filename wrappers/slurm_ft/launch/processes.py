"""Starting processes and ending them: fork and exec, parent-death signal, whole trees.

``fork`` and not ``posix_spawn``: between the two calls the child asks the kernel to be killed when
ft-run dies (a rank without its ft-run can neither be requeued nor told to save). ft-run is the
sub-reaper of everything below it, so that the ranks of a launcher that was killed, or a program
whose shell was, stay ours: they can still be waited for and ended.
"""

from __future__ import annotations

import errno
import os
import signal

from slurm_ft.launch.errors import NOT_EXECUTABLE, NOT_FOUND, CommandError, LaunchError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# A tree that forks while it is being killed; each round kills what the last one left.
_KILL_ROUNDS = 20


def control() -> Callable[[int, int], int] | None:
    """``prctl``, or ``None`` in a Python without ctypes: then orphans are Slurm's to end."""
    try:
        import ctypes
    except ImportError:
        return None
    function = ctypes.CDLL(None, use_errno=True).prctl

    def call(option: int, value: int) -> int:
        return int(function(option, ctypes.c_ulong(value), 0, 0, 0))

    return call


def adopt_orphans(prctl: Callable[[int, int], int] | None) -> None:
    """Become the parent of whatever loses its own below us."""
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1)


def start(
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    mask: Iterable[int],
    ignored: Iterable[int] = (),
    own_group: bool = True,
    prctl: Callable[[int, int], int] | None = None,
    stdout: int | None = None,
) -> int:
    """Start a program; returns its process id. Raises CommandError where exec fails.

    ``mask`` are the signals blocked in the child, ``ignored`` those that it begins with ignoring.
    """
    parent = os.getpid()
    told, tell = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
    except OSError as exc:
        raise LaunchError(f"no process could be started: {exc.strerror}") from exc
    if pid == 0:
        number = errno.ENOEXEC
        try:
            if own_group:
                os.setpgid(0, 0)
            if prctl is not None:
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(128 + signal.SIGKILL)
            if stdout is not None:
                os.dup2(stdout, 1)
            # Python ignores these for itself; a program expects the usual meaning.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            for number_ignored in ignored:
                signal.signal(number_ignored, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execvpe(argv[0], list(argv), dict(environment))
        except OSError as exc:
            number = exc.errno or errno.ENOEXEC
        finally:
            # Only reached where exec failed: nothing of the parent's clean-up may run here.
            os.write(tell, str(number).encode())
            os._exit(NOT_FOUND)
    os.close(tell)
    if own_group:
        # Also here: whoever comes first, so that a signal to the group never misses the child.
        _make_group(pid)
    failed = os.read(told, 16)
    os.close(told)
    if failed:
        os.waitpid(pid, 0)
        number = int(failed)
        code = NOT_FOUND if number in (errno.ENOENT, errno.ENOTDIR) else NOT_EXECUTABLE
        raise CommandError(f"{argv[0]}: {os.strerror(number)}", code)
    return pid


def _make_group(pid: int) -> bool:
    """Give a child a group; false where it runs its program already, and has done so itself."""
    try:
        os.setpgid(pid, pid)
    except OSError:
        return False
    return True


def exit_code(status: int) -> int:
    """A wait status as a shell tells it: 128 + number for a death by signal."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def descendants(root: int, proc: str = "/proc") -> list[int]:
    """Every process below ``root``, parents first."""
    by_parent = _by_parent(proc)
    found: list[int] = []
    todo = [root]
    while todo:
        below = by_parent.get(todo.pop(0), [])
        found += below
        todo += below
    return found


def children(parent: int, proc: str = "/proc") -> list[int]:
    """The processes that ``parent`` started and that are still there."""
    return _by_parent(proc).get(parent, [])


def _by_parent(proc: str) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for name in os.listdir(proc):
        if not name.isdigit():
            continue
        try:
            with open(f"{proc}/{name}/stat", "rb") as file:
                text = file.read()
        except OSError:
            continue
        # The name of the program may hold blanks and parentheses: what follows the last one counts.
        fields = text[text.rfind(b")") + 2 :].split()
        if len(fields) > 1 and fields[0] != b"Z":
            found.setdefault(int(fields[1]), []).append(int(name))
    return found


def kill_below(root: int, spared: Iterable[int] = ()) -> None:
    """SIGKILL to everything below ``root`` but ``spared``, until nothing new is found."""
    keep = set(spared)
    for _ in range(_KILL_ROUNDS):
        alive = [pid for pid in descendants(root) if pid not in keep]
        if not alive:
            return
        for pid in alive:
            send(pid, signal.SIGKILL)


def catches(pid: int, number: int, proc: str = "/proc") -> bool:
    """Whether a process has a handler of its own for a signal."""
    try:
        with open(f"{proc}/{pid}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except OSError:
        return False
    return False


def runs(pid: int) -> bool:
    """Whether there is such a process of ours."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def send(pid: int, number: int) -> bool:
    """Signal one process; false where it is gone."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def send_group(group: int, number: int) -> bool:
    """Signal a process group; false where it is gone."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
