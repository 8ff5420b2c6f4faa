#!/usr/bin/env bash
# Make the project's own virtual environment. Installs python3-venv where the system's Python lacks it; says so.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv
python=${PYTHON:-python3}

"$python" - <<'PY' || { echo "k3deploy needs Python 3.11 or newer: set PYTHON=/path/to/python3.11" >&2; exit 2; }
import sys
sys.exit(sys.version_info < (3, 11))
PY

if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  echo "installing the system package python3-venv"
  sudo=(); [ "$(id -u)" = 0 ] || sudo=(sudo -n)
  "${sudo[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends python3-venv
fi

# The stamp names what was installed: an edited pyproject.toml, another Python or a moved checkout makes it stale.
want="$("$python" -c 'import sys; print(sys.version)') $PWD $(sha256sum < pyproject.toml)"
if [ "$(cat "$venv/.k3deploy-stamp" 2>/dev/null)" != "$want" ]; then
  echo "installing Python packages into $venv"
  "$python" -m venv --clear "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --editable '.[dev]'
  printf '%s' "$want" > "$venv/.k3deploy-stamp"
fi
