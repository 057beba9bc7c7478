"""Runs inside the controller container as the submitting user: submits on time, then watches.

    submitter.py JOBS.json STATUS.json LIMIT_S

Standard library only, and one long-lived process: starting `sbatch` through Docker would cost more
than a minute of the workload each time. JOBS.json lists {"name", "arrives_s", "script"}. The state
of the replay is written to STATUS.json as it changes. The last line on stdout is the result: when
each job was submitted, under which id, and what went wrong. Exit code 0 only if all jobs ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

POLL_S = 0.2
# How often squeue is asked whether a job that has no end stamp still exists.
LOOK_S = 3.0
# A job that Slurm no longer knows may have written its last stamp a moment ago.
GONE_S = 5.0
COMMAND_LIMIT_S = 60.0


class Watch:
    """Counts what the jobs' stamp files say; each file is read until it holds its end."""

    def __init__(self, stamps: Path) -> None:
        self._stamps = stamps
        self.started: set[str] = set()
        self.ended: set[str] = set()
        self.unfit: dict[str, str] = {}

    def look(self, names: list[str]) -> None:
        for name in names:
            if name in self.ended or name in self.unfit:
                continue
            try:
                text = (self._stamps / name).read_text()
            except FileNotFoundError:
                continue
            for line in text.splitlines():
                word = line.split(maxsplit=2)
                if word[0] == "start":
                    self.started.add(name)
                elif word[0] == "end":
                    self.ended.add(name)
                elif word[0] == "unfit":
                    self.unfit[name] = word[-1]


def submit(script: str) -> tuple[float, str, str]:
    """(when the user pressed return, job id, complaint)."""
    at = time.time()
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", script],
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return at, "", f"sbatch did not answer within {COMMAND_LIMIT_S:g} s"
    if done.returncode != 0:
        return at, "", done.stderr.strip()
    return at, done.stdout.strip().split(";")[0], ""


def known_ids() -> set[str] | None:
    """Ids of our jobs that Slurm still holds; None when it did not answer."""
    argv = ["squeue", "--noheader", "--me", "--format=%i"]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return set(done.stdout.split()) if done.returncode == 0 else None


class Replay:
    """Submission and supervision of one variant."""

    def __init__(self, jobs: list[dict[str, Any]], root: Path, status: Path) -> None:
        self._jobs = jobs
        self._watch = Watch(root / "stamps")
        self._status = status
        self._begun = time.time()
        self._rows: list[dict[str, Any]] = []
        self._missing_since: dict[str, float] = {}
        self._looked = 0.0
        self._lag_s = 0.0
        self._last: dict[str, Any] = {}

    def run(self, limit_s: float) -> dict[str, Any]:
        problems: dict[str, str] = {}
        while not problems:
            now = time.time()
            if len(self._rows) < len(self._jobs):
                job = self._jobs[len(self._rows)]
                due = self._begun + job["arrives_s"]
                if due <= now:
                    at, job_id, complaint = submit(job["script"])
                    self._lag_s = max(self._lag_s, at - due)
                    self._rows.append({"name": job["name"], "job_id": job_id, "submit_s": at})
                    if complaint:
                        problems[job["name"]] = f"sbatch refused it: {complaint}"
                    continue
                pause = min(POLL_S, due - now)
            else:
                pause = POLL_S
            self._watch.look([row["name"] for row in self._rows])
            problems.update(self._watch.unfit)
            problems.update(self._gone(now))
            self._tell()
            if len(self._watch.ended) == len(self._jobs):
                break
            if now - self._begun > limit_s:
                for job in self._jobs:
                    if job["name"] not in self._watch.ended:
                        problems[job["name"]] = f"has not ended after {limit_s:.0f} s"
            time.sleep(pause)
        self._tell()
        return {
            "begun_s": self._begun,
            "lag_s": self._lag_s,
            "jobs": self._rows,
            "problems": problems,
        }

    def _gone(self, now: float) -> dict[str, str]:
        """Jobs that Slurm forgot without an end stamp: they failed, or were cancelled."""
        if now - self._looked < LOOK_S:
            return {}
        self._looked = now
        known = known_ids()
        if known is None:
            return {}
        gone: dict[str, str] = {}
        for row in self._rows:
            name = row["name"]
            if row["job_id"] in known or name in self._watch.ended:
                self._missing_since.pop(name, None)
            elif now - self._missing_since.setdefault(name, now) > GONE_S:
                gone[name] = f"job {row['job_id']} left the queue without finishing its work"
        return gone

    def _tell(self) -> None:
        state = {
            "total": len(self._jobs),
            "submitted": len(self._rows),
            "running": len(self._watch.started - self._watch.ended),
            "done": len(self._watch.ended),
            "begun_s": self._begun,
        }
        if state != self._last:
            self._last = state
            fresh = self._status.with_suffix(".new")
            fresh.write_text(json.dumps(state))
            os.replace(fresh, self._status)


def main(argv: list[str]) -> int:
    jobs_file, status, limit_s = Path(argv[0]), Path(argv[1]), float(argv[2])
    jobs = json.loads(jobs_file.read_text())
    result = Replay(jobs, jobs_file.parent, status).run(limit_s)
    print(json.dumps(result))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
