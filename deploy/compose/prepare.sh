#!/bin/sh
# Writes .env (fresh secrets, and which group the engine's socket belongs to), and beside it the NATS
# users: permissions and password hashes for the server, a credentials file for each service. Needs
# the image. What is there already stays.
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

ledgers=$(sed -n 's/^FENCEPOST_LEDGERS=//p' .env | tail -n 1)

# As root, so that the server's half is the server's alone and each other half is its service's.
docker run --rm --user 0:0 --network none --env FENCEPOST_LEDGERS="${FENCEPOST_LEDGERS:-${ledgers:-1}}" \
    --volume "$PWD/nats:/nats" --volume "$PWD/credentials:/credentials" \
    "${FENCEPOST_IMAGE:-fencepost:latest}" sh -c '
        fencepost deploy nats --out /nats --credentials /credentials >/dev/null
        chown 10001:10001 /credentials/*.credentials'
