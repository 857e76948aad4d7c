"""Manifests of deploy/ as `kubectl apply -k` would send them, and where the parts of them are."""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml

Document: TypeAlias = dict[str, Any]
"""One rendered Kubernetes object, or a part of one."""

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCRIPTS = Path(sys.executable).parent
HTTP = "vitwire-http"
STACK = "overlays/stack"
"""Several Deployments: encoder, engine and router."""
BESIDE = "overlays/beside"
"""Encoder and engine in one pod."""
OVERLAYS = sorted({f"overlays/{path.name}" for path in (DEPLOY / "overlays").iterdir()} - {STACK, BESIDE})
ROUTER = "router with monitoring"
NO_ENGINE = "router without an engine"
COMBINATIONS = {
    ROUTER: ("router", "router-monitoring"),
    NO_ENGINE: ("router", "router-no-engine"),
    "beside with the device plugin": (BESIDE, "beside-device-plugin"),
    "beside on its own node": (BESIDE, "beside-own-node"),
    "gpu with a claim": ("overlays/gpu", "model-claim"),
    "gpu with KEDA": ("overlays/gpu", "monitoring", "keda"),
    "multi-gpu with TLS": ("overlays/multi-gpu", "tls", "tokens", "monitoring"),
    "multi-gpu with a gateway": ("overlays/multi-gpu", "gateway"),
    "gpu with claims and a gateway": ("overlays/gpu", "model-image", "cache-claim", "tracing", "gateway"),
}
"""Components that no overlay has: the folder to add them to, and their names."""
TARGETS = ["base", *OVERLAYS, *(name for name in COMBINATIONS if not name.startswith(("router", "beside")))]
"""What runs the server."""
UID = 10001
RELEASE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

_QUANTITY = re.compile(r"(?P<number>[0-9]+(\.[0-9]*)?|\.[0-9]+)(?P<suffix>[KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+|)")
_SCALE = {"n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3")}
_SCALE |= {prefix: Decimal(1000) ** power for power, prefix in enumerate(["", *"kMGTPE"])}
_SCALE |= {f"{prefix}i": Decimal(1024) ** power for power, prefix in enumerate("KMGTPE", 1)}


@cache
def render(target: str) -> str:
    """Objects of a folder of deploy/ or of a combination; anything on stderr is a failure."""
    if target not in COMBINATIONS:
        return _kustomize(DEPLOY / target)
    overlay, *components = COMBINATIONS[target]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(os.path.relpath(DEPLOY, Path(folder).resolve()))
        found = {"resources": [path / overlay], "components": [path / "components" / name for name in components]}
        listed = {name: [str(each) for each in paths] for name, paths in found.items()}
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(listed))
        return _kustomize(Path(folder))


def _kustomize(folder: Path) -> str:
    run = subprocess.run([SCRIPTS / "kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout


@cache
def documents_of(target: str) -> list[Document]:
    """Shared by all tests, which must not change them."""
    return list(yaml.safe_load_all(render(target)))


def only(documents: list[Document], kind: str) -> Document:
    (found,) = (document for document in without_dashboards(documents) if document["kind"] == kind)
    return found


def without_dashboards(documents: list[Document]) -> list[Document]:
    """Grafana's dashboards are ConfigMaps, beside the one that has the settings; HTTP has a second Service."""
    found = [each for each in documents if "grafana_dashboard" not in each["metadata"].get("labels", {})]
    return [each for each in found if each["metadata"]["name"] != HTTP]


def pod(documents: list[Document]) -> Document:
    template: Document = only(documents, "Deployment")["spec"]["template"]["spec"]
    return template


def containers(documents: list[Document]) -> list[Document]:
    """The init containers and the containers of the pod."""
    spec = pod(documents)
    return [*spec.get("initContainers", []), *spec["containers"]]


def assert_restricted(spec: Document) -> None:
    """A pod keeps the Pod Security Standard `restricted`, and its root is read-only on top of it."""
    assert spec["securityContext"].items() >= {"runAsNonRoot": True, "runAsUser": UID}.items()
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False, "a Service named vitwire injects VITWIRE_PORT=tcp://…"
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def server(documents: list[Document]) -> Document:
    (container,) = pod(documents)["containers"]
    found: Document = container
    return found


def variables(documents: list[Document]) -> dict[str, str]:
    """The environment that the container gets from the ConfigMap."""
    config = only(documents, "ConfigMap")
    (source,) = server(documents)["envFrom"]
    assert source == {"configMapRef": {"name": config["metadata"]["name"]}}
    found: dict[str, str] = config["data"]
    return found


def quantity(value: str | int) -> Decimal:
    match = _QUANTITY.fullmatch(str(value))
    assert match is not None, f"{value!r} is not a quantity"
    number, suffix = Decimal(match["number"]), match["suffix"]
    return number * _SCALE[suffix] if suffix in _SCALE else number * Decimal(f"1{suffix}")


def found_under(node: object, key: str) -> Iterator[Any]:
    """Every value under `key`, at any depth."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            yield from found_under(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from found_under(value, key)


def complaints(*command: str | Path) -> str:
    """All that a linter printed, or its exit status if it failed silently."""
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout + run.stderr or ("" if run.returncode == 0 else f"exit status {run.returncode}")
