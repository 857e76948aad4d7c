"""Encoder and engine on one GPU: overlay, components and Compose file, and that they agree."""

import json
import os
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from manifests import BESIDE, DEPLOY, UID, Document, documents_of, found_under, only, pod
from vitwire.integrations.vllm.settings import Settings
from vitwire_server.config.resolving import resolve

DEVICE_PLUGIN, OWN_NODE = "beside with the device plugin", "beside on its own node"
VERSIONS = ["1.34", "1.37"]
COMPOSE: Document = yaml.safe_load((DEPLOY / "compose/beside.yaml").read_text())["services"]
every = pytest.mark.parametrize("target", [BESIDE, DEVICE_PLUGIN, OWN_NODE])


def both(spec: Document) -> tuple[Document, Document]:
    """The encoder's container and the engine's."""
    (engine,) = spec["containers"]
    return spec["initContainers"][-1], engine


def flags_of(words: list[str]) -> tuple[dict[str, str], Document]:
    flags = dict(word.split("=", 1) for word in words)
    extra: Document = json.loads(flags["--ec-transfer-config"])["ec_connector_extra_config"]
    return flags, extra


@every
def test_the_engine_starts_once_the_encoder_is_ready(target: str) -> None:
    """Kustomize moves the init containers that a patch names: an encoder before its download would wait for ever."""
    spec, settings = pod(documents_of(target)), only(documents_of(target), "ConfigMap")["data"]
    for document in documents_of(target):
        assert [kubernetes_validate.validate(document, version, strict=True) for version in VERSIONS] == VERSIONS
    order = [(each["name"], each.get("restartPolicy")) for each in spec["initContainers"]]
    assert order == [("client", None), ("download", None), ("vitwire", "Always")]
    encoder = spec["initContainers"][-1]
    assert encoder["ports"] == [{"name": "metrics", "containerPort": int(settings["VITWIRE_METRICS_PORT"])}]
    assert settings["VITWIRE_METRICS_HOST"] == "0.0.0.0", "the kubelet asks the pod's address"
    asked = {name: encoder[name]["httpGet"]["path"] for name in encoder if name.endswith("Probe")}
    assert asked == {"startupProbe": "/healthz", "livenessProbe": "/livez"}, "unready, it would take vLLM along"


@every
def test_both_may_share_device_memory(target: str) -> None:
    """CUDA IPC: one PID namespace, one user, one /dev/shm; nothing of the host."""
    spec = pod(documents_of(target))
    assert (spec["shareProcessNamespace"], [*found_under(spec, "runAsUser")]) == (True, [UID])
    assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
    assert all({"name": "shm", "mountPath": "/dev/shm"} in each["volumeMounts"] for each in both(spec))
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert {mount["name"] for each in found_under(spec, "volumeMounts") for mount in each} == volumes.keys()
    for container in [*spec["initContainers"], *spec["containers"]]:
        assert container["securityContext"].items() >= {"allowPrivilegeEscalation": False}.items()


def test_both_name_the_claim_of_one_gpu() -> None:
    spec, template = pod(documents_of(BESIDE)), only(documents_of(BESIDE), "ResourceClaimTemplate")
    assert [*found_under(template["spec"], "exactly")] == [{"deviceClassName": "gpu.nvidia.com"}]
    (claim,) = spec["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    assert [each["resources"]["claims"] for each in both(spec)] == [[{"name": claim["name"]}]] * 2
    assert not [*found_under(spec, "nvidia.com/gpu")]


@pytest.mark.parametrize(("target", "asked"), [(DEVICE_PLUGIN, ["1"]), (OWN_NODE, [])])
def test_without_dra_nothing_claims(target: str, asked: list[str]) -> None:
    spec = pod(documents_of(target))
    assert "ResourceClaimTemplate" not in {each["kind"] for each in documents_of(target)}
    assert not [each for key in ("claims", "resourceClaims") for each in found_under(spec, key) if each]
    assert [*found_under(spec, "nvidia.com/gpu")] == asked
    assert spec["runtimeClassName"] == "nvidia"
    everything = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}
    assert [everything in each["env"] for each in both(spec)] == [target == OWN_NODE, True]


def test_the_engine_takes_the_gpu_that_the_encoder_got(tmp_path: Path) -> None:
    """The commands of both containers, run with stand-ins for what they start."""
    programs = {"nvidia-smi": "echo GPU-1", "tini": 'echo "$@"', "vllm": 'echo $CUDA_VISIBLE_DEVICES "$@"'}
    for name, program in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / name).chmod(0o755)
    printed = []
    for container in both(pod(documents_of(DEVICE_PLUGIN))):
        words = [word.replace("/run/gpu", str(tmp_path)) for word in [*container["command"], *container["args"][:1]]]
        printed.append(subprocess.check_output(words, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, text=True))
    assert printed == ["-- python3 -m vitwire_server serve\n", "GPU-1 serve --model=$(MODEL_ID)\n"]


def test_the_engine_finds_its_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, policy = pod(documents_of(BESIDE)), only(documents_of(BESIDE), "NetworkPolicy")["spec"]
    for name, value in only(documents_of(BESIDE), "ConfigMap")["data"].items():
        monkeypatch.setenv(name, value)
    settings, (encoder, engine), download = resolve([]), both(spec), spec["initContainers"][1]
    connector = Settings.of(flags_of(engine["args"])[1] | {"content_key_file": ""})
    assert connector.target == f"{settings.host}:{settings.port}" == "127.0.0.1:50051", "for this pod only"
    assert settings.device_list == ["cuda:0"], "a supervisor restarts it within the container"
    assert 0 < settings.stored_bytes < settings.cache_bytes
    assert settings.model == download["args"][3]
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in encoder["volumeMounts"]
    assert [each for each in download["env"] if each not in engine["env"]] == [], "the same model"
    assert [[each["port"] for each in rule["ports"]] for rule in policy["ingress"]] == [["http"], ["metrics"]]
    assert {each["port"] for rule in policy["egress"] for each in rule["ports"]} == {53, 443}


def test_compose_runs_the_same_pair() -> None:
    encoder, engine, owner = (COMPOSE[name] for name in ("encoder", "vllm", "pod"))
    joined = {"network_mode": "service:pod", "ipc": "service:pod", "pid": "service:pod", "user": owner["user"]}
    assert encoder.items() >= joined.items() <= engine.items()
    assert (owner["ipc"], encoder["deploy"]) == ("shareable", engine["deploy"])
    assert engine["depends_on"]["encoder"] == {"condition": "service_healthy"}, "and no restart with it"
    settings = only(documents_of(BESIDE), "ConfigMap")["data"]
    environment = {name: value for name, value in encoder["environment"].items() if name.startswith("VITWIRE_")}
    (flags, extra), (ours, our_extra) = (
        flags_of(engine["command"]),
        flags_of(both(pod(documents_of(BESIDE)))[1]["args"]),
    )
    assert flags["--model"] == environment.pop("VITWIRE_MODEL")
    assert environment.items() <= settings.items()
    share = ours["--gpu-memory-utilization"]
    assert flags["--gpu-memory-utilization"] == f"${{MEMORY_UTILIZATION:-{share}}}"
    assert extra | {"content_key_file": "/run/vitwire/key"} == our_extra
    left = 79.2 * (1 - float(share)) - extra["delivery_bytes"] / 2**30
    assert left > float(settings["VITWIRE_DEVICE_MEMORY"].removesuffix("GiB")) + 1, "on a GPU of 80 GB"
