"""``slurm-ext pin JOBID``: keep the daemon from choosing a job's GPU count, or let it again.

The request is a file in the user's own directory of the spool; the daemon reads it in its next
cycle and believes it only from the job's owner or from root.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from slurm_ext.cli.explain import base_id_of
from slurm_ext.control.config import load_config
from slurm_ext.control.spool import read_plan, write_request
from slurm_ext.domain.document import ENDED, PlanDocument
from slurm_ext.domain.errors import DataError, ProtocolError, SourceMissingError
from slurm_ext.domain.job import JobState
from slurm_ext.domain.request import MAX_PINNED_GPUS, PinRequest
from slurm_ext.domain.spans import counted


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    parser = subparsers.add_parser(
        "pin",
        help="keep a job's GPU count, or let it be chosen again",
        description="Veto resizing of a pending job: it keeps the GPU count it was submitted with,"
        " or the one given. Its place in the queue is still planned. A running job is never"
        " resized in any case.",
    )
    parser.add_argument("job", metavar="JOBID", help="a job or array of yours")
    parser.add_argument("--gpus", metavar="N", type=int, help="keep this count instead")
    parser.add_argument("--release", action="store_true", help="take an earlier pin back")
    parser.add_argument("--config", metavar="FILE", type=Path, help="configuration to read")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the request; 1 where the job is somebody else's."""
    base_id = base_id_of(args.job)
    if args.gpus is not None:
        if args.release:
            raise DataError("--gpus with --release", "contradict each other", "give one of them")
        if not 0 < args.gpus <= MAX_PINNED_GPUS:
            raise DataError(
                f"--gpus={args.gpus}", "is not a GPU count", f"give 1 to {MAX_PINNED_GPUS}"
            )
    spool = load_config(args.config).spool
    uid = os.getuid()
    try:
        document = read_plan(spool, base_id)
    except ProtocolError:
        raise
    except SourceMissingError:
        # Younger than one cycle: the daemon will find the request when it first plans the job.
        document = None
    if document is not None:
        _check(args.job, args.gpus, document, uid)
    write_request(spool, uid, PinRequest(base_id, not args.release, time.time(), args.gpus))
    if args.release:
        print(f"job {base_id}: its GPU count may be chosen again, {_from_when(document)}")
    else:
        count = "the submitted GPU count" if args.gpus is None else counted(args.gpus, "GPU")
        unsure = (
            ""
            if args.gpus is None or not _is_pinned(document)
            else (f", if it can run on that; slurm-ext explain {base_id} tells after a cycle")
        )
        print(f"job {base_id}: keeps {count}, {_from_when(document)}{unsure}")
    return 0


def _check(job: str, gpus: int | None, document: PlanDocument, uid: int) -> None:
    """Raise DataError where the daemon would not believe or could not carry out the request."""
    if uid not in (0, document.uid):
        raise DataError(
            f"job {job}", f"belongs to {document.user}", "only its owner or root can pin it"
        )
    if document.state == ENDED:
        raise DataError(f"job {job}", "has left the queue", "there is nothing to pin")
    if gpus is None or _is_pinned(document) or not document.candidates:
        # While a pin holds, no other count is considered, so the document cannot tell.
        return
    counts = sorted({c.gpus for c in document.candidates} | {document.requested_gpus})
    if gpus not in counts:
        raise DataError(
            f"--gpus={gpus}",
            f"job {job} cannot run on that count",
            f"choose among {', '.join(map(str, counts))};"
            f" slurm-ext explain {document.base_id} says why",
        )


def _is_pinned(document: PlanDocument | None) -> bool:
    return document is not None and document.ours is not None and document.ours.veto


def _from_when(document: PlanDocument | None) -> str:
    if document is None:
        return "as soon as the daemon plans it, and if it is yours"
    if document.state != JobState.PENDING.value:
        return "should it be requeued; a job that runs is never resized"
    return "from the next cycle on"
