"""The manifests and the Dockerfile, checked with the tools that read them and for what those miss."""

import json
import os
import re

import kubernetes_validate
import pytest

import custom_resources
from manifests import (
    DEPLOY,
    HTTP,
    RELEASE,
    ROOT,
    SCRIPTS,
    STACK,
    TARGETS,
    UID,
    Document,
    complaints,
    containers,
    documents_of,
    found_under,
    only,
    pod,
    quantity,
    server,
    variables,
    without_dashboards,
)

KUBERNETES = ["1.31", "1.37"]
"""preStop.sleep and image volumes are in the schemas from 1.31."""
READINESS = "vitwire.v1.EncoderService"
LIVENESS = "liveness"
CORE = {"ConfigMap", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service", "ServiceAccount"}
OPTIONAL = {"HorizontalPodAutoscaler", "PersistentVolumeClaim", *custom_resources.KINDS}


def is_secure(documents: list[Document]) -> bool:
    return "VITWIRE_TLS_CERT" in variables(documents)


def egress_ports(rule: Document) -> list[int]:
    assert rule["to"], "an empty list admits every address"
    return [each["port"] for each in rule["ports"]]


def gpus(documents: list[Document]) -> int:
    """Processes of the pod, each with ports of its own."""
    return len(variables(documents).get("VITWIRE_DEVICES", "one").split(","))


@pytest.mark.parametrize("version", KUBERNETES)
def test_schemas_accept_every_document(version: str) -> None:
    """Each once, as targets share most of them."""
    found = {
        str(each): each for target in (*TARGETS, STACK, "router", "model-download") for each in documents_of(target)
    }
    for document in found.values():
        if document["kind"] not in custom_resources.KINDS:
            assert kubernetes_validate.validate(document, version, strict=True) == version


def test_the_schemas_refuse_what_is_misspelt() -> None:
    """The validator only warns about kinds that it does not know; it does know these."""
    deployment = only(documents_of("base"), "Deployment")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment | {"spec": {**deployment["spec"], "replica": 2}}, "1.37", strict=True)


def test_every_kind_is_there_once(documents: list[Document]) -> None:
    kinds = [document["kind"] for document in without_dashboards(documents)]
    assert len(set(kinds)) == len(kinds)
    assert CORE <= set(kinds) <= CORE | OPTIONAL


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
    with pytest.raises(AssertionError, match="is not a quantity"):
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
        only(documents, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        *(each["spec"]["selector"]["matchLabels"] for each in documents if each["kind"] == "PodMonitor"),
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
    """Settings, container and Service name the same ports; the Service is headless and speaks h2c, or TLS."""
    ports = {port["name"]: port["containerPort"] for port in server(documents)["ports"]}
    settings = variables(documents)
    first = {"grpc": int(settings["VITWIRE_PORT"]), "metrics": int(settings["VITWIRE_METRICS_PORT"])}
    http = {"http": int(settings["VITWIRE_HTTP_PORT"])} if "VITWIRE_HTTP_PORT" in settings else {}
    suffixes = ["", *(f"-{number}" for number in range(1, gpus(documents)))]
    assert ports == {name + end: port + n for n, end in enumerate(suffixes) for name, port in first.items()} | http
    assert settings["VITWIRE_HOST"] == settings["VITWIRE_METRICS_HOST"] == "0.0.0.0"
    service = only(documents, "Service")
    assert service["metadata"]["name"] == "vitwire"
    assert service["spec"]["clusterIP"] == "None"
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == dict(ports.items() - http.items())
    others = [each["spec"] for each in documents if each["metadata"]["name"] == HTTP]
    assert [{port["targetPort"]: port["port"] for port in each["ports"]} for each in others] == [http] * len(http)
    assert all(each["selector"] == service["spec"]["selector"] and "clusterIP" not in each for each in others)
    assert all(port["name"] == port["targetPort"] for port in service["spec"]["ports"])
    protocols = {port["appProtocol"] for port in service["spec"]["ports"] if port["name"].startswith("grpc")}
    assert protocols == {"https" if is_secure(documents) else "kubernetes.io/h2c"}


def test_the_network_policy_opens_these_ports_only(documents: list[Document]) -> None:
    ports = {port["name"]: port["containerPort"] for port in server(documents)["ports"]}
    policy = only(documents, "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    opened = [(each, rule["from"]) for rule in policy["ingress"] for each in rule["ports"]]
    spans = [
        range(start := ports.get(each["port"], each["port"]), each.get("endPort", start) + 1) for each, _ in opened
    ]
    kinds = [{port for name, port in ports.items() if name.startswith(kind)} for kind in ("grpc", "http", "metrics")]
    assert [set(span) for span in spans] == list(filter(None, kinds)), "whoever may use one device may use all"
    assert all(sources for _, sources in opened), "an empty list of sources admits everybody"
    for span, (_, sources) in zip(spans, opened, strict=True):
        if ports["metrics"] in span:
            assert [list(source) for source in sources] == [["namespaceSelector"]]
    assert {port for rule in policy["egress"] for port in egress_ports(rule)} == {
        *([443, 53] if "download" in {each["name"] for each in containers(documents)} else []),
        *([4317, 53] if "VITWIRE_OTLP_ENDPOINT" in variables(documents) else []),
    }, "the download reaches the Hub, the server a collector, nothing else"


def test_probes_ask_the_health_services(documents: list[Document]) -> None:
    container = server(documents)
    port = {exposed["name"]: exposed["containerPort"] for exposed in container["ports"]}["grpc"]
    probes = {name: container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    ways = [way for probe in probes.values() for way in ("grpc", "httpGet", "exec", "tcpSocket") if way in probe]
    assert len(ways) == 3, "a probe asks in one way"
    if gpus(documents) > 1:
        assert set(ways) == {"exec"}  # tests/e2e/test_supervisor.py runs them
    elif is_secure(documents):  # a kubelet's gRPC probes speak no TLS
        paths = {"startupProbe": "/healthz", "readinessProbe": "/healthz", "livenessProbe": "/livez"}
        assert {name: probe["httpGet"] for name, probe in probes.items()} == {
            name: {"port": "metrics", "path": path} for name, path in paths.items()
        }
    else:
        assert {name: probe["grpc"] for name, probe in probes.items()} == {
            "startupProbe": {"port": port, "service": READINESS},
            "readinessProbe": {"port": port, "service": READINESS},
            "livenessProbe": {"port": port, "service": LIVENESS},
        }


def test_variables_are_settings(documents: list[Document], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name is a field and every value is one that the server accepts, read as it reads them."""
    from vitwire_flags.options import options_of  # noqa: PLC0415  (only this test needs the server)
    from vitwire_server.config.resolving import resolve  # noqa: PLC0415  (as above)
    from vitwire_server.config.settings import ServeSettings  # noqa: PLC0415  (as above)

    names = variables(documents)
    assert all(name.startswith("VITWIRE_") and name.isupper() for name in names)
    assert {name.removeprefix("VITWIRE_").lower() for name in names} <= options_of(ServeSettings).keys()
    for inherited in [name for name in os.environ if name.startswith("VITWIRE_")]:
        monkeypatch.delenv(inherited)
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    settings = resolve([])
    assert (settings.model, settings.port) == (names["VITWIRE_MODEL"], int(names["VITWIRE_PORT"]))


def test_yamllint_is_clean() -> None:
    config = ROOT / ".yamllint.yaml"
    assert complaints(SCRIPTS / "yamllint", "--strict", "-c", config, DEPLOY, config) == ""


def test_hadolint_is_clean() -> None:
    assert complaints(SCRIPTS / "hadolint", "--failure-threshold", "style", ROOT / "Dockerfile") == ""


def test_the_image_is_what_the_pods_expect() -> None:
    text = (ROOT / "Dockerfile").read_text()
    runtime = re.split(r"^FROM ", text, flags=re.MULTILINE)[-1].replace("\\\n", " ")
    documents = documents_of("base")
    steps = dict(line.split(maxsplit=1) for line in runtime.splitlines()[1:] if not line.startswith("#"))
    assert steps["USER"] == f"{UID}:{UID}"
    assert json.loads(steps["ENTRYPOINT"]) == ["tini", "--", "python3", "-m", "vitwire_server"]
    assert "vitwire health" in json.loads(steps["HEALTHCHECK"].partition(" CMD ")[2])[-1]
    assert json.loads(steps["CMD"]) == server(documents)["args"]
    assert steps["STOPSIGNAL"] == "SIGTERM"
    exposed = [port["containerPort"] for port in server(documents)["ports"]]
    assert [int(port) for port in steps["EXPOSE"].split()] == exposed
    assert f"ARG VERSION={RELEASE}\n" in text


def test_the_build_context_holds_what_the_dockerfile_copies() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert {name for names in copies for name in names.split()} == allowed
