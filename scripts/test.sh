#!/usr/bin/env bash
# Run the tests in three processes (much of what a lab's tests do is waiting), leave nothing behind whatever happens (pass, failure, Ctrl-C,
# SIGTERM), and end with pytest's summary.
set -uo pipefail
cd "$(dirname "$0")/.."
export K3DEPLOY_LAB=${K3DEPLOY_LAB:-k3test}
# In the environment of everything that the tests start, so that what outlives its parent is found.
export TEST_RUN_MARK=k3deploy-$$

left_running() {
  grep -lzx "TEST_RUN_MARK=$TEST_RUN_MARK" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3
}

cleanup() {
  trap '' INT TERM HUP
  # shellcheck disable=SC2046 # one word a process
  kill -KILL $(left_running) 2>/dev/null
  for name in "$K3DEPLOY_LAB"{,1,2} k3mol k3doomed k3rdma; do
    K3DEPLOY_LAB=$name k3deploy lab down >/dev/null 2>&1
  done
}
trap cleanup EXIT
trap 'kill -INT "$child" 2>/dev/null; wait "$child"; exit 130' INT
# The whole group: what the tests started must not go on while their labs are taken down.
trap 'kill -TERM -- "-$child" 2>/dev/null; wait "$child"; exit 143' TERM HUP

# A real browser looks at the report. Where it cannot be installed, that test is skipped and says so.
if ! command -v chromium >/dev/null && command -v apt-get >/dev/null; then
  echo "installing chromium, in which the report is looked at"
  as_root=$([ "$(id -u)" -eq 0 ] || echo sudo -n)
  { $as_root apt-get update -qq && $as_root apt-get install -o DPkg::Lock::Timeout=600 -qq -y --no-install-recommends chromium; } >/dev/null 2>&1
fi

# With job control it has a group of its own, and Ctrl-C is not ignored in it, as it is in other background processes.
set -m
pytest -n 3 --durations=20 --durations-min=10 "$@" &
child=$!
set +m
wait "$child"
