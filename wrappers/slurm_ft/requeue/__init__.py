"""Whether a job that stopped comes back, and how. Standard library only."""
