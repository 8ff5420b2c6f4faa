#!/usr/bin/env bash
# Run the tests on labs of their own, and take those down whatever happens: pass, failure, Ctrl-C or SIGTERM.
set -uo pipefail
cd "$(dirname "$0")/.."
export K3DEPLOY_LAB=${K3DEPLOY_LAB:-k3test}
cleanup() { k3deploy lab down >/dev/null 2>&1; }
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
pytest "$@" &
wait $!
