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
# It goes into the background before it has read everything, and without accounting it waits for ever: so look at all of
# them until it answers.
until scontrol ping 2>/dev/null | grep -q 'is UP'; do
    for daemon in mariadbd slurmdbd slurmctld; do
        if ! pgrep -x "$daemon" >/dev/null; then
            echo "$daemon ended:" >&2
            grep -hiE 'fatal|error' /var/log/slurm/*.log /var/log/mariadb.log | tail -n 20 >&2
            exit 1
        fi
    done
    sleep 0.1
done
exec sleep infinity
