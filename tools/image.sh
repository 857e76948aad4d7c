#!/usr/bin/env bash
# Build the unmodified Dockerfile with buildah, which needs no container engine, on a base made by mmdebstrap and tagged
# with the name in FROM. All files are below .tools/image; the last line of stdout is the root directory of the image,
# and .tools/image/image.json its configuration.
#
#   tools/image.sh [NAME=VALUE build arguments…]      default: VARIANT=cpu
set -euo pipefail
cd "$(dirname "$0")/.."
for tool in buildah mmdebstrap runc; do
    command -v "$tool" >/dev/null || {
        echo "tools/image.sh needs $tool: apt-get install --no-install-recommends buildah mmdebstrap runc" >&2
        exit 1
    }
done
work=$PWD/.tools/image
base=docker.io/library/$(sed -n 's/^ARG BASE_IMAGE=//p' Dockerfile)
mkdir -p "$work"
buildah() { command buildah --root "$work/storage" --runroot "$work/run" "$@"; }

if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    echo "making $base with mmdebstrap" >&2
    mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,libpython3-dev,ca-certificates bookworm "$work/base.tar" >&2
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$work/base.tar" / >/dev/null
    buildah commit --quiet --rm "$container" "$base" >/dev/null
    rm "$work/base.tar"
fi

# The build uses the host's certificates, pip settings and local wheels. They are mounted, so no layer contains them.
mounts=(--volume "/etc/ssl/certs/ca-certificates.crt:/etc/ssl/certs/ca-certificates.crt:ro")
settings=$work/pip.conf
{
    echo "[global]"
    python3 -m pip config list | sed -n "s/^\(global\|:env:\)\.\(find-links\|extra-index-url\|index-url\|cert\)='\(.*\)'$/\2 = \3/p" |
        sed 's/\\n/ /g' | sort -u -k1,1
} >"$settings"
mounts+=(--volume "$settings:/etc/pip.conf:ro")
while read -r folder; do
    if [[ -d $folder ]]; then mounts+=(--volume "$folder:$folder:ro"); fi
done < <(grep -E '^(find-links|extra-index-url|index-url)' "$settings" | grep -oE '(file://)?/[^ ]+' | sed 's#^file://##; s#/simple/\{0,1\}$##' | grep -v '^//' | sort -u)

arguments=(--build-arg VARIANT=cpu --build-arg "REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)")
for argument in "$@"; do arguments+=(--build-arg "$argument"); done
# Docker's image format, since that of OCI has no HEALTHCHECK.
buildah bud --isolation chroot --format docker --layers --pull-never "${mounts[@]}" "${arguments[@]}" --tag vitwire:test . >&2
buildah inspect --type image vitwire:test >"$work/image.json"
for container in $(buildah containers --quiet --filter ancestor=vitwire:test); do buildah rm "$container" >/dev/null; done
container=$(buildah from --pull-never vitwire:test)
buildah mount "$container"
