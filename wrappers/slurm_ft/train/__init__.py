"""The reference fine-tuning program, ``python -m slurm_ft.train``. Needs no torch to import."""
