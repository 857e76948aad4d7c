#!/usr/bin/env bash
# Prepare a release in dist/: wheel and source archive (client and server), lock, bill of materials, licences, notes,
# checksums, and the image where buildah or docker is present. It uploads nothing and prints the commands that do.
#
# Exits 3 if everything is prepared but the advisories could not be read; the notes have what the audit said.
#
#   tools/release.sh [--no-image]
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.tools/supply/bin
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
fail() { echo "tools/release.sh: $1" >&2; exit 1; }

[[ -z $(git status --porcelain) ]] || fail "uncommitted changes; commit or stash them"
grep -q "^ARG VERSION=$version$" Dockerfile || fail "Dockerfile: ARG VERSION is not $version"
notes=$(awk -v v="$version" '/^## / { on = ($2 == v) } on' CHANGELOG.md)
[[ -n $notes ]] || fail "CHANGELOG.md has no section ## $version"
if [[ $notes == *unreleased* ]]; then echo "note: the section of $version in CHANGELOG.md is still marked unreleased" >&2; fi
if git rev-parse -q --verify "refs/tags/v$version" >/dev/null; then fail "the tag v$version exists"; fi

rm -rf dist
mkdir -p dist
printf '%s\n' "$notes" >dist/RELEASE.md
# The same commit gives the same bytes.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
"$bin/python" -m hatchling build -d dist
"$bin/python" -m venv --without-pip .tools/release-check --clear
python3 tools/locked.py --variant cpu client,cli >.tools/release-check/requirements.txt
"$bin/python" -m pip --python .tools/release-check/bin/python install --quiet --require-hashes --no-deps \
    --requirement .tools/release-check/requirements.txt
"$bin/python" -m pip --python .tools/release-check/bin/python install --quiet --no-deps dist/*.whl
(cd / && "$OLDPWD/.tools/release-check/bin/vitwire" --help >/dev/null) || fail "the wheel's command does not start"
cp requirements.lock dist/
installed=${LICENCES_PYTHON:-.venv/bin/python}
"$bin/python" -m tools.supply sbom --bin "$bin" --python "$installed" --out dist/sbom.cdx.json
"$bin/python" -m tools.supply licences --bin "$bin" --python "$installed" --out dist/licences.md
unaudited=0
audit=$("$bin/python" -m tools.supply audit --bin "$bin" 2>&1) || unaudited=$?
echo "$audit"
[[ $unaudited == [03] ]] || fail "known vulnerabilities, see above"
printf '\n## Audit of the packages in requirements.lock\n\n%s\n' "$audit" >>dist/RELEASE.md
image="docker buildx build --push --tag REGISTRY/vitwire:$version ."
if [[ ${1:-} != --no-image ]]; then
    if command -v docker >/dev/null && docker info >/dev/null 2>&1; then
        docker build --build-arg "REVISION=$(git rev-parse HEAD)" --tag "vitwire:$version" .
        image="docker tag vitwire:$version REGISTRY/vitwire:$version && docker push REGISTRY/vitwire:$version"
    else
        make image-test
    fi
fi
(cd dist && sha256sum -- * >SHA256SUMS)
tag="git tag --annotate v$version --file dist/RELEASE.md --cleanup verbatim"
if [[ $unaudited == 0 && $notes != *unreleased* ]]; then
    $tag
    tag=
fi
cat <<END
dist/ is ready. To publish:
  ${tag:+$tag && }git push origin v$version
  twine upload dist/*.whl dist/*.tar.gz
  $image
END
if [[ $unaudited != 0 ]]; then
    echo "NOT AUDITED: before you publish, run \`make audit\` where advisories can be read, and correct dist/RELEASE.md" >&2
fi
exit "$unaudited"
