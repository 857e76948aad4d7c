"""Schemas of the custom resources in deploy/: the fields that they use, with the constraints of their CRDs.

Written from the CRDs of Gateway API 1.6, KEDA 2.20 and the Prometheus operator 0.93 (August 2026). A field that is
not here fails the test: add it after a look into the CRD.
"""

from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]
_NAME: Schema = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
_HOST: Schema = {
    "type": "string",
    "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
}
_DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h|d))+$"}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def _closed(required: str = "", **properties: Schema) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


def _list(items: Schema, most: int = 16) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def _rules() -> Schema:
    policy = _closed("type value periodSeconds", type=_one_of("Pods", "Percent"), value=_COUNT, periodSeconds=_COUNT)
    return _closed(stabilizationWindowSeconds={**_COUNT, "maximum": 3600}, policies=_list(policy))


_POD_MONITOR = _closed(
    "selector podMetricsEndpoints",
    jobLabel={"type": "string"},
    selector=_closed(matchLabels=_LABELS),
    podMetricsEndpoints=_list(
        _closed("port", port={"type": "string"}, path={"type": "string"}, interval=_DURATION, scrapeTimeout=_DURATION)
    ),
)
_SCALED_OBJECT = _closed(
    "scaleTargetRef triggers",
    scaleTargetRef=_closed("name", apiVersion={"type": "string"}, kind={"type": "string"}, name=_NAME),
    pollingInterval=_COUNT,
    minReplicaCount=_COUNT,
    maxReplicaCount=_COUNT,
    fallback=_closed(
        "failureThreshold replicas",
        failureThreshold=_COUNT,
        replicas=_COUNT,
        behavior=_one_of("static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"),
    ),
    triggers=_list(
        _closed(
            "type metadata",
            type=_one_of("prometheus"),
            metricType=_one_of("AverageValue", "Value"),
            metadata=_closed(
                "serverAddress query threshold",
                serverAddress={"type": "string", "pattern": r"^https?://[^/]+$"},
                query={"type": "string"},
                threshold={"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"},  # every value of this map is a string
            ),
        )
    ),
    advanced=_closed(horizontalPodAutoscalerConfig=_closed(behavior=_closed(scaleUp=_rules(), scaleDown=_rules()))),
)
_EXPRESSION: Schema = {"type": ["string", "integer"]}
_RECORD = _closed("record expr", record={"type": "string"}, expr=_EXPRESSION, labels=_LABELS)
_ALERT = _closed(
    "alert expr",
    alert={"type": "string"},
    expr=_EXPRESSION,
    keep_firing_for=_DURATION,
    labels=_LABELS,
    annotations=_LABELS,
)
_ALERT["properties"]["for"] = _DURATION
_GATEWAY = _closed(
    "gatewayClassName listeners",
    gatewayClassName=_NAME,
    listeners=_list(
        _closed(
            "name port protocol",
            name=_NAME,
            protocol=_one_of("HTTP", "HTTPS", "TLS", "TCP", "UDP"),
            port=_PORT,
            hostname=_HOST,
            tls=_closed(mode=_one_of("Terminate", "Passthrough"), certificateRefs=_list(_closed("name", name=_NAME))),
            allowedRoutes=_closed(
                namespaces=_closed("from") | {"properties": {"from": _one_of("All", "Same", "Selector")}},
                kinds=_list(_closed("kind", kind=_one_of("GRPCRoute", "HTTPRoute"))),
            ),
        )
    ),
)
_METHOD = _closed(
    service={"type": "string", "pattern": r"^[A-Za-z_][\w]*(\.[A-Za-z_]\w*)*$"},
    method={"type": "string", "pattern": r"^[A-Za-z_]\w*$"},
    type=_one_of("Exact", "RegularExpression"),
)
_GRPC_ROUTE = _closed(
    "parentRefs rules",
    parentRefs=_list(_closed("name", name=_NAME, sectionName=_NAME), 32),
    hostnames=_list(_HOST),
    rules=_list(
        _closed(
            "backendRefs",
            matches=_list(_closed("method", method=_METHOD), 64),
            backendRefs=_list(_closed("name port", name=_NAME, port=_PORT, weight=_COUNT)),
        )
    ),
)
_PROMETHEUS_RULE = _closed(
    "groups",
    groups=_list(
        _closed(
            "name rules",
            name={"type": "string"},
            interval=_DURATION,
            rules={"type": "array", "items": {"anyOf": [_RECORD, _ALERT]}, "minItems": 1},
        ),
        64,
    ),
)
_SPECS = {
    ("monitoring.coreos.com/v1", "PodMonitor"): _POD_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): _PROMETHEUS_RULE,
    ("keda.sh/v1alpha1", "ScaledObject"): _SCALED_OBJECT,
    ("gateway.networking.k8s.io/v1", "Gateway"): _GATEWAY,
    ("gateway.networking.k8s.io/v1", "GRPCRoute"): _GRPC_ROUTE,
}
KINDS = {kind for _, kind in _SPECS}


def errors(document: Schema) -> list[str]:
    """What is wrong with a custom resource; KeyError if its kind or version is unknown."""
    metadata = _closed("name", name=_NAME, labels=_LABELS)
    spec = _SPECS[document["apiVersion"], document["kind"]]
    text: Schema = {"type": "string"}
    schema = _closed("apiVersion kind metadata spec", apiVersion=text, kind=text, metadata=metadata, spec=spec)
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(document)]
