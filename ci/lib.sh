# shellcheck shell=bash
# Set-up shared by ci/test and ci/demo: Python and a virtual environment in .venv, tools, a Docker engine.
# Everything is idempotent, says what it does, and installs packages only as root on a system with apt.

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$REPOSITORY/.venv
DOCKERD_PID=
DOCKERD_LOG=${TMPDIR:-/tmp}/slurm-ext-dockerd-$(id -u).log
DOCKERD_LIMIT_S=60
APT_FRESH=

say() { printf '== %s\n' "$*" >&2; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

can_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

# apt_install PACKAGE...: its output is shown only when it fails.
apt_install() {
    local log
    log=$(mktemp)
    say "apt-get install $*"
    if [ -z "$APT_FRESH" ]; then
        apt-get update -q >"$log" 2>&1 || { cat "$log" >&2; rm -f "$log"; return 1; }
        APT_FRESH=yes
    fi
    if ! DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" \
        >"$log" 2>&1 </dev/null; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        return 1
    fi
    rm -f "$log"
}

# need COMMAND PACKAGE...: make sure that COMMAND exists.
need() {
    local command=$1
    shift
    command -v "$command" >/dev/null && return 0
    can_apt || die "\`$command\` is missing and only root can install it here: apt-get install $*"
    apt_install "$@" || die "could not install $*"
    command -v "$command" >/dev/null || die "\`$command\` is still missing after installing $*"
}

# The first Python of at least 3.11 that can make a virtual environment with pip in it.
find_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null && "$candidate" -c '
import sys, venv, ensurepip
sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done
    return 1
}

# setup_venv EXTRA...: .venv with the package (editable) and these extras. It is made anew when pyproject.toml or the
# Python changed; a missing extra is added to it. PIP_INDEX_URL and the like apply as everywhere.
setup_venv() {
    local python stamp log extra wanted=
    if ! python=$(find_python); then
        can_apt || die "Python 3.11 or newer with venv is missing: apt-get install python3 python3-venv"
        # The distribution's own Python first; older ones carry a newer Python under its full name.
        apt_install python3 python3-venv || true
        python=$(find_python) || { apt_install python3.11 python3.11-venv && python=$(find_python); } ||
            die "no Python of at least 3.11 could be installed"
    fi
    stamp=$({ cat "$REPOSITORY/pyproject.toml"; "$python" -VV; echo "$REPOSITORY"; } | sha256sum)
    if [ ! -x "$VENV/bin/python" ] || [ "$(head -n 1 "$VENV/.stamp" 2>/dev/null)" != "$stamp" ]; then
        say "making .venv with $("$python" -V) (once; a minute or two)"
        "$python" -m venv --clear "$VENV" || die "could not make $VENV"
        rm -f "$VENV/.stamp"
    fi
    for extra in "$@"; do
        grep -qx "extra $extra" "$VENV/.stamp" 2>/dev/null || wanted+=${wanted:+,}$extra
    done
    [ -n "$wanted" ] || return 0
    say "installing the package with $wanted into .venv"
    log=$(mktemp)
    if ! (cd "$REPOSITORY" && "$VENV/bin/python" -m pip install --disable-pip-version-check -e ".[$wanted]") \
        >"$log" 2>&1 </dev/null; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        die "pip could not install the package with $wanted into $VENV"
    fi
    rm -f "$log"
    [ -s "$VENV/.stamp" ] || printf '%s\n' "$stamp" >"$VENV/.stamp"
    printf 'extra %s\n' "$@" >>"$VENV/.stamp"
}

engine_answers() {
    (cd "$REPOSITORY" && "$VENV/bin/python" -c 'from ci.cluster import engine; engine.connect()') >/dev/null 2>&1
}

# Make sure that a Docker engine answers; one that we start ourselves is stopped by stop_docker.
start_docker() {
    local deadline
    engine_answers && return 0
    can_apt || command -v dockerd >/dev/null ||
        die "no Docker engine answers: start it, add your user to the group docker, or run this as root"
    [ "$(id -u)" = 0 ] ||
        die "no Docker engine answers to user $(id -un): start it, add the user to the group docker, or run this as root"
    if ! command -v dockerd >/dev/null; then
        apt_install docker.io || die "could not install docker.io"
        # In newer releases the client, which `ci/slurm enter` wants, is a package of its own.
        if ! command -v docker >/dev/null && apt-cache show docker-cli >/dev/null 2>&1; then
            apt_install docker-cli || say "no docker command: \`python -m ci.cluster enter\` will not work"
        fi
        # Where there is an init system, the package has started the service.
        [ -d /run/systemd/system ] && sleep 2
        engine_answers && return 0
    fi
    say "starting dockerd (output in $DOCKERD_LOG)"
    # A session of its own keeps Ctrl-C away from it; it must not hold our stdout open.
    setsid dockerd >"$DOCKERD_LOG" 2>&1 </dev/null &
    DOCKERD_PID=$!
    deadline=$((SECONDS + DOCKERD_LIMIT_S))
    until engine_answers; do
        if ! kill -0 "$DOCKERD_PID" 2>/dev/null || ((SECONDS > deadline)); then
            tail -n 20 "$DOCKERD_LOG" >&2
            die "dockerd did not come up"
        fi
        sleep 0.2
    done
}

# Stop the engine that we started, unless a cluster is still up in it (ci/demo --keep, or another run).
stop_docker() {
    [ -n "$DOCKERD_PID" ] || return 0
    if [ -n "$(cd "$REPOSITORY" && "$VENV/bin/python" -m ci.cluster list 2>/dev/null)" ]; then
        say "dockerd (pid $DOCKERD_PID) stays up, because clusters run in it:"
        (cd "$REPOSITORY" && "$VENV/bin/python" -m ci.cluster list >&2)
        return 0
    fi
    kill "$DOCKERD_PID" 2>/dev/null
    wait "$DOCKERD_PID" 2>/dev/null
    DOCKERD_PID=
}

# The engine and, for a machine without a registry, what makes the base image.
setup_docker() {
    start_docker
    if ! command -v debootstrap >/dev/null && can_apt; then
        apt_install debootstrap debian-archive-keyring || say "no debootstrap: the base image must be pulled"
    fi
}
