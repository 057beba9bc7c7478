"""``python -m slurm_ft.train``: exit codes 0 trained, 1 failed, 2 usage, or the session's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from slurm_ext.domain.errors import ConfigError, SlurmExtError
from slurm_ft.train.options import parse
from slurm_ft.train.shared import says


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Parse, train, and say an error of ours in one line."""
    environ = os.environ if environ is None else environ
    try:
        options = parse(sys.argv[1:] if argv is None else argv, environ)
        # torch: after the usage is known to be right
        if options.chain is not None:
            from slurm_ft.switch.relay import run_chain

            run_chain(options, environ, options.chain, options.switch)
        else:
            from slurm_ft.train.program import train

            train(options, environ)
    except SlurmExtError as exc:
        if says(exc, environ):
            print(f"slurm_ft.train: error: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
