#!/bin/bash
# PID 2 of the controller container: munge, MariaDB, slurmdbd, accounts, slurmctld, in the order of their needs.
# /etc/slurm/slurm.conf, accounts.sacctmgr and the munge key were put in place before the container started.
set -euo pipefail
# shellcheck source=ci/cluster/image/daemons.sh
. /usr/local/lib/cluster/daemons.sh

start_munged
start_mariadb
start_slurmdbd

# Accounts come before slurmctld, so that it knows every association from its first moment.
# sacctmgr in batch form reports errors in its text, not in its exit code.
answer=$(sacctmgr -i </etc/slurm/accounts.sacctmgr 2>&1) || true
if grep -qiE '(error|unknown|invalid|problem)' <<<"$answer"; then
    printf 'sacctmgr did not take /etc/slurm/accounts.sacctmgr:\n%s\n' "$answer" >&2
    exit 1
fi

install -d -o slurm -g slurm -m 0755 /var/lib/slurm/slurmctld
slurmctld
exec sleep infinity
