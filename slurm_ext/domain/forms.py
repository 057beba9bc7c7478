"""What the Lua module would make of a batch script: its form, or the reason for refusing it.

Only for ``slurm-ext explain --script``; at submission ``site/lua/ft_shape.lua`` decides, and a
property test holds the two to the same answers. The one difference is the source: Lua sees the
request after sbatch has read it, here the options come from the script alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from slurm_ext.domain.directive import GpuRequest, GpuRequestKind, RequestedShape
from slurm_ext.domain.errors import DirectiveError
from slurm_ext.domain.job import ShapeKind
from slurm_ext.domain.script import BatchScript

_MEMORY = re.compile(r"([0-9]+)([KMGT]?)B?", re.ASCII | re.IGNORECASE)
_MIB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024 * 1024}
_GPU = re.compile(r"gpu(?::([A-Za-z][^:]*))?(?::([0-9]+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Gpus:
    """GPUs as one option asks for them; ``items`` counts entries of several types."""

    count: int = 0
    kind: str = ""
    items: int = 0
    others: bool = False


@dataclass(frozen=True, slots=True)
class _Request:
    nodes: int
    nodes_given: int | None
    range_top: int | None
    ntasks: int | None
    tasks_per_node: int | None
    cpus_per_task: int
    memory_node_mib: int
    per_node: _Gpus
    per_job: _Gpus
    per_task: _Gpus

    @property
    def all_tasks(self) -> int:
        return self.ntasks or self.nodes * (self.tasks_per_node or 1)

    @property
    def gpus(self) -> int:
        if self.per_job.count:
            return self.per_job.count
        if self.per_task.count:
            return self.per_task.count * self.all_tasks
        return self.per_node.count * self.nodes


def form_of(script: BatchScript) -> tuple[ShapeKind, RequestedShape]:
    """The form and submitted shape that would be recorded; :class:`DirectiveError` if refused."""
    request = _read(script.options)
    plain = RequestedShape(
        gpus=request.gpus,
        nodes=request.nodes,
        ntasks=request.all_tasks,
        nodes_max=request.range_top or 0,
        cpus_per_task=request.cpus_per_task,
        memory_node_mib=request.memory_node_mib,
    )
    gpus = script.directive.gpus
    if gpus.kind is GpuRequestKind.REQUESTED:
        return ShapeKind.FIXED, plain
    if why := _why_fixed(script.options, request):
        return ShapeKind.FIXED, replace(plain, why_fixed=why)
    kind, req = _classify(script.options, request, plain, gpus)
    _check_counts(gpus, kind, req)
    return kind, req


def _read(options: Mapping[str, str]) -> _Request:
    low, _, top = options.get("nodes", "").partition("-")
    nodes = int(low) if low else 1
    memory = _MEMORY.fullmatch(options.get("mem", ""))
    per_node = [_gpus(options[name], name) for name in ("gres", "gpus-per-node") if name in options]
    return _Request(
        nodes=nodes,
        nodes_given=int(low) if low else None,
        range_top=int(top) if top and int(top) > nodes else None,
        ntasks=_number(options, "ntasks"),
        tasks_per_node=_number(options, "ntasks-per-node"),
        cpus_per_task=_number(options, "cpus-per-task") or 0,
        memory_node_mib=int(int(memory[1]) * _MIB[memory[2].upper()]) if memory else 0,
        per_node=_Gpus(
            sum(gpus.count for gpus in per_node),
            per_node[-1].kind if per_node else "",
            sum(gpus.items for gpus in per_node),
            any(gpus.others for gpus in per_node),
        ),
        per_job=_gpus(options.get("gpus", ""), "gpus"),
        per_task=_gpus(options.get("gpus-per-task", ""), "gpus-per-task"),
    )


def _number(options: Mapping[str, str], name: str) -> int | None:
    return int(options[name]) if name in options else None


def _gpus(text: str, name: str) -> _Gpus:
    """``gpu:v100:4,nic:1`` of --gres, ``v100:4`` of the others."""
    found = _Gpus()
    for item in filter(None, text.split(",")):
        whole = item if name == "gres" else f"gpu:{item}"
        match = _GPU.fullmatch(whole)
        if not match:
            found = replace(found, others=True)
            continue
        count = int(match[2]) if match[2] else 1
        found = replace(
            found, count=found.count + count, kind=match[1] or "", items=found.items + 1
        )
    return found


def _why_fixed(options: Mapping[str, str], request: _Request) -> str:
    forms = (request.per_node, request.per_job, request.per_task)
    if options.get("exclusive") == "":
        return "exclusive"
    if options.get("nodelist"):
        return "nodelist"
    if "," in options.get("partition", ""):
        return "partitions"
    if "," in options.get("qos", ""):
        return "qos"
    if any(form.others for form in forms):
        return "other-gres"
    return "gpu-forms" if sum(form.items for form in forms) > 1 else ""


def _classify(
    options: Mapping[str, str], request: _Request, plain: RequestedShape, gpus: GpuRequest
) -> tuple[ShapeKind, RequestedShape]:
    nodes, ntasks, per_node = request.nodes, request.ntasks, request.tasks_per_node
    if "gpus-per-socket" in options:
        raise _refusal(gpus, "GPUs per socket cannot be resized", max(1, request.gpus), nodes)
    if "ntasks-per-gpu" in options:
        raise _refusal(gpus, "--ntasks-per-gpu cannot be resized", request.all_tasks, nodes)
    if request.gpus < 1:
        raise _refusal(gpus, "the job asks for no GPU", 1, 1)
    if request.per_task.count:
        each = request.per_task.count
        req = replace(plain, gpu_type=request.per_task.kind, gpus_per_task=each)
        if per_node:
            on_node = per_node * each
            return ShapeKind.TASKS_PER_NODE, replace(
                req, gpus_per_node=on_node, gpus=on_node * nodes, ntasks=per_node * nodes
            )
        if each > 1:
            what = f"--gpus-per-task={each} cannot be resized"
            raise _refusal(gpus, what, request.gpus, request.all_tasks)
        return ShapeKind.RANK_PER_GPU, req

    on_node = request.per_node.count
    if request.per_job.count:
        on_node = _even_share(request, gpus)
    kind = request.per_job.kind if request.per_job.count else request.per_node.kind
    req = replace(plain, gpu_type=kind, gpus_per_node=on_node)
    if per_node == 1:
        return ShapeKind.LAUNCHER_PER_NODE, replace(req, ntasks=nodes)
    if per_node:
        return ShapeKind.TASKS_PER_NODE, replace(req, ntasks=per_node * nodes)
    if (ntasks or 1) == 1 and nodes == 1:
        return ShapeKind.LAUNCHER_PER_NODE, replace(req, nodes_max=request.range_top or 1)
    if ntasks is None or ntasks == nodes:
        return ShapeKind.LAUNCHER_PER_NODE, replace(req, ntasks=nodes)
    if nodes == 1 and not request.range_top and ntasks == on_node:
        return ShapeKind.SINGLE_NODE, replace(req, nodes_max=1)
    if ntasks == nodes * on_node and not request.range_top:
        return ShapeKind.TASKS_PER_NODE, req
    what = f"{ntasks} tasks on {request.gpus} GPUs cannot be resized together"
    raise _refusal(gpus, what, request.gpus, nodes)


def _even_share(request: _Request, gpus: GpuRequest) -> int:
    """GPUs on each node where ``--gpus`` gives only the total."""
    total, nodes, ntasks = request.per_job.count, request.nodes, request.ntasks
    launchers = request.tasks_per_node == 1 or (ntasks == nodes and nodes > 1)
    if nodes == 1 and not request.range_top:
        single = (ntasks or 1) == 1 and not request.tasks_per_node
        if single or launchers or (ntasks == total and request.nodes_given == 1):
            return total
    elif nodes > 1 and launchers and not request.range_top and total % nodes == 0:
        return total // nodes
    raise _refusal(gpus, "--gpus may spread unevenly over nodes and ranks", total, nodes)


def _check_counts(gpus: GpuRequest, kind: ShapeKind, req: RequestedShape) -> None:
    if gpus.kind is not GpuRequestKind.LIST:
        return
    unit = req.gpus_per_node if kind is ShapeKind.TASKS_PER_NODE else 1
    if unit > 1 and any(low % unit or top > low for low, top in gpus.ranges):
        raise DirectiveError(
            "--ft-gpus",
            str(gpus),
            f"a job of this form can only have multiples of {unit} GPUs",
            f"list only those, or write -n {req.gpus} --gpus-per-task=1 for one rank per GPU",
        )
    if not gpus.allows(req.gpus):
        raise DirectiveError(
            "--ft-gpus",
            str(gpus),
            f"the requested {req.gpus} GPUs are not in the list",
            "add them or request one of the listed counts",
        )


def _refusal(gpus: GpuRequest, why: str, count: int, nodes: int) -> DirectiveError:
    return DirectiveError(
        "--ft-gpus",
        str(gpus),
        why,
        f"write -n {count} --gpus-per-task=1 for one rank per GPU, -N {nodes} --ntasks-per-node=1 "
        f"--gres=gpu:{max(1, -(-count // nodes))} for one launcher per node, or "
        "--ft-gpus=requested to keep the job as it is",
    )
