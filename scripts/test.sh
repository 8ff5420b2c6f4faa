#!/usr/bin/env bash
# Run the tests, take their labs down whatever happens (pass, failure, Ctrl-C, SIGTERM), and end with pytest's summary.
set -uo pipefail
cd "$(dirname "$0")/.."
export K3DEPLOY_LAB=${K3DEPLOY_LAB:-k3test}

cleanup() {
  for name in "$K3DEPLOY_LAB" k3mol k3doomed; do
    K3DEPLOY_LAB=$name k3deploy lab down >/dev/null 2>&1
  done
}
trap cleanup EXIT
trap 'kill -INT "$child" 2>/dev/null; wait "$child"; exit 130' INT
# The whole group: what the tests started must not go on while their labs are taken down.
trap 'kill -TERM -- "-$child" 2>/dev/null; wait "$child"; exit 143' TERM HUP

setsid pytest "$@" &
child=$!
wait "$child"
