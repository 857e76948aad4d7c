"""Manifests beside the server's: `vitwire router`, and the Job that downloads a model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import custom_resources
from manifests import (
    NO_ENGINE,
    RELEASE,
    ROOT,
    ROUTER,
    Document,
    assert_restricted,
    documents_of,
    found_under,
    only,
    pod,
    quantity,
    server,
    variables,
)
from vitwire_cli.app import app
from vitwire_gateway.gateway_settings import RouterSettings

PREFIX = "VITWIRE_ROUTER_"


@pytest.fixture(scope="module")
def router() -> list[Document]:
    return documents_of(ROUTER)


@pytest.fixture(scope="module")
def download() -> list[Document]:
    return documents_of("model-download")


def test_settings_of_the_router(router: list[Document]) -> None:
    values = {name.removeprefix(PREFIX).lower(): value for name, value in variables(router).items()}
    assert all(name.startswith(PREFIX) for name in variables(router))
    kinds = {name: type(getattr(RouterSettings(), name)) for name in values}
    settings = RouterSettings(**{name: kinds[name](value) for name, value in values.items()})
    encoder = only(documents_of("base"), "Service")
    assert settings.target == f"dns:///{encoder['metadata']['name']}:{encoder['spec']['ports'][0]['port']}"
    limit = quantity(server(router)["resources"]["limits"]["memory"])
    assert settings.max_buffered_bytes <= limit / 2


def test_ports_and_selectors_of_the_router(router: list[Document]) -> None:
    (port,) = server(router)["ports"]
    assert port == {"name": "http", "containerPort": int(variables(router)[f"{PREFIX}PORT"])}
    (exposed,) = only(router, "Service")["spec"]["ports"]
    assert (exposed["targetPort"], exposed["port"]) == ("http", port["containerPort"])
    assert "clusterIP" not in only(router, "Service")["spec"]
    labels = only(router, "Deployment")["spec"]["template"]["metadata"]["labels"]
    policy = only(router, "NetworkPolicy")["spec"]
    selectors = [
        only(router, "Deployment")["spec"]["selector"]["matchLabels"],
        only(router, "Service")["spec"]["selector"],
        only(router, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        policy["podSelector"]["matchLabels"],
    ]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)


def test_the_router_is_scraped_as_a_job_that_the_rules_know(router: list[Document]) -> None:
    monitor = only(router, "PodMonitor")
    assert not custom_resources.errors(monitor)
    labels = only(router, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["spec"]["jobLabel"]] == "vitwire-router"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in server(router)["ports"]}


def test_the_router_may_reach_encoder_engine_and_names(router: list[Document]) -> None:
    encoder, engine, names = only(router, "NetworkPolicy")["spec"]["egress"]
    pods = only(documents_of("base"), "Deployment")["spec"]["template"]["metadata"]["labels"]
    (selector,) = found_under(encoder["to"], "matchLabels")
    assert selector.items() <= pods.items()
    assert [each["port"] for each in encoder["ports"]] == [50051]
    assert [str(each["port"]) for each in engine["ports"]] == [variables(router)[f"{PREFIX}ENGINE_URL"].split(":")[-1]]
    assert {each["port"] for each in names["ports"]} == {53}


def test_a_router_without_an_engine(router: list[Document]) -> None:
    documents = documents_of(NO_ENGINE)
    assert variables(documents) == variables(router) | {f"{PREFIX}NO_ENGINE": "true"}
    encoder, _, names = only(router, "NetworkPolicy")["spec"]["egress"]
    assert only(documents, "NetworkPolicy")["spec"]["egress"] == [encoder, names]


def test_probes_of_the_router(router: list[Document]) -> None:
    """tests/e2e/test_router.py asks for these pages."""
    probes = {name: server(router)[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    pages = {"startup": "/livez", "readiness": "/health", "liveness": "/livez"}
    assert probes == {name: {"port": "http", "path": path} for name, path in pages.items()}


def test_the_router_may_drain(router: list[Document]) -> None:
    settings = variables(router)
    pause = server(router)["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = sum(float(settings[f"{PREFIX}{name}_SECONDS"]) for name in ("LAME_DUCK", "DRAIN"))
    assert pod(router)["terminationGracePeriodSeconds"] >= pause + drain + 10


@pytest.mark.parametrize("target", ["router", "model-download"])
def test_pods_are_restricted(target: str) -> None:
    documents = documents_of(target)
    (owner,) = (each for each in documents if each["kind"] in {"Deployment", "Job"})
    spec = owner["spec"]["template"]["spec"]
    assert_restricted(spec)
    (container,) = spec["containers"]
    assert container["image"] == f"vitwire:{RELEASE}"
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in spec["volumes"]}
    assert "limits" in container["resources"]


@pytest.mark.parametrize("target", ["router", "model-download"])
def test_quantities_parse(target: str) -> None:
    documents = documents_of(target)
    sizes = [size for key in ("storage", "sizeLimit", "memory", "cpu") for size in found_under(documents, key)]
    assert len(sizes) >= 4
    assert all(quantity(size) > 0 for size in sizes)


def test_the_download_fills_the_claim_that_the_overlay_mounts(download: list[Document]) -> None:
    job, claim = only(download, "Job"), only(download, "PersistentVolumeClaim")
    names = [*found_under(job, "claimName")]
    assert names == [*found_under(pod(documents_of("gpu with a claim")), "claimName")] == [claim["metadata"]["name"]]
    selector = only(documents_of("base"), "Service")["spec"]["selector"]
    assert not selector.items() <= job["spec"]["template"]["metadata"]["labels"].items(), "it would get requests"
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def test_a_download_without_the_hub_fails(download: list[Document], tmp_path: Path) -> None:
    """With a folder that exists, the Hub's client alone would report success."""
    (container,) = only(download, "Job")["spec"]["template"]["spec"]["containers"]
    values = {each["name"]: each.get("value", "") for each in container["env"]}
    words = [re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], word) for word in container["args"]]
    command = [*container["command"], *(str(tmp_path) if word == "/models" else word for word in words)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    command[0] = sys.executable
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 1
    assert "could not be found on the Hub" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_router_is_a_command_of_the_image(router: list[Document]) -> None:
    assert [*server(router)["command"], *server(router)["args"]] == ["vitwire", "router"]
    assert "router" in {
        command.name or (command.callback and command.callback.__name__) for command in app.registered_commands
    }
    assert 'ARG EXTRAS="router"' in (ROOT / "Dockerfile").read_text()


def test_routers_share_the_secret_of_ids() -> None:
    """Replicas with random keys would name equal images differently, and a computable one would be none."""
    (deployment,) = (
        each
        for each in documents_of("router")
        if each["kind"] == "Deployment" and each["metadata"]["name"].startswith("vitwire-router")
    )
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    (secret,) = (each for each in spec["volumes"] if "secret" in each)
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == secret["name"])
    assert deployment["spec"]["replicas"] > 1
    assert container["env"] == [{"name": f"{PREFIX}CONTENT_KEY_FILE", "value": f"{mount['mountPath']}/key"}]
    assert mount["readOnly"]
    assert not secret["secret"].get("optional")
    text = (ROOT / "deploy" / "README.md").read_text()
    assert f"create secret generic {secret['secret']['secretName']} --from-literal=key=" in text
