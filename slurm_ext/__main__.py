"""``python -m slurm_ext`` is ``slurm-ext``."""

from __future__ import annotations

import sys

from slurm_ext.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
