# shellcheck shell=bash
# Functions shared by the image build, the controller and the nodes. Every wait has a limit and a message.

WAIT_LIMIT_S=60

# munged and Slurm close every possible descriptor before they start a child, which is slow where the engine's limit is
# "infinity". The limit is lowered here, not by the engine, which may not raise it above its own.
if [ "$(ulimit -n)" = unlimited ] || [ "$(ulimit -n)" -gt 65536 ]; then
    ulimit -n 65536
fi

# await WHAT COMMAND...: run COMMAND until it succeeds.
await() {
    local what=$1 deadline=$((SECONDS + WAIT_LIMIT_S))
    shift
    until "$@" >/dev/null 2>&1; do
        if ((SECONDS >= deadline)); then
            tail -n 30 /var/log/slurm/*.log >&2 || true
            echo "gave up after ${WAIT_LIMIT_S} s waiting for ${what}" >&2
            return 1
        fi
        sleep 0.1
    done
}

start_munged() {
    install -d -o munge -g munge -m 0755 /run/munge
    install -d -o munge -g munge -m 0700 /var/log/munge /var/lib/munge
    # The cluster's key was copied in before the container started, as root: uids are the image's business.
    chown munge:munge /etc/munge/munge.key
    runuser -u munge -- /usr/sbin/munged --num-threads=4
    await "munged" munge -n
}

start_mariadb() {
    install -d -o mysql -g mysql -m 0755 /run/mysqld
    runuser -u mysql -- /usr/sbin/mariadbd >>/var/log/mariadb.log 2>&1 &
    await "MariaDB" mariadb-admin ping
}

start_slurmdbd() {
    local port=${1:-6819}
    install -d -o slurm -g slurm -m 0755 /run/slurm /var/log/slurm
    slurmdbd
    await "slurmdbd on port $port" bash -c "</dev/tcp/127.0.0.1/$port"
}
