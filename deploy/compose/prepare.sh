#!/bin/sh
# Writes deploy/compose/.env: fresh secrets, and which group the engine's socket belongs to.
# What is there already stays.
set -eu
cd "$(dirname "$0")"

socket=${DOCKER_SOCKET:-/var/run/docker.sock}
touch .env
chmod 600 .env

keep() {
    grep -q "^$1=" .env || echo "$1=$2" >> .env
}

secret() {
    od -An -N24 -tx1 /dev/urandom | tr -d ' \n'
}

keep FENCEPOST_RECEIPT_KEY "$(secret)"
keep FENCEPOST_HTTP_TOKEN "$(secret)"
keep POSTGRES_PASSWORD "$(secret)"
keep GRAFANA_PASSWORD "$(secret)"
keep DOCKER_SOCKET "$socket"
keep DOCKER_GID "$(stat -c %g "$socket" 2>/dev/null || stat -f %g "$socket")"
