#!/bin/sh
# Starts a Docker engine of our own, where the machine has none running, and stops what it started.
#
#   engine.sh start     prints DOCKER_HOST=unix://…; an engine that answers already is taken as it is
#   engine.sh stop      ends the engine that `start` started, its containers with it; images stay
#   engine.sh restart   the same engine again, as after an upgrade
#   engine.sh stop-daemon   ends it and leaves its containers to be found at the next start
#   engine.sh clean     stop, and removes its data
#
# FENCEPOST_ENGINE_HOME is where its data, socket and log are (default /var/tmp/fencepost-engine).
# Ends with 77, and the reason on standard error, where no engine can be had: a test then skips.
set -eu

home=${FENCEPOST_ENGINE_HOME:-/var/tmp/fencepost-engine}
socket=$home/docker.sock
pid_file=$home/docker.pid
log=$home/log
seconds=${FENCEPOST_ENGINE_SECONDS:-30}

unavailable() {
    echo "engine: $*" >&2
    exit 77
}

answers() {
    docker -H "$1" version >/dev/null 2>&1
}

ours() {
    [ -s "$pid_file" ] && kill -0 "$(cat "$pid_file")" 2>/dev/null \
        && [ "$(cat "/proc/$(cat "$pid_file")/comm" 2>/dev/null)" = dockerd ]
}

# All containers of an engine are one group to the kernel's scheduler, with the weight of a single
# process outside: beside a test run that keeps every core busy they would hardly move.
weigh() {
    for group in /sys/fs/cgroup/cpu/docker/cpu.shares:8192 /sys/fs/cgroup/docker/cpu.weight:800; do
        mkdir "$(dirname "${group%:*}")" 2>/dev/null || true
        { echo "${group#*:}" > "${group%:*}"; } 2>/dev/null || true
    done
}

start() {
    command -v docker >/dev/null 2>&1 || unavailable "no docker command: install docker.io"
    if ours && answers "unix://$socket"; then
        echo "DOCKER_HOST=unix://$socket"
        return
    fi
    if [ -z "${FENCEPOST_ENGINE_HOME:-}" ]; then
        for host in "${DOCKER_HOST:-}" unix:///var/run/docker.sock; do
            if [ -n "$host" ] && answers "$host"; then
                echo "DOCKER_HOST=$host"
                return
            fi
        done
    fi
    [ "$(id -u)" = 0 ] || unavailable "none runs, and only root may start one"
    command -v dockerd >/dev/null 2>&1 || unavailable "none runs, and there is no dockerd: install docker.io"
    mkdir -p "$home"
    chmod 711 "$home"
    rm -f "$pid_file" "$socket"
    # A session of its own: what ends the caller's terminal or group must not end containers midway.
    setsid dockerd --data-root "$home/data" --exec-root "$home/exec" --pidfile "$pid_file" \
        --host "unix://$socket" --log-level warn </dev/null >"$log" 2>&1 &
    daemon=$!
    tries=$((seconds * 10))
    while [ "$tries" -gt 0 ]; do
        if answers "unix://$socket"; then
            weigh
            echo "DOCKER_HOST=unix://$socket"
            return
        fi
        kill -0 "$daemon" 2>/dev/null || break
        sleep 0.1
        tries=$((tries - 1))
    done
    stop
    unavailable "dockerd did not start here: $(grep -v 'level=info' "$log" | tail -n 2 | tr '\n' ' ')"
}

end() {
    if ours; then
        daemon=$(cat "$pid_file")
        kill "-$1" "$daemon"
        tries=$((seconds * 10))
        while [ "$tries" -gt 0 ] && [ -d "/proc/$daemon" ] && ! grep -q '^State:.*Z' "/proc/$daemon/status" 2>/dev/null; do
            sleep 0.1
            tries=$((tries - 1))
        done
    fi
    rm -f "$pid_file" "$socket"
}

stop() {
    # Containers first, so that none is left with its shim where the daemon's own end is cut short.
    if ours && answers "unix://$socket"; then
        for id in $(docker -H "unix://$socket" ps -aq); do
            docker -H "unix://$socket" rm -fv "$id" >/dev/null 2>&1 || true
        done
    fi
    end TERM
}

clean() {
    # The daemon leaves its data mounted upon itself.
    grep -F " $home/" /proc/mounts | cut -d ' ' -f 2 | sort -r | while read -r place; do
        umount "$place" || true
    done
    rm -rf "$home"
}

case "${1:-}" in
    start) start ;;
    stop) stop ;;
    restart) end TERM; start ;;
    stop-daemon) end TERM ;;
    clean) stop; clean ;;
    *) echo "usage: engine.sh start|stop|restart|stop-daemon|clean" >&2; exit 2 ;;
esac
