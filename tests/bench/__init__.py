"""Benchmarks: run one with ``python -m tests.bench.NAME``; see README.md.

Importing this package pins numerical libraries to one thread, because they read these variables
once, when they are first loaded, and every claim made here is about one thread.
"""

from __future__ import annotations

import os

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"
