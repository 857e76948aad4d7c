"""Autoscaling, monitoring and the way in: objects that refer to others, and custom resources."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

import custom_resources
from manifests import COMBINATIONS, ROOT, Document, documents_of, found_under, only, quantity, render, server, variables

AUTOSCALED = {"overlays/autoscale": "HorizontalPodAutoscaler", "gpu with KEDA": "ScaledObject"}
GATEWAY = "gpu with claims and a gateway"


@pytest.fixture(params=AUTOSCALED)
def autoscaled(request: pytest.FixtureRequest) -> list[Document]:
    return documents_of(request.param)


def autoscaler(documents: list[Document]) -> Document:
    (found,) = (each for each in documents if each["kind"] in AUTOSCALED.values())
    return found


def test_custom_resources_match_their_schemas(documents: list[Document]) -> None:
    for document in documents:
        if document["kind"] in custom_resources.KINDS:
            assert custom_resources.errors(document) == []


def paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], frozenset[str]]]:  # JSON
    """Where each object of a document is, and its fields."""
    if isinstance(node, dict):
        yield path, frozenset(node)
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from paths(child, (*path, key))


@pytest.mark.parametrize("target", ["gpu with KEDA", GATEWAY])
def test_the_schemas_refuse_misspelt_fields(target: str) -> None:
    """An API server drops unknown fields silently. Of objects in lists, one with the same fields is enough."""
    for document in documents_of(target):
        if document["kind"] not in custom_resources.KINDS:
            continue
        alike = {
            (tuple(key for key in path if isinstance(key, str)), fields): path
            for path, fields in paths(document["spec"])
        }
        for path in alike.values():
            changed = copy.deepcopy(document)
            place = changed["spec"]
            for key in path:
                place = place[key]
            if path[-1:] in (("matchLabels",), ("labels",), ("annotations",)):
                continue
            place["misspelt"] = "x"
            assert custom_resources.errors(changed), path


def test_the_autoscaler_owns_the_replicas(autoscaled: list[Document]) -> None:
    scaler, deployment = autoscaler(autoscaled)["spec"], only(autoscaled, "Deployment")
    reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment["metadata"]["name"]}
    assert scaler["scaleTargetRef"] == reference
    assert "replicas" not in deployment["spec"], "each apply would restore it"
    fewest = scaler.get("minReplicas") or scaler["minReplicaCount"]
    most = scaler.get("maxReplicas") or scaler["maxReplicaCount"]
    budget = only(autoscaled, "PodDisruptionBudget")["spec"]["maxUnavailable"]
    assert budget < fewest < most
    if "fallback" in scaler:
        assert fewest <= scaler["fallback"]["replicas"] <= most


def test_the_autoscaler_listed_last_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMBINATIONS, "both", ("overlays/autoscale", "keda"))
    assert render.__wrapped__("both") == render("gpu with KEDA")
    monkeypatch.setitem(COMBINATIONS, "both", ("overlays/gpu", "monitoring", "keda", "hpa"))
    assert render.__wrapped__("both") == render("overlays/autoscale")


def test_both_autoscalers_behave_alike() -> None:
    first, second = (autoscaler(documents_of(target))["spec"] for target in AUTOSCALED)
    (kept,) = found_under(second["advanced"], "behavior")
    assert first["behavior"] == kept
    assert (first["minReplicas"], first["maxReplicas"]) == (second["minReplicaCount"], second["maxReplicaCount"])
    values, thresholds = found_under(first, "averageValue"), found_under(second, "threshold")
    assert [quantity(each) for each in values] == [quantity(each) for each in thresholds]


def test_pods_start_before_they_are_removed_again(autoscaled: list[Document]) -> None:
    """Otherwise load that comes back within the time to load and capture finds too few replicas."""
    down = next(found_under(autoscaler(autoscaled), "scaleDown"))
    assert down["stabilizationWindowSeconds"] >= 600
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 300}]


def test_the_autoscaled_metric_exists() -> None:
    """The table of docs/metrics.md is generated from the server's metrics."""
    (metric,) = autoscaler(documents_of("overlays/autoscale"))["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert f"| `{name}` | gauge |" in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    (query,) = found_under(autoscaler(documents_of("gpu with KEDA")), "query")
    assert query == f'sum(max by (pod) ({name}{{job="vitwire"}}))'


@pytest.mark.parametrize("target", ["overlays/autoscale", "multi-gpu with TLS"])
def test_the_pod_monitor_scrapes_the_metrics_ports(target: str) -> None:
    documents = documents_of(target)
    monitor = only(documents, "PodMonitor")["spec"]
    labels = only(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert labels[monitor["jobLabel"]] == "vitwire"
    scraped = [each["port"] for each in monitor["podMetricsEndpoints"]]
    ports = [each["name"] for each in server(documents)["ports"] if each["name"].startswith("metrics")]
    assert scraped[: len(ports)] == ports
    assert all(name.startswith("metrics") for name in scraped)


@pytest.mark.parametrize(("target", "ports"), [(GATEWAY, 1), ("multi-gpu with a gateway", 4)])
def test_the_route_ends_at_every_port_of_the_service(target: str, ports: int) -> None:
    documents = documents_of(target)
    route, gateway = only(documents, "GRPCRoute")["spec"], only(documents, "Gateway")
    (listener,) = gateway["spec"]["listeners"]
    assert route["parentRefs"] == [{"name": gateway["metadata"]["name"], "sectionName": listener["name"]}]
    assert route["hostnames"] == [listener["hostname"]]
    service = only(documents, "Service")
    (backend,) = found_under(route, "backendRefs")
    served = [port["port"] for port in service["spec"]["ports"] if port["name"].startswith("grpc")]
    assert backend == [{"name": service["metadata"]["name"], "port": port} for port in served]
    assert len(backend) == ports
    assert {*found_under(route, "service")} == {"vitwire.v1.EncoderService", "grpc.health.v1.Health"}


def test_a_collector_can_be_reached() -> None:
    documents = documents_of(GATEWAY)
    host, _, port = variables(documents)["VITWIRE_OTLP_ENDPOINT"].rpartition(":")
    first, names = only(documents, "NetworkPolicy")["spec"]["egress"]
    assert [each["port"] for each in first["ports"]] == [int(port)]
    (source,) = found_under(first["to"], "kubernetes.io/metadata.name")
    assert host.endswith(f".{source}")
    assert {(each["port"], each.get("protocol", "TCP")) for each in names["ports"]} == {(53, "UDP"), (53, "TCP")}


def test_the_model_image_replaces_the_claim() -> None:
    assert "vitwire-models" not in render(GATEWAY)
