"""Allocation: one problem type (multiple-choice knapsack), three solvers.

`solve.allocate` is the front door; `objective` makes its numbers; `explain` retells them.
Nothing in here knows Slurm, jobs, the clock of the day or randomness.
"""
