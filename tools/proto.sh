#!/usr/bin/env bash
# The proto toolchain. Stubs come from the oldest tools that vLLM's pins allow
# (grpcio >= 1.71.2, protobuf >= 5.29.6), in an environment of their own.
#
#   tools/proto.sh generate   write client/vitwire/v1
#   tools/proto.sh check      lint, breaking changes, stubs current
#   tools/proto.sh freeze     make today's contract the one that must not break
#   tools/proto.sh typescript write examples/typescript/src/gen (after npm ci there)
set -euo pipefail
cd "$(dirname "$0")/.."
tools=.tools
python=$tools/proto/bin/python
workspace=$tools/buf-workspace
baseline=tools/encoder.v1.binpb
requirements=tools/requirements-proto.txt
buf=.venv/bin/buf # installed by `make setup`

install() {
    if ! cmp -s "$requirements" "$tools/proto/.installed"; then
        "${PYTHON:-python3}" -m venv --clear "$tools/proto"
        "$python" -m pip install --quiet --require-hashes --only-binary :all: --requirement "$requirements"
        cp "$requirements" "$tools/proto/.installed"
    fi
}

site() { "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

generate() { # generate OUT
    mkdir -p "$1"
    PATH="$PWD/$tools/proto/bin:$PATH" "$python" -m grpc_tools.protoc -I proto -I "$(site)" \
        --python_out="$1" --grpc_python_out="$1" --mypy_out=quiet:"$1" --mypy_grpc_out=quiet:"$1" \
        proto/vitwire/v1/encoder.proto
}

# buf sees the contract and google/rpc/status.proto side by side, without its registry.
assemble() {
    rm -rf "$workspace"
    mkdir -p "$workspace/google/rpc"
    cp -r proto/buf.yaml proto/vitwire "$workspace"
    cp "$(site)/google/rpc/status.proto" "$workspace/google/rpc"
}

check() {
    "$buf" lint "$workspace"
    "$buf" breaking "$workspace" --against "$baseline"
    rm -rf "$tools/stubs"
    generate "$tools/stubs"
    for stub in "$tools"/stubs/vitwire/v1/*; do
        cmp "$stub" "client/vitwire/v1/$(basename "$stub")" ||
            { echo "stubs are stale: run tools/proto.sh generate" >&2; exit 1; }
    done
}

typescript() {
    cp "$(site)/google/rpc/error_details.proto" "$workspace/google/rpc"
    rm -rf examples/typescript/src/gen
    "$buf" generate "$workspace" --template examples/typescript/buf.gen.yaml
}

install
case "${1:-}" in
    generate) generate client ;;
    check) assemble; check ;;
    freeze) assemble; "$buf" build "$workspace" -o "$baseline" ;;
    typescript) assemble; typescript ;;
    *) echo "usage: tools/proto.sh generate|check|freeze|typescript" >&2; exit 2 ;;
esac
