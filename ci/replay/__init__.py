"""The demonstration: a fine-tuning workload replayed as real Slurm jobs in compressed time.

    python -m ci.replay [--full] [--workload NAME|FILE] ...

The same jobs run on the same tuned slurm.conf in up to three ways: plain Slurm, the daemon choosing
the order only, the daemon choosing order and GPU counts. See README.md in this folder.
"""
