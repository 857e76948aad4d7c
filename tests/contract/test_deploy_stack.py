"""The overlay with encoder and engine: its parts find each other."""

import json
from pathlib import Path

import pytest

from manifests import STACK, UID, Document, documents_of, found_under, quantity
from vitwire.integrations.vllm.settings import Settings


@pytest.fixture(scope="module")
def stack() -> dict[tuple[str, str], Document]:
    """Its objects by kind and name; ConfigMaps without the hash."""
    found = {}
    for each in documents_of(STACK):
        name = each["metadata"]["name"]
        found[each["kind"], name.rpartition("-")[0] if each["kind"] == "ConfigMap" else name] = each
    return found


def pod_of(stack: dict[tuple[str, str], Document], name: str) -> Document:
    spec: Document = stack["Deployment", name]["spec"]["template"]["spec"]
    return spec


def test_it_is_gpu_and_vllm(stack: dict[tuple[str, str], Document]) -> None:
    assert {name for kind, name in stack if kind == "Deployment"} == {"vitwire", "vllm"}
    parts = [each for target in ("overlays/gpu", "vllm") for each in documents_of(target)]
    assert len(stack) == len(parts)


def test_engine_and_encoder_load_the_same_model(stack: dict[tuple[str, str], Document]) -> None:
    engine = {each["name"]: each.get("value") for each in pod_of(stack, "vllm")["containers"][0]["env"]}
    encoder = {each["name"]: each.get("value") for each in pod_of(stack, "vitwire")["initContainers"][0]["env"]}
    for name in ("MODEL_ID", "MODEL_REVISION"):
        assert engine[name] == encoder[name]


def test_plugin_and_connector_ask_the_encoder(stack: dict[tuple[str, str], Document]) -> None:
    arguments = dict(word.split("=", 1) for word in pod_of(stack, "vllm")["containers"][0]["args"])
    transfer = json.loads(arguments["--ec-transfer-config"])
    assert transfer["ec_role"] == "ec_consumer"
    assert (transfer["ec_connector"], transfer["ec_connector_module_path"]) == (
        "VitwireECConnector",
        "vitwire.integrations.vllm",
    )
    service = stack["Service", "vitwire"]
    target = f"dns:///vitwire:{service['spec']['ports'][0]['port']}"
    settings = Settings.of(transfer["ec_connector_extra_config"] | {"content_key_file": ""})
    assert (settings.target, settings.allow_caller_embeds) == (target, False)
    folder, _, name = transfer["ec_connector_extra_config"]["content_key_file"].rpartition("/")
    spec = pod_of(stack, "vllm")
    (volume,) = [each["name"] for each in spec["containers"][0]["volumeMounts"] if each["mountPath"] == folder]
    (secret,) = [each["secret"]["secretName"] for each in spec["volumes"] if each["name"] == volume]
    assert f"kubectl create secret generic {secret} --from-literal={name}=" in Path("deploy/README.md").read_text()
    assert int(stack["ConfigMap", "vitwire"]["data"]["VITWIRE_CACHE_BYTES"]) > 0


def test_the_client_comes_from_the_servers_image(stack: dict[tuple[str, str], Document]) -> None:
    (copying,) = pod_of(stack, "vllm")["initContainers"]
    assert copying["image"] == pod_of(stack, "vitwire")["containers"][0]["image"]
    (mount,) = copying["volumeMounts"]
    assert copying["args"][0].endswith(f"/site-packages && cp -r vitwire vitwire-*.dist-info {mount['mountPath']}/")
    (container,) = pod_of(stack, "vllm")["containers"]
    assert {"name": "PYTHONPATH", "value": mount["mountPath"]} in container["env"]
    assert mount["mountPath"] in {each["mountPath"] for each in container["volumeMounts"]}


def test_the_engine_is_open_to_its_namespace(stack: dict[tuple[str, str], Document]) -> None:
    policy = stack["NetworkPolicy", "vllm"]["spec"]
    (rule,) = policy["ingress"]
    neighbours, monitoring = rule["from"]
    assert neighbours == {"podSelector": {}}
    assert next(found_under(monitoring, "matchLabels")) == {"kubernetes.io/metadata.name": "monitoring"}
    encoder = stack["Deployment", "vitwire"]["spec"]["template"]["metadata"]["labels"]
    assert next(found_under(policy["egress"][0], "matchLabels")).items() <= encoder.items()
    labels = stack["Deployment", "vllm"]["spec"]["template"]["metadata"]["labels"]
    for selector in (stack["Service", "vllm"]["spec"]["selector"], policy["podSelector"]["matchLabels"]):
        assert selector.items() <= labels.items()


def test_the_engines_pod(stack: dict[tuple[str, str], Document]) -> None:
    """vLLM's image runs as root; everything else of the baseline standard holds."""
    spec = pod_of(stack, "vllm")
    (container,) = spec["containers"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert spec["enableServiceLinks"] is spec["automountServiceAccountToken"] is False
    assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
    assert UID not in found_under(spec, "runAsUser")
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"] == {"port": "http", "path": "/health"}
    volumes = {each["name"]: each for each in spec["volumes"]}
    limit = quantity(container["resources"]["limits"]["memory"])
    assert quantity(volumes["shm"]["emptyDir"]["sizeLimit"]) < limit / 2
    assert {each["name"] for each in container["volumeMounts"]} == volumes.keys()
