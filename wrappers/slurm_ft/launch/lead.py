"""What rank 0's ft-run does beside its program: the ledger, Slurm's record, the requeue.

Imported after the program has started, so that nothing here costs start-up time. The other ranks'
part is `slurm_ft.launch.follow`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slurm_ext.domain import nodelist
from slurm_ext.domain.attempt import Attempt, Attempts, Cause
from slurm_ext.domain.errors import ProtocolError, SlurmExtError
from slurm_ft import exits, status, variables
from slurm_ft.launch.environment import SPOOL_LIMIT_S, Paths
from slurm_ft.launch.errors import CommandError
from slurm_ft.launch.frameworks import requeues_by_itself
from slurm_ft.launch.identity import Identity
from slurm_ft.launch.limited import LateError, within
from slurm_ft.launch.marks import Marks
from slurm_ft.launch.options import Options
from slurm_ft.launch.pulse import Pulse
from slurm_ft.launch.signals import PASSED_ON, slurm_setting
from slurm_ft.launch.supervise import MARGIN_S, MARGIN_SHARE, Ending, Supervisor
from slurm_ft.launch.waiting import wait_signal
from slurm_ft.requeue import act, attempts, steps
from slurm_ft.requeue.causes import BACK_ALREADY, MOST_WORDS, Evidence, classify
from slurm_ft.requeue.decide import Answer, By, Case, decide
from slurm_ft.requeue.limits import parse_limits
from slurm_ft.requeue.record import JobRecord, parse_record
from slurm_ft.status import Status

# Slurm's default for KillWait: from TERM to KILL once a job is ending.
KILL_WAIT_S = 30
# For how long a controller that is away is asked again: a restart with many jobs takes minutes.
CONTROLLER_S = 300.0
# From an accepted requeue to the end of this process by Slurm.
TEARDOWN_S = 60.0
# Other ranks write that their programs failed while rank 0 decides already.
PEERS_S = 3.0
# For the accounting's word on an end that is kept already; Slurm's KILL may be near.
ACCOUNTING_S = 3.0
_MOST_LOOKS = 3


class Lead:
    """Rank 0's duties in one attempt. ``tell`` prints a line for the user."""

    def __init__(
        self,
        identity: Identity,
        options: Options,
        paths: Paths,
        environment: Mapping[str, str],
        command: Sequence[str],
        marks: Marks,
        tell: Callable[[str], None],
    ) -> None:
        self._identity = identity
        self._options = options
        self._paths = paths
        self._environment = environment
        self._command = command
        self._marks = marks
        self._tell = tell
        self._limits = parse_limits(options["max-requeues"])
        self._ledger = Attempts(identity.job_id, ())
        self._started_s = time.time()
        # Of the attempt: an earlier step of the same script may have begun it.
        self._began_s = self._started_s
        self._looks = 0
        # What Slurm knows the job by, and whether Slurm's own record has shown that it is ours.
        self._slurm_name = identity.job_id
        self._certain = "_" not in identity.job_id
        # Why somebody else than rank 0 decides; empty where rank 0 does.
        self._in_stead = ""

    # -- at the start ------------------------------------------------------------------------------

    def begin(self, supervisor: Supervisor) -> None:
        """Open this attempt in the ledger, and close earlier ones whose end nobody wrote."""
        self._marks.forget_old()
        known, number = self._load(), self._identity.attempt
        begun = (a.started_s for a in known.attempts if a.number == number)
        self._began_s = min((self._began_s, *begun))
        self._ledger = attempts.begin(known, self._attempt())
        self._store()
        if attempts.unsure_before(self._ledger, self._identity.attempt):
            argv = act.ends_of_attempts(self._identity.job_id)
            try:
                supervisor.command(
                    argv, self._close_earlier, act.environment(os.environ), ignored=PASSED_ON
                )
            except CommandError:
                self._close_earlier(0, "")
        self._warn_of_truncation()
        self._serve_pauses(supervisor)

    def skip(self) -> None:
        """Keep an attempt that has nothing to do, because the one before it ended well."""
        number = self._identity.attempt
        why = (
            f"this step ended well in attempt {number - 1}, and Slurm requeued the job all the same"
            " after a preemption; nothing is done again (to do so, remove the state directory"
            f" {self._paths.state_dir})"
        )
        now_s = time.time()
        attempt = replace(
            self._attempt(),
            started_s=now_s,
            ended_s=now_s,
            cause=Cause.COMPLETED,
            exit_code=0,
            reason=why,
        )
        self._ledger = attempts.close(attempts.begin(self._load(), attempt), attempt)
        self._store()
        self._marks.done()
        self._tell(f"attempt {number}: {why}")

    def refuse(self, why: str, code: int) -> None:
        """Keep an attempt of which rank 0 itself could not start its program."""
        attempt = replace(
            self._attempt(),
            ended_s=time.time(),
            cause=Cause.USER_ERROR,
            exit_code=code,
            reason=why,
        )
        self._ledger = attempts.close(attempts.begin(self._load(), attempt), attempt)
        self._store()
        self._marks.decide(False)

    def _serve_pauses(self, supervisor: Supervisor) -> None:
        """Start the helper through which this attempt can be paused; it ends with this process."""
        if not self._paths.state_dir:
            return
        argv = [
            sys.executable,
            "-m",
            "slurm_ft.pause.serve",
            f"--state-dir={self._paths.state_dir}",
            f"--attempt={self._identity.attempt}",
            f"--job-id={self._identity.job_id or 'local'}",
            f"--parent={os.getpid()}",
        ]
        if self._paths.spool:
            argv.append(f"--spool={self._paths.spool}")
        if self._paths.status:
            argv.append(f"--status={self._paths.status}")
        if why := self._stays():
            argv.append(f"--stays={why}")
        if timeout := self._environment.get(variables.COLLECTIVE_TIMEOUT_S):
            argv.append(f"--collective-timeout={timeout}")
        if move := self._environment.get(variables.PAUSE_MOVE_S):
            argv.append(f"--move-limit={move}")
        try:
            # What Slurm sends to a step meanwhile must not end it before it can say so itself.
            supervisor.command(
                argv, lambda code, text: None, os.environ, capture=False, ignored=PASSED_ON
            )
        except CommandError as exc:
            self._tell(f"this attempt cannot be paused: {exc}")

    def _stays(self) -> str:
        """Why a job that leaves for another one would not be requeued; empty where it would."""
        if self._options["requeue"] == "never":
            return "--requeue=never"
        # Moved by the daemon, or paused by a person: the helper does not know beforehand.
        for cause in (Cause.DAEMON, Cause.OPERATOR):
            allowed = self._limits.get(cause)
            used = sum(1 for a in self._ledger.attempts if a.cause is cause and a.requeued)
            if allowed is not None and used >= allowed:
                return f"--max-requeues={cause.value}={allowed} is used up"
        return ""

    def _attempt(self) -> Attempt:
        """This step's part of the attempt, as it begins."""
        return Attempt(
            number=self._identity.attempt,
            started_s=self._started_s,
            gpus=self._identity.gpus,
            nodes=self._nodes(),
            ranks=self._identity.size,
            step=self._marks.step,
        )

    def _own(self) -> Attempt | None:
        """What this step has kept so far."""
        if not self._paths.state_dir:
            return None
        where = Path(self._paths.state_dir)
        return steps.read(where, self._identity.job_id, self._identity.attempt, self._marks.step)

    def _nodes(self) -> tuple[str, ...]:
        try:
            return nodelist.expand(self._identity.nodelist)
        except SlurmExtError:
            return ()

    def _load(self) -> Attempts:
        if not self._paths.state_dir:
            return self._ledger
        path = Path(self._paths.state_dir, attempts.file_name(self._identity.job_id))
        try:
            return attempts.load(path, self._identity.job_id)
        except (ProtocolError, OSError) as exc:
            self._tell(f"the attempts so far cannot be read and are counted anew: {exc}")
            return self._ledger

    def _store(self) -> None:
        if not self._paths.state_dir:
            self._copy(self._ledger)
            return
        where = Path(self._paths.state_dir)
        path = where / attempts.file_name(self._identity.job_id)

        def write(ledger: Attempts) -> None:
            try:
                attempts.store(path, ledger)
            finally:
                self._copy(ledger)

        try:
            steps.store(where, self._ledger, write)
        except OSError as exc:
            self._tell(f"{self._paths.state_dir}: attempts cannot be kept: {exc.strerror}")

    def _copy(self, ledger: Attempts) -> None:
        """The copy in the spool, for the daemon."""
        if not self._paths.progress:
            return
        name = attempts.file_name(self._identity.job_id)
        copy = Path(self._paths.progress).with_name(name)
        try:
            within(SPOOL_LIMIT_S, lambda: attempts.store(copy, ledger))
        except LateError:
            self._paths.progress = ""
            self._tell(f"{self._paths.spool}: no answer; the daemon is told no more")
        except OSError as exc:
            if self._options.on("verbose"):
                self._tell(f"{self._paths.spool}: no copy of the attempts: {exc.strerror}")

    def _close_earlier(self, code: int, text: str) -> None:
        rows = text.splitlines() if code == 0 else ()
        self._ledger = attempts.close_from_sacct(self._ledger, self._identity.attempt, rows)
        self._store()

    def _warn_of_truncation(self) -> None:
        if self._identity.attempt or self._options["requeue"] == "never":
            return
        # Slurm says so to a batch script and what it starts. Without one no output is kept, and
        # nothing comes back.
        if self._environment.get("ENVIRONMENT") != "BATCH":
            return
        # sbatch tells the job how it opened the output; "a" is append.
        if self._environment.get("SLURM_OPEN_MODE") == "a":
            return
        if slurm_setting(self._environment, "JobFileAppend") == "1":
            return
        self._tell(
            "when this job comes back, Slurm empties its output file;"
            " #SBATCH --open-mode=append keeps it"
        )

    # -- when a signal comes -----------------------------------------------------------------------

    def heard(self, supervisor: Supervisor) -> None:
        """Ask Slurm what the signal means, so that the program is ended before Slurm kills us."""
        if self._looks >= _MOST_LOOKS:
            return
        self._looks += 1
        heard_at = time.monotonic()

        def then(code: int, text: str) -> None:
            if code == 0:
                self._learn(supervisor, text, heard_at)

        try:
            argv = act.show_job(self._slurm_name)
            # Slurm signals the step once more while it is asked; the answer is wanted all the same.
            supervisor.command(argv, then, act.environment(os.environ), ignored=PASSED_ON)
        except CommandError as exc:
            self._tell(f"Slurm cannot be asked: {exc}")

    def _learn(self, supervisor: Supervisor, text: str, heard_at: float) -> None:
        try:
            record = parse_record(text, self._identity.slurm_id)
        except ProtocolError as exc:
            self._tell(str(exc))
            return
        if not record.running:
            # Slurm has sent TERM and will send KILL to everything, ft-run included.
            wait = slurm_setting(self._environment, "KillWait")
            wait_s = int(wait) if wait.isdigit() else KILL_WAIT_S
            supervisor.limit(heard_at + wait_s - min(MARGIN_S, wait_s * MARGIN_SHARE))

    # -- at the end --------------------------------------------------------------------------------

    def conclude(self, ending: Ending) -> int:
        """Decide, keep the decision, carry it out. Returns the exit code of ft-run."""
        said = status.read(Path(self._paths.status)) if self._paths.status else None
        return self._conclude(ending, said, Pulse(self._marks))

    def stand_in(self, ending: Ending, term: int, why: str, said: Status | None = None) -> int:
        """The same for a job whose rank 0 has no ft-run any more, which ``why`` tells.

        ``said`` is the status of a rank, by default this one's. What was decided before stays.
        Where Slurm's record cannot be had nothing is done: it alone tells whether somebody else has
        sent the job back already.
        """
        known = self._own()
        if known is not None and known.ended_s is not None and not known.requeued:
            self._marks.decide(False)
            return ending.code
        self._in_stead = why
        attempt = self._attempt() if known is None else replace(known, ended_s=None, cause=None)
        self._ledger = attempts.begin(self._load(), attempt)
        if said is None and self._paths.status:
            said = status.read(Path(self._paths.status))
        return self._conclude(ending, said, Pulse(self._marks, term))

    def _conclude(self, ending: Ending, said: Status | None, pulse: Pulse) -> int:
        # The others wait as long as there are signs of life, however long Slurm takes to answer.
        still = pulse.keep()
        try:
            answer = self._settle(ending, said)
        finally:
            still()
        if answer.by is By.FT_RUN:
            _await_teardown()
            return ending.code or exits.REQUEUE
        return ending.code

    def _settle(self, ending: Ending, said: Status | None) -> Answer:
        if said is not None and said.attempt != self._identity.attempt:
            said = None
        evidence = Evidence(
            attempt=self._identity.attempt,
            code=ending.code,
            now_s=ending.ended_s,
            asked=ending.asked is not None,
            stopped=ending.stopped,
            forced=ending.forced,
            status=said,
            lead_s=self._options.seconds("grace"),
            launcher=self._identity.launcher,
            unlaunched=ending.unlaunched,
        )
        until = time.monotonic() + CONTROLLER_S
        if evidence.code or evidence.left:
            # An error of the program needs nobody's record; only a death or a leave may have
            # another cause.
            if evidence.asked or evidence.left or evidence.code > 128:
                evidence = replace(
                    evidence, record=self._record(until), peers=self._peers(evidence)
                )
            elif self._limits[Cause.USER_ERROR] != 0:
                evidence = replace(evidence, record=self._record(until))
        cause, words = classify(evidence)
        if ending.told:
            cause, words = Cause.USER_ERROR, ending.told
        if cause is Cause.COMPLETED and self._slurm_may_return_it(evidence, until):
            self._marks.done()
        answer = self._decide(cause, words, evidence, ending, until)
        if self._in_stead:
            by = By.NOBODY if answer.by is By.FT_RUN and evidence.record is None else answer.by
            answer = replace(answer, by=by, reason=f"{answer.reason}; {self._in_stead}")
        if ending.forced:
            late = "the program had not left when its grace was nearly over, and was killed"
            answer = replace(answer, reason=f"{answer.reason}; {late}")
        if said is not None and said.save_error:
            lost = said.save_error[:MOST_WORDS]
            answer = replace(answer, reason=f"{answer.reason}; last save failed: {lost}")
        self._keep(evidence, cause, answer, ending)
        if answer.by is By.FT_RUN:
            answer = self._send_back(evidence, cause, answer, ending, until)
        if self._paths.status:
            status.forget_stead(Path(self._paths.status))
        self._say(cause, answer)
        self._marks.decide(answer.requeued)
        if answer.by is By.SOMEBODY and words == BACK_ALREADY:
            self._ask_accounting(evidence, answer, ending)
        return answer

    def _ask_accounting(self, evidence: Evidence, answer: Answer, ending: Ending) -> None:
        """Settle whether it was a preemption; what is kept stays where nobody says so in time."""
        try:
            text = act.ask(act.ends_of_attempts(self._slurm_name), ACCOUNTING_S)
        except SlurmExtError:
            return  # the next attempt asks again when it begins
        number = self._identity.attempt
        known = attempts.close_from_sacct(self._ledger, number + 1, text.splitlines()).attempts[-1]
        if known.cause is Cause.PREEMPTED:
            words = f"Slurm preempted the job and requeued it ({known.reason})"
            settled = replace(answer, reason=answer.reason.replace(BACK_ALREADY, words))
            self._keep(evidence, known.cause, settled, ending)
            self._tell(f"attempt {number}: it was preempted ({known.reason})")

    def _slurm_may_return_it(self, evidence: Evidence, until: float) -> bool:
        """Whether Slurm takes the end of the program for that of a preemption."""
        earlier = self._ledger.attempts[:-1]
        if earlier and earlier[-1].cause is Cause.PREEMPTED:
            return True
        record = self._record(until) if evidence.asked else None
        return record is not None and record.preempted

    def _record(self, until: float) -> JobRecord | None:
        raw = self._identity.slurm_id
        try:
            try:
                record = act.read_record(self._slurm_name, raw, until)
            except SlurmExtError:
                if self._certain:
                    raise
                record = act.read_record(str(raw), raw, until)
        except SlurmExtError as exc:
            self._tell(f"Slurm's record of the job is missing: {exc}")
            return None
        if not self._certain:
            self._be_certain(record)
        return record

    def _be_certain(self, record: JobRecord) -> None:
        """Whether this is the task of an array that its environment says.

        A job that was submitted from inside such a task inherits SLURM_ARRAY_* and would send that
        one back to the queue instead of itself.
        """
        self._certain = True
        self._slurm_name = record.array_task or str(record.job_id)
        if self._slurm_name != self._identity.job_id:
            self._tell(
                f"SLURM_ARRAY_JOB_ID and SLURM_ARRAY_TASK_ID name {self._identity.job_id}, but this"
                f" is job {self._slurm_name}: it was submitted from inside that one and shares its"
                " directories; submit it with"
                " `env -u SLURM_ARRAY_JOB_ID -u SLURM_ARRAY_TASK_ID -u SLURM_RESTART_COUNT sbatch`"
            )

    def _peers(self, evidence: Evidence) -> dict[int, int]:
        """Exit codes of other ranks that failed by themselves, waiting a little for them."""
        if self._identity.size == 1 and not self._in_stead:
            return {}
        # After a signal all ranks leave together: whoever failed has done so before.
        end = time.monotonic() + (0.0 if evidence.asked else PEERS_S)
        while True:
            found = self._marks.ends()
            if found or time.monotonic() >= end:
                return found
            time.sleep(0.2)

    def _decide(
        self, cause: Cause, words: str, evidence: Evidence, ending: Ending, until: float
    ) -> Answer:
        record = evidence.record
        mode, holds = "", False
        if record is not None and record.preempted:
            try:
                mode = act.preempt_mode(record.partition, until)
                # One is kept back: after a requeue of ours Slurm adds one of its own.
                holds = record.own_requeues >= act.most_own_requeues(until) - 2
            except SlurmExtError as exc:
                self._tell(f"the preemption mode is not known: {exc}")
        framework = ""
        if evidence.status is None and ending.hook is None:
            framework = requeues_by_itself(self._command, self._environment)
        # Coming back repeats the script's earlier steps too: they count for what would be lost.
        last = replace(self._ended(evidence, cause, ending), started_s=self._began_s)
        case = Case(
            cause=cause,
            words=words,
            attempts=(*self._ledger.attempts[:-1], last),
            limits=self._limits,
            mode=self._options["requeue"],
            saved=evidence.status is not None or ending.hook == 0,
            record=record,
            preempt_mode=mode,
            slurm_holds=holds,
            framework=framework,
            restarts=self._identity.attempt,
        )
        return decide(case)

    def _ended(self, evidence: Evidence, cause: Cause, ending: Ending) -> Attempt:
        last = attempts.with_status(self._ledger.attempts[-1], evidence.status)
        return replace(last, ended_s=ending.ended_s, cause=cause, exit_code=ending.code)

    def _keep(self, evidence: Evidence, cause: Cause, answer: Answer, ending: Ending) -> None:
        ended = replace(
            self._ended(evidence, cause, ending), requeued=answer.requeued, reason=answer.reason
        )
        self._ledger = attempts.close(self._ledger, ended)
        self._store()

    def _send_back(
        self, evidence: Evidence, cause: Cause, answer: Answer, ending: Ending, until: float
    ) -> Answer:
        """Requeue. What is kept says so already, because Slurm may end us while we are told."""
        why = ""
        if not self._certain and self._record(until) is None:
            why = f"it is not certain that this is {self._identity.job_id}, and not another job"
        else:
            try:
                act.requeue(self._slurm_name, until)
            except SlurmExtError as exc:
                why = f"Slurm refused to requeue it: {exc}"
        if why:
            answer = Answer(By.NOBODY, f"{answer.reason}; {why}")
            self._keep(evidence, cause, answer, ending)
        return answer

    def _say(self, cause: Cause, answer: Answer) -> None:
        attempt = f"attempt {self._identity.attempt}"
        if answer.requeued:
            self._tell(f"{attempt}: {answer.reason}; job {self._slurm_name} comes back")
        elif cause is not Cause.COMPLETED:
            self._tell(f"{attempt}: {answer.reason}; job {self._slurm_name} is not requeued")
        elif self._options.on("verbose"):
            self._tell(f"{attempt}: {answer.reason}")


def _await_teardown() -> None:
    """Wait for Slurm's TERM, so that the batch script does not run on to its next line."""
    waited = {signal.SIGTERM}
    while wait_signal(waited, 0) is not None:
        pass  # TERM of before the requeue
    wait_signal(waited, TEARDOWN_S)
