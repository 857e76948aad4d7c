# The encoder server, for GPUs or for the CPU, from requirements.lock alone: every package has its hash.
#
#   docker build -t vitwire:0.1.0 .                                # VARIANT=cuda: torch from PyPI brings the CUDA libraries
#   docker build -t vitwire:0.1.0-cpu --build-arg VARIANT=cpu \
#       --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu .
#   docker build -t vitwire:0.1.0 --build-arg EXTRAS=router,videos .     # also: jpeg, nixl, gateway (router and sglang), flash (CUDA 13)
#   docker build -t vitwire:0.1.0 --build-arg \
#       BASE_IMAGE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b .
#   docker run --read-only --tmpfs /tmp:exec -v "$PWD/model:/models:ro" -e VITWIRE_MODEL=/models -p 50051:50051 vitwire:0.1.0
#
# exec: Triton compiles code below /tmp and runs it, which Docker's default for a tmpfs forbids.
# A digest makes the build reproducible; `docker buildx imagetools inspect python:3.11-slim-bookworm` prints today's.
#
# Both images need apt and Python 3.11 or newer at the same path, the builder with venv, the base with Python's headers.
ARG BASE_IMAGE=python:3.11-slim-bookworm
ARG BUILD_IMAGE=${BASE_IMAGE}

FROM ${BUILD_IMAGE} AS builder
# cuda or cpu: the build of torch.
ARG VARIANT=cuda
# Extras of pyproject.toml beside `server` and `cli`, separated by commas.
ARG EXTRAS="router"
# pip reads it from the environment; empty means PyPI alone.
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ONLY_BINARY=:all:
WORKDIR /src
COPY requirements.lock ./
COPY tools/locked.py tools/locked.py
# Two environments: /opt/build makes and installs, /opt/vitwire is what ships, without pip.
RUN python3 tools/locked.py build > build.txt \
    && python3 -m venv /opt/build \
    && /opt/build/bin/pip install --require-hashes --no-deps --requirement build.txt \
    && python3 -m venv --without-pip /opt/vitwire
# Dependencies in a layer of their own: a change of the source leaves these gigabytes cached.
RUN python3 tools/locked.py --variant "$VARIANT" "server,cli,$EXTRAS" > requirements.txt \
    && /opt/build/bin/pip --python /opt/vitwire/bin/python install \
        --require-hashes --no-deps --requirement requirements.txt
COPY pyproject.toml LICENSE README.md ./
COPY client client
COPY gateway gateway
COPY server server
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/build/bin/pip --python /opt/vitwire/bin/python install --no-deps --prefix /project /wheels/*.whl \
    && rm -rf /opt/vitwire/include

FROM ${BASE_IMAGE} AS runtime
# torch asks for the user's name when it picks cache directories, so the uid has one.
RUN groupadd --gid 10001 vitwire \
    && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /tmp \
        --shell /usr/sbin/nologin vitwire
COPY --from=builder /opt/vitwire /opt/vitwire
# Triton compiles a C file when its first kernel is launched (gcc, 200 MB). tini is PID 1: it forwards signals and reaps
# orphaned processes.
# hadolint ignore=DL3008,SC2086
RUN if ls -d /opt/vitwire/lib/python3*/site-packages/triton; then compiler="gcc libc6-dev"; fi \
    && apt-get update \
    && apt-get install --yes --no-install-recommends $compiler tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log
COPY --from=builder /project /opt/vitwire
# Fails the build if Triton is there and cannot compile, and names what is missing.
RUN /opt/vitwire/bin/python3 -m vitwire_server.runtime.toolchain
# The root may be read-only: everything that is written goes below /tmp.
ENV PATH=/opt/vitwire/bin:$PATH \
    HOME=/tmp \
    HF_HOME=/tmp/huggingface \
    XDG_CACHE_HOME=/tmp/.cache \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    VITWIRE_HOST=0.0.0.0 \
    VITWIRE_METRICS_HOST=0.0.0.0
WORKDIR /opt/vitwire
USER 10001:10001
EXPOSE 50051 9464
STOPSIGNAL SIGTERM
# Healthy means loaded, captured and warmed up. VITWIRE_TARGET is needed where VITWIRE_PORT does not say where to connect.
# With TLS: docker run --health-cmd 'vitwire health --ca /certs/ca.pem --target localhost:50051'. Kubernetes ignores this.
HEALTHCHECK --interval=15s --timeout=10s --start-period=30m --retries=3 \
    CMD ["sh", "-c", "exec vitwire health --timeout 5 --target \"${VITWIRE_TARGET:-127.0.0.1:${VITWIRE_PORT:-50051}}\""]
# Labels last: the revision changes with every commit, and what follows it is not taken from the cache.
ARG BASE_IMAGE
ARG VARIANT=cuda
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="vitwire" \
      org.opencontainers.image.description="A vision encoder as a service: a ViT over the wire (${VARIANT})" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
ENTRYPOINT ["tini", "--", "python3", "-m", "vitwire_server"]
CMD ["serve"]
