#!/bin/bash
# PID 2 of a node container: munge, fake GPU devices, and one slurmd for each node name given.
# node.sh GPUS NODENAME...
set -euo pipefail
# shellcheck source=ci/cluster/image/daemons.sh
. /usr/local/lib/cluster/daemons.sh

gpus=$1
shift
# A character device that every container may open (1:3 is /dev/null) is enough for gres.conf's File=.
for ((index = 0; index < gpus; index++)); do
    [ -e "/dev/fakegpu$index" ] || mknod "/dev/fakegpu$index" c 1 3
    chmod 666 "/dev/fakegpu$index"
done
install -d -m 0755 /run/slurm /var/log/slurm
start_munged
# A slurmd that finds no slurmctld asks again only after a growing pause, so a start in the wrong order can cost a minute.
# After the limit it starts all the same: a node may come back while the controller is away.
WAIT_LIMIT_S=30 await "slurmctld on ctl:6817" bash -c '</dev/tcp/ctl/6817' || true
for node in "$@"; do
    install -d -m 0755 "/var/spool/slurmd/$node"
    # TmpFS of slurm.conf.
    install -d -m 1777 "/tmp/node/$node"
    slurmd -N "$node"
done
exec sleep infinity
