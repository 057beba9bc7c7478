"""Event-driven replay of fine-tuning workloads through the policies that the daemon runs.

``workload`` reads a trace, ``truth`` says how long a job really takes, ``jobs`` joins the two,
``engine`` replays, ``metrics`` and ``gantt`` report. Nothing in here talks to Slurm, and nothing
reads the clock of the day: a replay of equal input is equal to the last bit.
"""
