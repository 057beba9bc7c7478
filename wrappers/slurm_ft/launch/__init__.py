"""``ft-run``: what stands between a step and the program of one rank. Standard library only."""
