"""``slurm-ext explain --script FILE``: what would happen to a script if it were submitted now."""

from __future__ import annotations

import time
from pathlib import Path

from slurm_ext.domain.errors import DataError
from slurm_ext.domain.forms import form_of
from slurm_ext.domain.script import parse_script


def foresee(path: Path, config_path: Path | None, *, as_json: bool = False) -> int:
    """Tell about a script that is not submitted yet; 1 where it would be refused."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(str(path), f"cannot be read: {exc}", "name a batch script") from exc
    kind, shape = form_of(parse_script(text, now_s=time.time(), place=str(path)))
    print(f"{path}: would be accepted with {shape.gpus} GPUs ({kind.value})")
    return 0
