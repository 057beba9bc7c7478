"""A program as ft-run sees one, without torch: it keeps a status file and obeys signals.

    launch_program.py [--exit=N] [--after=S] [--save=S] [--deaf] [--bare] [--ready=FILE] ...

It waits until a signal of FT_SIGNALS comes, "saves", and leaves as a session does. ``--deaf`` never
leaves, ``--bare`` has no session at all, ``--after`` ends it with ``--exit`` by itself. In
``--ready``, {rank} and {start} (how often torchrun has started it before) are replaced.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from slurm_ft import exits, status, variables


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--exit", type=int, default=0)
    parser.add_argument("--after", type=float, default=60.0)
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--ready")
    parser.add_argument("--save", type=float, default=0.1)
    parser.add_argument("--save-error", default="")
    parser.add_argument("--leaving", default=status.SIGNALLED)
    parser.add_argument("--restored", type=int, default=0)
    parser.add_argument("--saved", type=int, default=10)
    args = parser.parse_args()
    heard: list[int] = []
    if not args.bare:
        for name in os.environ[variables.SIGNALS].split(","):
            signal.signal(signal.Signals[f"SIG{name}"], lambda number, _frame: heard.append(number))
    path = Path(os.environ.get(variables.STATUS, "/nonexistent"))
    said = status.Status(
        attempt=int(os.environ[variables.ATTEMPT]),
        rank=int(os.environ["RANK"]),
        pid=os.getpid(),
        at_s=time.time(),
        restored_step=args.restored,
        save_error=args.save_error,
    )

    def tell(**more: object) -> None:
        if not args.bare:
            fields = {name: getattr(said, name) for name in said.__dataclass_fields__}
            status.write(path, status.Status(**{**fields, **more}))  # type: ignore[arg-type]

    tell()
    if args.ready:
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        ready = args.ready.format(rank=os.environ["RANK"], start=start)
        Path(ready).write_text(f"{os.getpid()}\n")
    end = time.monotonic() + args.after
    while time.monotonic() < end:
        if heard and not args.deaf:
            time.sleep(args.save)
            # One write: two ranks print into the same pipe.
            os.write(1, f"heard {' '.join(str(int(number)) for number in heard)}\n".encode())
            tell(step=args.saved, saved_step=args.saved, save_s=0.1, leaving=args.leaving)
            return exits.ABANDONED if args.leaving == status.LOST_PEER else exits.REQUEUE
        time.sleep(0.02)
    if args.leaving != status.SIGNALLED:
        tell(step=args.saved, saved_step=args.saved, leaving=args.leaving)
        return exits.ABANDONED
    tell(done=True, step=args.saved)
    return args.exit


if __name__ == "__main__":
    sys.exit(main())
