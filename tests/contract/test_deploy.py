"""The manifests and the Dockerfile, checked with the tools that read them and for what those miss."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import kubernetes_validate
import pytest
import yaml

Document: TypeAlias = dict[str, Any]
"""One rendered Kubernetes object, or a part of one."""

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCRIPTS = Path(sys.executable).parent
TARGETS = ["base", *sorted(f"overlays/{path.name}" for path in (DEPLOY / "overlays").iterdir())]
KUBERNETES = ["1.28", "1.32", "1.37"]
RELEASE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

READINESS = "vitwire.v1.EncoderService"
LIVENESS = "liveness"
SECRETS = ("VITWIRE_TLS_CERT", "VITWIRE_TLS_KEY", "VITWIRE_AUTH_TOKENS_FILE")
UID = 10001
QUANTITY = re.compile(r"(?P<number>[0-9]+(\.[0-9]*)?|\.[0-9]+)(?P<suffix>[KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+|)")
SCALE = {"n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3")}
SCALE |= {prefix: Decimal(1000) ** power for power, prefix in enumerate(["", *"kMGTPE"])}
SCALE |= {f"{prefix}i": Decimal(1024) ** power for power, prefix in enumerate("KMGTPE", 1)}


@cache
def render(target: str) -> str:
    """What `kubectl apply -k` would send; anything on stderr is a failure."""
    command = [SCRIPTS / "kubectl", "kustomize", DEPLOY / target]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout


@pytest.fixture(params=TARGETS)
def documents(request: pytest.FixtureRequest) -> list[Document]:
    """The objects of the base or of one overlay."""
    return list(yaml.safe_load_all(render(request.param)))


def only(documents: list[Document], kind: str) -> Document:
    (found,) = (document for document in documents if document["kind"] == kind)
    return found


def pod(documents: list[Document]) -> Document:
    template: Document = only(documents, "Deployment")["spec"]["template"]["spec"]
    return template


def containers(documents: list[Document]) -> list[Document]:
    """The init containers and the containers of the pod."""
    spec = pod(documents)
    return [*spec.get("initContainers", []), *spec["containers"]]


def server(documents: list[Document]) -> Document:
    (container,) = pod(documents)["containers"]
    found: Document = container
    return found


def variables(documents: list[Document]) -> dict[str, str]:
    """The environment that the server's container gets from the ConfigMap."""
    config = only(documents, "ConfigMap")
    (source,) = server(documents)["envFrom"]
    assert source == {"configMapRef": {"name": config["metadata"]["name"]}}
    assert "env" not in server(documents)
    found: dict[str, str] = config["data"]
    return found


def is_secure(documents: list[Document]) -> bool:
    return "VITWIRE_TLS_CERT" in variables(documents)


def quantity(value: str | int) -> Decimal:
    match = QUANTITY.fullmatch(str(value))
    assert match is not None, f"{value!r} is no quantity"
    number, suffix = Decimal(match["number"]), match["suffix"]
    return number * SCALE[suffix] if suffix in SCALE else number * Decimal(f"1{suffix}")


def found_under(node: object, key: str) -> Iterator[Any]:
    """Every value that stands under `key`, at any depth."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            yield from found_under(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from found_under(value, key)


def complaints(*command: str | Path) -> str:
    """All that a linter printed, or its exit status when it failed without a word."""
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout + run.stderr or ("" if run.returncode == 0 else f"exit status {run.returncode}")


@pytest.mark.parametrize("version", KUBERNETES)
def test_schemas_accept_every_document(documents: list[Document], version: str) -> None:
    for document in documents:
        assert kubernetes_validate.validate(document, version, strict=True) == version


def test_every_kind_is_there_once(documents: list[Document]) -> None:
    kinds = ["ConfigMap", "Deployment", "PodDisruptionBudget", "Service", "ServiceAccount"]
    assert sorted(document["kind"] for document in documents) == kinds


def test_quantities_parse_and_requests_stay_below_limits(documents: list[Document]) -> None:
    for size in [*found_under(documents, "sizeLimit"), *found_under(documents, "storage")]:
        assert quantity(size) > 0
    for container in containers(documents):
        requests = {name: quantity(value) for name, value in container["resources"]["requests"].items()}
        limits = {name: quantity(value) for name, value in container["resources"]["limits"].items()}
        assert requests.keys() >= {"cpu", "memory"}
        assert limits.keys() >= {"memory"}
        for name, limit in limits.items():
            assert 0 < requests.get(name, limit) <= limit
            assert "/" not in name or limit % 1 == 0, f"{name} comes in whole pieces"
            assert "/" not in name or requests.get(name, limit) == limit


@pytest.mark.parametrize("quirk", ["1GiB", "1 Gi", "4gb", "", "-1", "1Ki.", "500mm", "1e", "KI"])
def test_a_quirky_quantity_is_refused(quirk: str) -> None:
    with pytest.raises(AssertionError, match="is no quantity"):
        quantity(quirk)


def test_quantities_scale() -> None:
    scaled = {"2500m": 2.5, "2": 2, "1Gi": 2**30, "1.5k": 1500, "1e3": 1000}
    assert {value: quantity(value) for value in scaled} == scaled


def test_selectors_match_the_pods(documents: list[Document]) -> None:
    deployment = only(documents, "Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"].items()
    spread = pod(documents).get("topologySpreadConstraints", [])
    selectors = [
        deployment["selector"]["matchLabels"],
        only(documents, "Service")["spec"]["selector"],
        only(documents, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        *(rule["labelSelector"]["matchLabels"] for rule in spread),
    ]
    for selector in selectors:
        assert selector
        assert selector.items() <= labels


def test_recommended_labels(documents: list[Document]) -> None:
    deployment = only(documents, "Deployment")
    for labels in (deployment["metadata"]["labels"], deployment["spec"]["template"]["metadata"]["labels"]):
        names = {name.removeprefix("app.kubernetes.io/") for name in labels}
        assert names >= {"name", "instance", "component", "part-of", "version"}
        assert labels["app.kubernetes.io/version"] == RELEASE


def test_ports_agree(documents: list[Document]) -> None:
    """Settings, container and Service name the same two ports; the Service is headless and speaks h2c, or TLS."""
    ports = {port["name"]: port["containerPort"] for port in server(documents)["ports"]}
    settings = variables(documents)
    assert ports == {"grpc": int(settings["VITWIRE_PORT"]), "metrics": int(settings["VITWIRE_METRICS_PORT"])}
    assert settings["VITWIRE_HOST"] == settings["VITWIRE_METRICS_HOST"] == "0.0.0.0"
    service = only(documents, "Service")
    assert service["metadata"]["name"] == "vitwire"
    assert service["spec"]["clusterIP"] == "None"
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    protocols = {port["name"]: port["appProtocol"] for port in service["spec"]["ports"]}
    assert protocols["grpc"] == ("https" if is_secure(documents) else "kubernetes.io/h2c")


def test_probes_ask_the_health_services(documents: list[Document]) -> None:
    container = server(documents)
    port = {exposed["name"]: exposed["containerPort"] for exposed in container["ports"]}["grpc"]
    probes = {name: container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    if is_secure(documents):  # a kubelet's gRPC probes speak no TLS
        paths = {"startupProbe": "/healthz", "readinessProbe": "/healthz", "livenessProbe": "/livez"}
        assert {name: probe["httpGet"] for name, probe in probes.items()} == {
            name: {"port": "metrics", "path": path} for name, path in paths.items()
        }
        assert not any("grpc" in probe for probe in probes.values()), "a probe asks in one way"
        return
    assert {name: probe["grpc"] for name, probe in probes.items()} == {
        "startupProbe": {"port": port, "service": READINESS},
        "readinessProbe": {"port": port, "service": READINESS},
        "livenessProbe": {"port": port, "service": LIVENESS},
    }


def test_variables_are_settings(documents: list[Document], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name is a field and every value is one that the server accepts, read as it reads them."""
    from vitwire_server.config.resolving import resolve  # noqa: PLC0415  (only this test needs the server)
    from vitwire_server.config.settings import ServeSettings  # noqa: PLC0415  (as above)

    names = variables(documents)
    assert all(name.startswith("VITWIRE_") and name.isupper() for name in names)
    assert {name.removeprefix("VITWIRE_").lower() for name in names} <= ServeSettings.model_fields.keys()
    for inherited in [name for name in os.environ if name.startswith("VITWIRE_")]:
        monkeypatch.delenv(inherited)
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    settings = resolve([])
    assert (settings.model, settings.port) == (names["VITWIRE_MODEL"], int(names["VITWIRE_PORT"]))


def test_bounds_fit_into_the_memory_limit(documents: list[Document], monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would warn at its start otherwise."""
    from vitwire_server.config import resolving  # noqa: PLC0415  (as above)

    for name, value in variables(documents).items():
        monkeypatch.setenv(name, value)
    limit = int(quantity(server(documents)["resources"]["limits"]["memory"]))
    monkeypatch.setattr(resolving, "memory_limit", lambda: limit)
    assert resolving.warnings(resolving.resolve([])) == []


def test_pods_may_drain(documents: list[Document]) -> None:
    settings = variables(documents)
    drain = float(settings["VITWIRE_LAME_DUCK_SECONDS"]) + float(settings["VITWIRE_DRAIN_SECONDS"])
    assert pod(documents)["terminationGracePeriodSeconds"] > drain
    rollout = only(documents, "Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert rollout == {"maxUnavailable": 0, "maxSurge": 1}


def test_containers_run_one_pinned_image(documents: list[Document]) -> None:
    assert {container["image"] for container in containers(documents)} == {f"vitwire:{RELEASE}"}


def test_pods_are_restricted(documents: list[Document]) -> None:
    """The Pod Security Standard `restricted`, and a read-only root on top of it."""
    spec = pod(documents)
    assert spec["securityContext"].items() >= {"runAsNonRoot": True, "runAsUser": UID}.items()
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert only(documents, "ServiceAccount")["automountServiceAccountToken"] is False
    assert spec["serviceAccountName"] == only(documents, "ServiceAccount")["metadata"]["name"]
    assert spec["enableServiceLinks"] is False, "a Service named vitwire injects VITWIRE_PORT=tcp://…"
    assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC", "hostUsers"}
    for container in containers(documents):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_volumes_are_declared_and_writable_where_needed(documents: list[Document]) -> None:
    volumes = {volume["name"]: volume for volume in pod(documents)["volumes"]}
    for volume in volumes.values():
        assert len(volume) == 2, "a name and one source"
        assert volume.keys() <= {"name", "emptyDir", "persistentVolumeClaim", "secret"}
    for container in containers(documents):
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) <= volumes.keys()
        assert "emptyDir" in volumes[mounts["/tmp"]]
    assert variables(documents)["VITWIRE_MODEL"].startswith("/models")


def test_secrets_are_mounted_where_the_settings_look(documents: list[Document]) -> None:
    """Whole, as files mounted by subPath are never renewed; readable by the group, which is the pod's own."""
    settings = variables(documents)
    wanted = {str(Path(settings[name]).parent) for name in SECRETS if name in settings}
    volumes = {each["name"]: each["secret"] for each in pod(documents)["volumes"] if "secret" in each}
    mounts = [each for each in server(documents)["volumeMounts"] if each["name"] in volumes]
    assert {each["mountPath"] for each in mounts} == wanted
    assert all(each["readOnly"] and "subPath" not in each for each in mounts)
    assert all(each["defaultMode"] == 0o440 for each in volumes.values())
    assert not any("optional" in each for each in volumes.values()), "without its secret a pod must not start"


def test_the_tls_overlay_is_closed() -> None:
    documents = list(yaml.safe_load_all(render("overlays/gpu-tls")))
    assert variables(documents).keys() >= {*SECRETS}
    assert variables(documents)["VITWIRE_REFLECTION"] == "false"
    only_there = [target for target in TARGETS if is_secure(list(yaml.safe_load_all(render(target))))]
    assert only_there == ["overlays/gpu-tls"]


def test_the_demo_serves_the_checkpoint_it_wrote() -> None:
    documents = list(yaml.safe_load_all(render("overlays/cpu-demo")))
    (writer,) = pod(documents)["initContainers"]
    model = variables(documents)["VITWIRE_MODEL"]
    assert writer["command"] == ["python3", "-m", "vitwire_server"]
    assert writer["args"] == ["demo-checkpoint", "--model-type", "qwen3_vl", "--out", model]
    mounts = [mount["name"] for mount in writer["volumeMounts"] if model.startswith(f"{mount['mountPath']}/")]
    assert mounts == ["models"]
    assert variables(documents)["VITWIRE_GRAPHS"] == "simulated"


def test_the_gpu_overlay_asks_for_one_gpu() -> None:
    documents = list(yaml.safe_load_all(render("overlays/gpu")))
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert server(documents)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod(documents)["tolerations"] == [toleration]
    assert variables(documents)["VITWIRE_DEVICE"] == "cuda"


def test_yamllint_is_clean() -> None:
    config = ROOT / ".yamllint.yaml"
    assert complaints(SCRIPTS / "yamllint", "--strict", "-c", config, DEPLOY, config) == ""


def test_hadolint_is_clean() -> None:
    assert complaints(SCRIPTS / "hadolint", "--failure-threshold", "style", ROOT / "Dockerfile") == ""


def test_the_image_is_what_the_pods_expect() -> None:
    text = (ROOT / "Dockerfile").read_text()
    runtime = re.split(r"^FROM ", text, flags=re.MULTILINE)[-1].replace("\\\n", " ")
    documents = list(yaml.safe_load_all(render("base")))
    steps = dict(line.split(maxsplit=1) for line in runtime.splitlines()[1:] if not line.startswith("#"))
    assert steps["USER"] == f"{UID}:{UID}"
    assert json.loads(steps["ENTRYPOINT"]) == ["tini", "--", "python3", "-m", "vitwire_server"]
    assert json.loads(steps["HEALTHCHECK"].partition(" CMD ")[2])[:2] == ["vitwire", "health"]
    assert json.loads(steps["CMD"]) == server(documents)["args"]
    assert steps["STOPSIGNAL"] == "SIGTERM"
    exposed = [port["containerPort"] for port in server(documents)["ports"]]
    assert [int(port) for port in steps["EXPOSE"].split()] == exposed
    assert f"ARG VERSION={RELEASE}\n" in text


def test_the_build_context_holds_what_the_dockerfile_copies() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert {name for names in copies for name in names.split()} == allowed
