"""The Helm chart, rendered by Helm's own engine, is what Kustomize renders."""

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

import kubernetes_validate
import pytest
import yaml

import custom_resources
from manifests import BESIDE, DEPLOY, NO_ENGINE, RELEASE, Document, documents_of, found_under, only, pod, server
from vitwire_flags.options import options_of
from vitwire_gateway.gateway_settings import RouterSettings
from vitwire_server.config.settings import ServeSettings

helm = pytest.importorskip("helm_python.chart", reason="Helm's library is built for Linux only")
CHART = DEPLOY / "helm" / "vitwire"
TLS = {"tls": {"secret": "vitwire-tls"}}
PAIRS: Mapping[str, Mapping[str, Any]] = {
    "overlays/gpu": {},
    "overlays/gpu-tls": {**TLS, "tokens": {"secret": "vitwire-tokens"}},
    "overlays/gpu-mtls": {"tls": {"secret": "vitwire-tls", "clientCertificates": True}},
    "overlays/autoscale": {"autoscaling": {"kind": "hpa"}, "podMonitor": True},
    "gpu with KEDA": {"autoscaling": {"kind": "keda"}, "podMonitor": True},
    "gpu with a claim": {"model": {"source": "claim"}},
    "gpu with claims and a gateway": {
        "model": {"source": "image"},
        "cache": {"shared": True},
        "tracing": {"endpoint": "otel-collector.monitoring:4317"},
        "network": {
            "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "envoy-gateway-system"}}}]
        },
    },
}
"""Values of the chart by the folder or combination of deploy/ that has the same objects."""
INGRESS = {"enabled": True, "host": "embeddings.example.com", "className": "nginx", "tlsSecret": "tls"}
FRONT_END: Mapping[str, Any] = {"enabled": True, "ingress": INGRESS, "autoscaling": {"enabled": True}}
OUTSIDE = {"Gateway", "GRPCRoute", "PrometheusRule"}
"""Kinds that the chart leaves to Kustomize, and dashboards."""
ADDED = ("app.kubernetes.io/managed-by", "helm.sh/chart", "vitwire/devices")
"""Labels that only one of them sets, and nothing selects in a chart."""


def rendered(values: Mapping[str, Any], name: str = "vitwire") -> list[Document]:
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(dict(values))
        files = chart.render(values=dict(values), name=name)
    texts = [text for path, text in sorted(files.items()) if path.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def comparable(documents: list[Document]) -> dict[tuple[str, str], Document]:
    """By kind and name, without hashes of settings, labels that only one sets, and the order of lists with names."""
    found = {}
    for document in copy.deepcopy(documents):
        metadata = document["metadata"]
        if document["kind"] in OUTSIDE or "grafana_dashboard" in metadata["labels"]:
            continue
        if document["kind"] == "ConfigMap":
            metadata["name"], metadata["labels"] = "vitwire", {}
        if document["kind"] == "Deployment":
            template = document["spec"]["template"]
            template["metadata"].pop("annotations", None)
            server([document])["envFrom"][0]["configMapRef"]["name"] = "vitwire"
            template["spec"]["volumes"].sort(key=lambda each: each["name"])
            server([document])["volumeMounts"].sort(key=lambda each: each["name"])
            if not template["spec"].get("initContainers"):
                template["spec"].pop("initContainers", None)
        for label in ADDED:
            metadata["labels"].pop(label, None)
        if document["kind"] in {"PodMonitor", "HorizontalPodAutoscaler", "ScaledObject", "PersistentVolumeClaim"}:
            metadata["labels"] = {}
        if document["kind"] == "PodMonitor":  # the other ports are those of overlays/multi-gpu
            document["spec"]["podMetricsEndpoints"] = document["spec"]["podMetricsEndpoints"][:1]
        found[document["kind"], metadata["name"]] = document
    return found


@pytest.mark.parametrize("target", PAIRS)
def test_the_chart_renders_what_kustomize_renders(target: str) -> None:
    assert comparable(rendered(PAIRS[target])) == comparable(documents_of(target))


def test_beside_renders_the_pod_of_the_overlay() -> None:
    found = []
    values = {"beside": {"enabled": True}, "settings": {"LAME_DUCK_SECONDS": 0}}
    for documents in (rendered(values), copy.deepcopy(documents_of(BESIDE))):
        spec = only(documents, "Deployment")["spec"]["template"]["spec"]
        claim, settings = only(documents, "ResourceClaimTemplate"), only(documents, "ConfigMap")
        assert spec.pop("resourceClaims")[0]["resourceClaimTemplateName"] == claim["metadata"]["name"]
        assert spec["initContainers"][-1].pop("envFrom")[0]["configMapRef"]["name"] == settings["metadata"]["name"]
        spec["volumes"].sort(key=lambda each: each["name"])
        found.append((spec, claim["spec"], settings["data"]))
    found[1][0].update({name: found[0][0][name] for name in ("serviceAccountName", "topologySpreadConstraints")})
    assert found[0] == found[1]


def test_the_front_end_is_the_router_without_an_engine() -> None:
    documents = rendered({"embeddings": {**FRONT_END, "keySecret": "vitwire-content-key"}}, name="next")
    ours = [each for each in documents if each["metadata"]["name"] == "next-embeddings"]
    theirs = copy.deepcopy(documents_of(NO_ENGINE))
    deployment, policy = only(ours, "Deployment")["spec"], only(ours, "NetworkPolicy")["spec"]
    selector, labels = deployment["selector"], deployment["template"]["metadata"]["labels"]
    pod(theirs)["serviceAccountName"] = "next"
    pod(theirs)["topologySpreadConstraints"][0]["labelSelector"] = policy["podSelector"]
    assert server(ours).pop("envFrom") == [{"configMapRef": {"name": "next-embeddings"}}]
    del server(theirs)["envFrom"], only(theirs, "ConfigMap")["data"]["VITWIRE_ROUTER_ENGINE_URL"]
    assert (policy["podSelector"], pod(ours)) == (selector, pod(theirs))
    only(theirs, "ConfigMap")["data"]["VITWIRE_ROUTER_TARGET"] = "dns:///next:50051"
    assert only(ours, "ConfigMap")["data"] == only(theirs, "ConfigMap")["data"]
    chosen = [each["spec"]["selector"] for each in documents if each["kind"] == "Service"]
    assert [each for each in chosen if each.items() <= labels.items()] == [selector["matchLabels"]]
    referred = [*found_under(ours, "scaleTargetRef"), *found_under(ours, "service")]
    assert [each["name"] for each in referred] == ["next-embeddings"] * 3
    assert [*found_under(policy["ingress"], "kubernetes.io/metadata.name")] == ["monitoring", "ingress-nginx"]


@pytest.mark.parametrize("values", [*PAIRS.values(), {"embeddings": FRONT_END, "podMonitor": True}])
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_schemas_accept_every_document(values: Mapping[str, Any], version: str) -> None:
    for document in rendered(values):
        if document["kind"] in custom_resources.KINDS:
            assert custom_resources.errors(document) == []
        else:
            assert kubernetes_validate.validate(document, version, strict=True) == version


def test_helm_finds_nothing_to_mend() -> None:
    report = helm.lint(CHART, {}, strict=True)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []


def test_two_releases_share_nothing() -> None:
    shown = yaml.safe_dump_all(rendered({"cache": {"shared": True}, "podMonitor": True}, name="next"))
    assert set(re.findall(r"(?:claimName|serviceAccountName): (\S+)", shown)) == {"next", "next-cache"}
    names = {each["metadata"]["name"] for each in yaml.safe_load_all(shown)}
    assert names == {"next", "next-cache"}
    assert set(found_under([*yaml.safe_load_all(shown)], "app.kubernetes.io/instance")) == {"next"}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model": {"source": "disk"}}, "model/source"),
        ({"autoscaling": {"kind": "vpa"}}, "autoscaling/kind"),
        ({"model": {"revison": "main"}}, "revison"),
        ({"settings": {"max-queued-items": 5}}, "max-queued-items"),
        ({"settings": {"VITWIRE_DEVICE": "cpu"}}, "VITWIRE_DEVICE"),
        ({"tracing": {"endpoint": "collector"}}, "tracing/endpoint"),
        ({"beside": {"enabled": True}, "tls": {"secret": "vitwire-tls"}}, "beside.enabled excludes tls"),
        ({"beside": {"enabled": True}, "model": {"source": "claim"}}, "beside.enabled needs model.source hub"),
        ({"tls": {"clientCertificates": True}}, "tls.clientCertificates needs tls.secret"),
        ({"tokens": {"secret": "vitwire-tokens"}}, "tokens.secret needs tls.secret"),
        ({"model": {"source": "claim", "claim": ""}}, "model.claim is empty"),
        ({"autoscaling": {"kind": "hpa", "minReplicas": 9}}, "autoscaling.minReplicas 9 is above"),
        ({"settings": {"MODEL": "/models/other"}}, "settings.MODEL is fixed by the chart: set"),
        ({"settings": {"GRAPSH": "auto"}}, "settings.GRAPSH: vitwire-server serve has no such flag"),
        ({"settings": {"DRAIN_SECONDS": 45}}, r"terminationGracePeriodSeconds 60 must exceed .*DRAIN_SECONDS 45"),
        ({"extraEnv": [{"name": "VITWIRE_PORT", "value": "1"}]}, "extraEnv sets VITWIRE_PORT"),
        ({"embeddings": {"enabled": True}, **TLS}, "embeddings.enabled excludes"),
        ({"embeddings": {"enabled": True, "settings": {"TARGET": "x"}}}, "embeddings.settings.TARGET is fixed"),
    ],
)
def test_wrong_values_are_refused(values: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        rendered(values)


def test_further_values_reach_the_pod() -> None:
    values = {
        "image": {"repository": "registry.example/vitwire", "tag": "next", "pullSecrets": [{"name": "registry"}]},
        "settings": {
            "BUDGETS": "learn",
            "STATE_DIR": "/cache/state",
            "MAX_QUEUED_ITEMS": 512,
            "CACHE_BYTES": 8e9,
            "NIXL_SECONDS": 0.5,
        },
        "extraEnv": [{"name": "HF_ENDPOINT", "value": "https://hub.example"}],
        "podAnnotations": {"example.com/team": "vision"},
        "service": {"annotations": {"example.com/zone": "a"}},
        "serviceAccount": {"name": "hub", "annotations": {"example.com/role": "reader"}},
        "network": {"egress": [{"ports": [{"port": 3128}]}]},
        "nodeSelector": {"nvidia.com/mig.config": "all-1g.10gb"},
        "priorityClassName": "serving",
        "runtimeClassName": "nvidia",
        "model": {"storageClass": "fast"},
        "replicas": 3,
    }
    documents = {each["kind"]: each for each in rendered(values)}
    deployment = documents["Deployment"]["spec"]
    pod = deployment["template"]["spec"]
    assert deployment["replicas"] == 3
    assert {each["image"] for each in pod["initContainers"] + pod["containers"]} == {"registry.example/vitwire:next"}
    assert (pod["imagePullSecrets"], pod["nodeSelector"]) == (values["image"]["pullSecrets"], values["nodeSelector"])
    names = (pod["priorityClassName"], pod["runtimeClassName"], pod["serviceAccountName"])
    assert names == ("serving", "nvidia", "hub")
    assert list(found_under(pod["volumes"], "storageClassName")) == ["fast"]
    assert str(rendered({**values, "beside": {"enabled": True}})).count("HF_ENDPOINT") == 3
    assert deployment["template"]["metadata"]["annotations"].items() > values["podAnnotations"].items()
    assert documents["Service"]["metadata"]["annotations"] == values["service"]["annotations"]
    assert documents["ServiceAccount"]["metadata"].items() > values["serviceAccount"].items()
    assert documents["NetworkPolicy"]["spec"]["egress"][-1] == values["network"]["egress"][0]
    settings = documents["ConfigMap"]["data"]
    assert settings["VITWIRE_BUDGETS"] == "learn"
    assert settings["VITWIRE_MAX_QUEUED_ITEMS"] == "512"
    assert settings["VITWIRE_CACHE_BYTES"] == "8000000000", "not 8e+09, as Helm writes large numbers"
    assert settings["VITWIRE_NIXL_SECONDS"] == "0.5"
    assert settings["VITWIRE_DEVICE"] == "cuda", "defaults stay"


def test_every_value_is_in_the_schema() -> None:
    """A value that the schema leaves out could be misspelt without an error."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    values |= {f"embeddings/{name}": value for name, value in values["embeddings"].items()}
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    schema |= {f"embeddings/{name}": value for name, value in schema["embeddings"]["properties"].items()}
    for name, value in values.items():
        if "properties" in schema[name]:
            assert (schema[name]["additionalProperties"], schema[name]["properties"].keys()) == (False, value.keys())


def test_the_chart_knows_every_flag() -> None:
    text = (CHART / "templates" / "_checks.tpl").read_text()
    for command, kind in (("server", ServeSettings), ("router", RouterSettings)):
        (flags,) = re.findall(rf'define "vitwire.flags.{command}" -}}}}([^{{]*)', text)
        assert flags.split() == sorted(name.upper() for name in options_of(kind))


def test_the_chart_has_the_version_of_the_release() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == RELEASE
