"""The files of /etc/slurm, as text made from a ClusterSpec. Pure: no Docker, no disk.

The defaults are a tuned plain Slurm (backfill and multifactor, generous test depths, short
intervals), because a comparison against an untuned one would prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from ci.cluster.spec import (
    ADMIN,
    CLUSTER_NAME,
    CONTROLLER,
    DAEMON_USER,
    USERS,
    ClusterSpec,
    ConfValue,
)

# Each slurmd of a container listens on its own port.
FIRST_SLURMD_PORT = 17001
# Where slurmctld keeps what it knows, also after it was killed.
STATE = "/var/lib/slurm/slurmctld"
# node.sh makes one directory for each node here.
NODE_TMP = "/tmp/node"
QOS_NAMES = ("normal", "small", "preemptible", "high")

_SCHEDULER_PARAMETERS = ",".join(
    (
        # Start what fits soon after a submission: the default collects batch jobs for up to three
        # seconds.
        "batch_sched_delay=1",
        "sched_interval=10",
        # Microseconds between two passes of the main scheduler; the default of 2 would burn a core
        # when many jobs end.
        "sched_min_interval=200000",
        "default_queue_depth=10000",
        "bf_interval=5",
        "bf_max_job_test=10000",
        "bf_window=2880",
        # Slots of one second: reservations of short test jobs would otherwise be rounded up to a
        # minute.
        "bf_resolution=1",
        "bf_continue",
        # A late NumNodes= must never shrink a running job.
        "disable_job_shrink",
    )
)


def slurm_conf(spec: ClusterSpec, *, lua: bool) -> str:
    """Return slurm.conf; `lua` says whether job_submit.lua is installed."""
    settings: dict[str, ConfValue] = {
        "ClusterName": CLUSTER_NAME,
        "SlurmctldHost": CONTROLLER,
        "SlurmUser": "slurm",
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        "StateSaveLocation": STATE,
        "SlurmdSpoolDir": "/var/spool/slurmd/%n",
        # The nodes of one container share its /tmp, where mpi/pmix names a directory by user, job
        # and step alone: two nodes of a step that make it in the same moment cannot both start.
        "TmpFS": f"{NODE_TMP}/%n",
        "SlurmctldPidFile": "/run/slurm/slurmctld.pid",
        "SlurmdPidFile": "/run/slurm/slurmd-%n.pid",
        "SlurmctldLogFile": "/var/log/slurm/slurmctld.log",
        "SlurmdLogFile": "/var/log/slurm/slurmd-%n.log",
        "SlurmctldDebug": "info",
        "SlurmdDebug": "info",
        # No cgroups inside an unprivileged container, and no more cores than the machine has.
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "SlurmdParameters": "config_overrides",
        "MpiDefault": "none",
        "PropagateResourceLimits": "NONE",
        "ReturnToService": "2",
        "SlurmdTimeout": "30",
        "SlurmctldTimeout": "60",
        "MessageTimeout": "30",
        "KillWait": "5",
        "MinJobAge": "300",
        "MaxJobCount": "20000",
        "MaxArraySize": "10001",
        "JobRequeue": "1",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "DefMemPerCPU": "1000",
        "GresTypes": "gpu",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": _SCHEDULER_PARAMETERS,
        "PriorityType": "priority/multifactor",
        "PriorityMaxAge": "7-0",
        "PriorityWeightAge": "10000",
        "PriorityWeightFairshare": "10000",
        "PriorityWeightQOS": "10000",
        "PriorityWeightPartition": "1000",
        "PriorityCalcPeriod": "1",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "PreemptParameters": "send_user_signal",
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": CONTROLLER,
        "AccountingStorageTRES": f"gres/gpu,gres/gpu:{spec.gpu_type}",
        "AccountingStorageEnforce": "associations,limits,qos" if spec.limits else "associations",
        "AccountingStoreFlags": "job_comment,job_env,job_extra,job_script",
        "NodeName": _node_lines(spec),
        "PartitionName": [
            "preempt Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=0 State=UP",
            "main Nodes=ALL Default=YES PriorityTier=2 PreemptMode=OFF State=UP",
            "high Nodes=ALL PriorityTier=3 PreemptMode=OFF PriorityJobFactor=10 State=UP",
        ],
    }
    if spec.limits:
        # Otherwise a changed StartTime zeroes the accrued age of a job.
        settings["PriorityFlags"] = "ACCRUE_ALWAYS"
    if lua:
        settings["JobSubmitPlugins"] = "lua"
    settings.update(spec.slurm_conf)
    return "".join(_lines(settings))


def _lines(settings: dict[str, ConfValue]) -> Iterable[str]:
    for key, value in settings.items():
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                yield f"{key}={item}\n"


def _node_lines(spec: ClusterSpec) -> list[str]:
    gres = f" Gres=gpu:{spec.gpu_type}:{spec.gpus_per_node}" if spec.gpus_per_node else ""
    return [
        f"{node} NodeHostname={host} NodeAddr={host} Port={FIRST_SLURMD_PORT + index} "
        f"CPUs={spec.cpus_per_node} Boards=1 SocketsPerBoard=1 CoresPerSocket={spec.cpus_per_node} "
        f"ThreadsPerCore=1 RealMemory={spec.memory_mib_per_node}{gres} State=UNKNOWN"
        for host, nodes in spec.layout().items()
        for index, node in enumerate(nodes)
    ]


def gres_conf(spec: ClusterSpec) -> str:
    if not spec.gpus_per_node:
        return "AutoDetect=off\n"
    last = spec.gpus_per_node - 1
    files = "/dev/fakegpu0" if last == 0 else f"/dev/fakegpu[0-{last}]"
    return f"AutoDetect=off\nName=gpu Type={spec.gpu_type} File={files}\n"


def cgroup_conf() -> str:
    return "CgroupPlugin=disabled\n"


def accounts(spec: ClusterSpec) -> str:
    """Commands for `sacctmgr -i`; QOS limits bite only where AccountingStorageEnforce has them."""
    names = sorted({account for accounts in USERS.values() for account in accounts})
    qos = ",".join(QOS_NAMES)
    lines = [
        "modify qos normal set priority=10",
        "add qos small priority=10 MaxTRESPerJob=node=2,gres/gpu=4 GrpTRES=gres/gpu=8 MaxWall=1-0",
        "add qos preemptible priority=1",
        "add qos high priority=100 MaxJobsPerUser=4",
        f"add account {','.join(names)},service fairshare=1",
    ]
    for user, memberships in USERS.items():
        lines += [
            f"add user {user} account={account} defaultaccount={memberships[0]} fairshare=1 "
            f"qos={qos} defaultqos=normal"
            for account in memberships
        ]
    lines += [
        f"add user {ADMIN} account=service adminlevel=Administrator qos={qos} defaultqos=normal",
        f"add user {DAEMON_USER} account=service adminlevel=Operator qos={qos} defaultqos=normal",
        "exit",
    ]
    return "\n".join(lines) + "\n"


def etc_slurm(spec: ClusterSpec, *, lua: bool) -> dict[str, str]:
    """Every text file of /etc/slurm that depends on the spec, by name."""
    return {
        "slurm.conf": slurm_conf(spec, lua=lua),
        "gres.conf": gres_conf(spec),
        "cgroup.conf": cgroup_conf(),
        "accounts.sacctmgr": accounts(spec),
        **spec.etc_slurm,
    }
