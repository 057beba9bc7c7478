#!/bin/bash
# Runs once, during docker build: users, directories, and an accounting database that already has its tables, because
# creating them takes several seconds that every cluster start would pay again.
set -euo pipefail
here=/usr/local/lib/cluster
# shellcheck source=ci/cluster/image/daemons.sh
. "$here/daemons.sh"

groupadd --gid 2000 research
uid=2000
for user in admin alice bob carol; do
    useradd --uid "$uid" --gid research --create-home --shell /bin/bash "$user"
    uid=$((uid + 1))
done
# The helper daemon's own Unix user: it gets Slurm's Operator level, never root.
useradd --system --uid 900 --user-group --home-dir /var/lib/slurm-ext --create-home --shell /bin/bash slurm-ext

install -d -o slurm -g slurm -m 0755 /var/spool/slurmd /run/slurm
install -d -o slurm-ext -g slurm-ext -m 1777 /var/spool/slurm-ext
install -d -o slurm-ext -g slurm-ext -m 0755 /etc/slurm-ext

cp "$here/my.cnf" /etc/mysql/mariadb.conf.d/90-cluster.cnf
# The build may share the host's network: another port than a cluster's, so that a slurmdbd there is never spoken to.
bake_port=26819
if bash -c "</dev/tcp/127.0.0.1/$bake_port" 2>/dev/null; then
    echo "port $bake_port is taken on this machine: the accounting tables cannot be prepared" >&2
    exit 1
fi
sed "s/^DbdPort=.*/DbdPort=$bake_port/" "$here/slurmdbd.conf" >/etc/slurm/slurmdbd.conf
chown slurm:slurm /etc/slurm/slurmdbd.conf
chmod 0600 /etc/slurm/slurmdbd.conf
rm -rf /var/lib/mysql
install -d -o mysql -g mysql -m 0700 /var/lib/mysql
mariadb-install-db --user=mysql --skip-test-db >/dev/null

start_munged
start_mariadb
mariadb -e "CREATE DATABASE slurm_acct_db;
            CREATE USER slurm@localhost IDENTIFIED BY 'slurm';
            GRANT ALL ON slurm_acct_db.* TO slurm@localhost;"
start_slurmdbd "$bake_port"
# A short-lived slurmctld registers the cluster and the GPU as a countable resource: no QOS can limit GPUs before that.
cat >/etc/slurm/slurm.conf <<END
ClusterName=ft
SlurmctldHost=$(hostname)
SlurmUser=slurm
SlurmctldPort=$((bake_port + 1))
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
StateSaveLocation=/var/lib/slurm/slurmctld
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort=$bake_port
AccountingStorageTRES=gres/gpu
GresTypes=gpu
NodeName=none Gres=gpu:1
PartitionName=none Nodes=ALL
END
sacctmgr -i add cluster ft
slurmctld
await "the accounting of GPUs" bash -c 'sacctmgr -n show tres | grep -qw gpu'
kill "$(cat /run/slurm/slurmctld.pid)"
await "the end of slurmctld" bash -c '! pgrep -x slurmctld'
rm -r /etc/slurm/slurm.conf /var/lib/slurm/slurmctld

kill "$(cat /run/slurm/slurmdbd.pid)"
await "the end of slurmdbd" bash -c '! pgrep -x slurmdbd'
mariadb-admin shutdown
await "the end of MariaDB" bash -c '! pgrep -x mariadbd'
pkill -x munged
install -o slurm -g slurm -m 0600 "$here/slurmdbd.conf" /etc/slurm/slurmdbd.conf
rm -f /etc/munge/munge.key /var/log/mariadb.log /var/log/slurm/* /run/munge/*
