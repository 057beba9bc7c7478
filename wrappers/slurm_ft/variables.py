"""Names of the environment variables between ``ft-run``, the program and the session.

One place, so that both sides and the documentation agree. A variable that the user has set is
never overwritten, except where it describes what ``ft-run`` itself has done (``JOB``, ``ATTEMPT``,
``STATUS``).
"""

from __future__ import annotations

# Slurm's own id of the job; a task of an array as 123_4.
JOB = "FT_JOB_ID"
# Which job this is, as "RAW_ID [ARRAY_TASK]", by the SPANK plugin or by an ft-run further up.
# SLURM_ARRAY_* cannot be relied on: sbatch inside a task hands those of the task to the new job
# (seen on 24.11).
SLURM_JOB = "FT_SLURM_JOB"
# Slurm's restart count: 0 in the first attempt.
ATTEMPT = "FT_ATTEMPT"
# Directory of this job's small files, the same in every attempt, mode 0700.
STATE_DIR = "FT_STATE_DIR"
# File that the session of this rank keeps for its ft-run (slurm_ft.status).
STATUS = "FT_STATUS_FILE"
# File that rank 0's session keeps for the daemon (slurm_ext.domain.progress); unset: no spool.
PROGRESS = "FT_PROGRESS_FILE"
# Directory with one directory per complete checkpoint, the same in every attempt.
CHECKPOINT_DIR = "FT_CHECKPOINT_DIR"
# Root of the content-addressed block store; unset: checkpoints hold their own bytes.
BLOCK_STORE = "FT_BLOCK_STORE"
# Names of the signals that mean "save and come back", separated by commas, e.g. "USR2,TERM".
SIGNALS = "FT_SIGNALS"
# Seconds from such a signal to SIGKILL, as far as known.
GRACE_S = "FT_GRACE_S"
# Time-out of one collective in seconds, as set for NCCL and gloo.
COLLECTIVE_TIMEOUT_S = "FT_COLLECTIVE_TIMEOUT_S"
# Seconds between two checkpoints as the user bounds them: "auto", "LOW-HIGH" or a number.
CHECKPOINT_INTERVAL = "FT_CHECKPOINT_INTERVAL"
# Bytes that the checkpoints of the job may take together, e.g. "200G"; unset: no bound.
CHECKPOINT_QUOTA = "FT_CHECKPOINT_QUOTA"
# The configuration that holds: the granted allocation, and what the plan says within it.
GPUS = "FT_GPUS"
NODES = "FT_NODES"
LOCAL_BATCH = "FT_LOCAL_BATCH"
ACCUMULATION = "FT_ACCUMULATION"
GLOBAL_BATCH = "FT_GLOBAL_BATCH"
STAGES = "FT_STAGES"
MICRO_BATCHES = "FT_MICRO_BATCHES"
PRECISION = "FT_PRECISION"
GRAD_CHECKPOINTING = "FT_GRAD_CHECKPOINTING"
FROZEN = "FT_FROZEN"
# File of a chain of tasks that the program trains one after the other (ft-run --chain).
CHAIN = "FT_CHAIN"
# Digest of the configuration as this rank read it: sessions compare theirs at start.
PLAN_DIGEST = "FT_PLAN_DIGEST"
# Mean time in seconds between failures of the job as a whole; unset: learnt from its attempts.
MTBF_S = "FT_MTBF_S"
# Seconds between two reports of progress.
PROGRESS_INTERVAL_S = "FT_PROGRESS_INTERVAL_S"
# Spool directory of the daemon.
SPOOL = "FT_SPOOL"
# Time-out of joining (rendezvous, store, first collective) in seconds.
INIT_TIMEOUT_S = "FT_INIT_TIMEOUT_S"
# Process id of the user's program, for the command of --on-preempt.
CHILD_PID = "FT_CHILD_PID"
# Names of the variables that ft-run has chosen by itself, separated by commas: an ft-run of
# another job that was submitted from inside this one does not take them for the user's.
CHOSEN = "FT_CHOSEN"

# Twins of options of ft-run that the program does not need.
ON_PREEMPT = "FT_ON_PREEMPT"
ON_RESUME = "FT_ON_RESUME"
REQUEUE = "FT_REQUEUE"
MAX_REQUEUES = "FT_MAX_REQUEUES"
LAUNCHER = "FT_LAUNCHER"

# Directory that takes the state of a rank in host memory while it is paused; unset: it stays.
PAUSE_SPILL = "FT_PAUSE_SPILL"
# 1: give back the whole device state by cuda-checkpoint, where it can.
PAUSE_CUDA = "FT_PAUSE_CUDA"
# Seconds that giving back a rank's memory, or saving, may take in a pause, and taking it back.
PAUSE_MOVE_S = "FT_PAUSE_MOVE_S"
