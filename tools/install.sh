#!/usr/bin/env bash
# Install this checkout with an extra into the environment of $PYTHON, from pinned packages: tools/install.sh demo
set -euo pipefail
cd "$(dirname "$0")/.."
extra=$1
pip=("$PYTHON" -m pip --disable-pip-version-check install --constraint constraints.txt)
cpu_index=https://download.pytorch.org/whl/cpu

# On Linux, PyPI's torch is a CUDA build of several GB. Without an NVIDIA device PyTorch's CPU build is enough.
has_gpu() { compgen -G '/dev/nvidia[0-9]*' >/dev/null || [ -e /dev/dxg ]; }
if [ "$(uname)" = Linux ] && ! has_gpu && ! "$PYTHON" -m pip --quiet show torch 2>/dev/null; then
	if "$PYTHON" -c "import urllib.request as r; r.urlopen('$cpu_index/torch/', timeout=3)" 2>/dev/null; then
		echo "Installing the CPU build of torch (200 MB): no NVIDIA device was found"
		"${pip[@]}" --no-deps --index-url "$cpu_index" "$(grep '^torch==' constraints.txt)"
	else
		echo "$cpu_index cannot be reached: torch comes from pip's default index, which may have the CUDA build (several GB)"
	fi
fi
echo "Installing Vitwire with the extra '$extra' into $(dirname "$(dirname "$PYTHON")")"
"${pip[@]}" --editable ".[$extra]" | grep --line-buffered -E '^(Collecting|  Downloading|Installing|Successfully|ERROR)' || [ "${PIPESTATUS[0]}" = 0 ]
du -sh "$(dirname "$(dirname "$PYTHON")")" | sed 's/^/Installed: /'
