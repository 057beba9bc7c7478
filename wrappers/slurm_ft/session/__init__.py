"""Safe points, agreement, progress and saves inside the program.

Users write ``slurm_ft.session(...)``, and the package of that name is what they get as soon as any
of its modules was imported: importing a sub-module sets the attribute, whatever was there. So the
package itself can be called, and does what `slurm_ft.session.session.session` does.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """This package, with a call."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from slurm_ft.session.session import session

        return session(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
