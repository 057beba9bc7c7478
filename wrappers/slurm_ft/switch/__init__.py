"""Pipeline switch: warm ranks go on with the next task's parameters.

The names below are the parts that a program of its own builds on, as `site/examples/two_tasks.py`
does; `slurm_ft.switch.relay` is how the reference trainer uses them. They are looked up on first
use: the command line reads chains and time lines on machines without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_ft.switch.links import CudaLink, EmulatedLink, Link
    from slurm_ft.switch.overlap import HostBuffers, StageSwitch, SwitchError
    from slurm_ft.switch.plan import Block, Mode, StagePlan, plan_stage
    from slurm_ft.switch.storages import Held, collect, mirror
    from slurm_ft.switch.timeline import Recorder

__all__ = [
    "Block",
    "CudaLink",
    "EmulatedLink",
    "Held",
    "HostBuffers",
    "Link",
    "Mode",
    "Recorder",
    "StagePlan",
    "StageSwitch",
    "SwitchError",
    "collect",
    "mirror",
    "plan_stage",
]

_MODULES = {
    "links": ("CudaLink", "EmulatedLink", "Link"),
    "overlap": ("HostBuffers", "StageSwitch", "SwitchError"),
    "plan": ("Block", "Mode", "StagePlan", "plan_stage"),
    "storages": ("Held", "collect", "mirror"),
    "timeline": ("Recorder",),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
