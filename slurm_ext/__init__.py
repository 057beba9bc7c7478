"""slurm-ext: makes an ordinary Slurm cluster good at fine-tuning foundation models."""

__version__ = "0.1.0"
