# The encoder server. PyPI's torch brings the CUDA libraries, so the plain build serves GPUs:
#
#   docker build -t vitwire:0.1.0 .
#   docker build -t vitwire:0.1.0 --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu .   # CPU only
#   docker build -t vitwire:0.1.0 --build-arg EXTRAS=server,flash .   # with flash attention 4, CUDA 13
#   docker run --read-only --tmpfs /tmp:exec -v "$PWD/model:/models:ro" -e VITWIRE_MODEL=/models -p 50051:50051 vitwire:0.1.0
#
# exec: Triton and torch compile code below /tmp and run it, which Docker's default for a tmpfs forbids.
#
# Both images need Python >= 3.11 at the same path, the builder with venv; pass digests for a reproducible build.
ARG BASE_IMAGE=python:3.11-slim
ARG BUILD_IMAGE=${BASE_IMAGE}

FROM ${BUILD_IMAGE} AS builder
# pip reads it from the environment; empty means PyPI alone.
ARG PIP_EXTRA_INDEX_URL=""
ARG EXTRAS="server"
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY constraints.txt pyproject.toml ./
# Two environments: /opt/build makes and installs, /opt/vitwire is what ships, without pip.
RUN python3 -m venv /opt/build \
    && /opt/build/bin/pip install --constraint constraints.txt hatchling \
    && python3 -m venv --without-pip /opt/vitwire
# Dependencies in a layer of their own: a change of the source leaves these gigabytes cached.
RUN python3 -c 'import os, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
        extras = (each for name in os.environ["EXTRAS"].split(",") for each in p["optional-dependencies"][name]); \
        print(*p["dependencies"], *extras, sep="\n")' > requirements.txt \
    && /opt/build/bin/pip --python /opt/vitwire/bin/python install \
        --constraint constraints.txt --requirement requirements.txt
COPY LICENSE README.md ./
COPY client client
COPY server server
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/build/bin/pip --python /opt/vitwire/bin/python install --no-deps --prefix /project /wheels/*.whl

FROM ${BASE_IMAGE} AS runtime
ARG BASE_IMAGE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="vitwire" \
      org.opencontainers.image.description="A vision encoder as a service: a ViT over the wire" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
# torch asks for the user's name when it picks cache directories, so the uid has one.
RUN groupadd --gid 10001 vitwire \
    && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /tmp \
        --shell /usr/sbin/nologin vitwire
COPY --from=builder /opt/vitwire /opt/vitwire
# Triton compiles a C file when its first kernel is launched, torch.compile C++ on CPU: gcc takes 200 MB, g++ 255.
# hadolint ignore=DL3008
RUN compiler=g++ \
    && if ls -d /opt/vitwire/lib/python3*/site-packages/triton; then compiler=gcc; fi \
    && apt-get update \
    && apt-get install --yes --no-install-recommends "$compiler" libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=builder /project /opt/vitwire
# Fails the build where fused blocks or compiled shapes would be lost, and names what is missing.
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
ENTRYPOINT ["python3", "-m", "vitwire_server"]
CMD ["serve"]
