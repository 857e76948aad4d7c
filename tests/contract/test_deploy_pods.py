"""The pods of every overlay: security, volumes, memory, shutdown and devices."""

import re
from pathlib import Path

import pytest

from manifests import (
    RELEASE,
    ROOT,
    TARGETS,
    Document,
    assert_restricted,
    containers,
    documents_of,
    found_under,
    only,
    pod,
    quantity,
    server,
    variables,
)
from vitwire_server.config.host import THREADS

SECRETS = ("VITWIRE_TLS_CERT", "VITWIRE_TLS_KEY", "VITWIRE_TLS_CLIENT_CA", "VITWIRE_AUTH_TOKENS_FILE")


def test_bounds_fit_into_the_memory_limit(documents: list[Document], monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would warn at its start otherwise."""
    from vitwire_server.config import resolving  # noqa: PLC0415  (as above)

    for name, value in variables(documents).items():
        monkeypatch.setenv(name, value)
    limit = int(quantity(server(documents)["resources"]["limits"]["memory"]))
    monkeypatch.setattr(resolving, "memory_limit", lambda: limit)
    assert resolving.warnings(resolving.resolve([])) == []


def test_pods_may_drain(documents: list[Document]) -> None:
    """The kubelet counts preStop as a part of the grace period."""
    settings = variables(documents)
    pause = server(documents)["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = float(settings["VITWIRE_LAME_DUCK_SECONDS"]) + float(settings["VITWIRE_DRAIN_SECONDS"])
    assert pod(documents)["terminationGracePeriodSeconds"] >= pause + drain + 10
    rollout = only(documents, "Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert rollout == {"maxUnavailable": 0, "maxSurge": 1}


def test_containers_run_one_pinned_image(documents: list[Document]) -> None:
    assert {container["image"] for container in containers(documents)} == {f"vitwire:{RELEASE}"}


def test_pods_are_restricted(documents: list[Document]) -> None:
    """The Pod Security Standard `restricted`, and a read-only root on top of it."""
    spec = pod(documents)
    assert_restricted(spec)
    assert only(documents, "ServiceAccount")["automountServiceAccountToken"] is False
    assert spec["serviceAccountName"] == only(documents, "ServiceAccount")["metadata"]["name"]
    assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC", "hostUsers"}


def test_volumes_are_declared_and_writable_where_needed(documents: list[Document]) -> None:
    volumes = {volume["name"]: volume for volume in pod(documents)["volumes"]}
    for volume in volumes.values():
        assert len(volume) == 2, "a name and one source"
        assert volume.keys() <= {"name", "emptyDir", "persistentVolumeClaim", "ephemeral", "image", "secret"}
    for container in containers(documents):
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) <= volumes.keys()
        assert "emptyDir" in volumes[mounts["/tmp"]]
    assert variables(documents)["VITWIRE_MODEL"].startswith("/models")
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in volumes.values()
        if len(volume) == 2 and "persistentVolumeClaim" in volume
    }
    made = {each["metadata"]["name"] for each in documents if each["kind"] == "PersistentVolumeClaim"}
    assert claims - made <= {"vitwire-models"}, "which model-download makes"


def test_the_overlay_of_the_readme_needs_no_claim() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    applied = [documents_of(target) for target in re.findall(r"kubectl apply -k deploy/([\w/-]+)", text)]
    assert applied
    assert not [name for documents in applied for name in found_under(documents, "claimName")]


@pytest.mark.parametrize("target", ["overlays/gpu", "overlays/multi-gpu", "overlays/autoscale"])
def test_pods_download_the_model_into_a_volume_of_their_own(target: str) -> None:
    """tests/e2e/test_download.py runs the command."""
    documents = documents_of(target)
    (container,) = pod(documents)["initContainers"]
    assert container["command"] == ["python3", "-m", "vitwire_server"]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    asked = re.sub(r"\$\((\w+)\)", lambda name: str(environment[name[1]]), " ".join(container["args"]))
    assert asked == "download Qwen/Qwen3-VL-8B-Instruct --to /models --revision main"
    assert variables(documents)["VITWIRE_MODEL"] == "/models"
    (volume,) = (each for each in pod(documents)["volumes"] if each["name"] == "models")
    claim = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim["accessModes"] == ["ReadWriteOnce"]
    assert "storageClassName" not in claim, "the cluster's default"
    assert {each["name"]: each.get("readOnly") for each in server(documents)["volumeMounts"]}["models"] is True


@pytest.mark.parametrize("target", ["gpu with a claim", "gpu with claims and a gateway"])
def test_a_claim_or_an_image_replaces_the_download(target: str) -> None:
    assert not pod(documents_of(target)).get("initContainers")
    (volume,) = (each for each in pod(documents_of(target))["volumes"] if each["name"] == "models")
    assert volume.keys() & {"persistentVolumeClaim", "image"}


def test_kernels_are_kept_on_a_volume(documents: list[Document]) -> None:
    environment = {each["name"]: each.get("value") for each in server(documents)["env"]}
    folders = {name: value for name, value in environment.items() if name.endswith("_CACHE_DIR")}
    assert folders == {"TRITON_CACHE_DIR": "/cache/triton"}
    assert {each["mountPath"]: each for each in server(documents)["volumeMounts"]}["/cache"] == {
        "name": "cache",
        "mountPath": "/cache",
    }
    assert not any(name.startswith("VITWIRE_") for name in environment), "settings are in the ConfigMap"


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


@pytest.mark.parametrize(
    ("overlay", "closed_by"),
    [("overlays/gpu-tls", "VITWIRE_AUTH_TOKENS_FILE"), ("overlays/gpu-mtls", "VITWIRE_TLS_CLIENT_CA")],
)
def test_overlays_with_tls_are_closed(overlay: str, closed_by: str) -> None:
    names = variables(documents_of(overlay))
    assert {*SECRETS} & names.keys() == {"VITWIRE_TLS_CERT", "VITWIRE_TLS_KEY", closed_by}
    assert names["VITWIRE_REFLECTION"] == "false"


def test_only_these_overlays_have_tls() -> None:
    assert [name for name in TARGETS if "VITWIRE_TLS_CERT" in variables(documents_of(name))] == [
        "overlays/gpu-mtls",
        "overlays/gpu-tls",
        "multi-gpu with TLS",
    ]


def test_the_demo_serves_the_checkpoint_it_wrote() -> None:
    documents = documents_of("overlays/cpu-demo")
    (writer,) = pod(documents)["initContainers"]
    model = variables(documents)["VITWIRE_MODEL"]
    assert writer["command"] == ["python3", "-m", "vitwire_server"]
    assert writer["args"] == ["demo-checkpoint", "--model-type", "qwen3_vl", "--out", model]
    mounts = [mount["name"] for mount in writer["volumeMounts"] if model.startswith(f"{mount['mountPath']}/")]
    assert mounts == ["models"]
    assert variables(documents)["VITWIRE_GRAPHS"] == "simulated"


def test_the_demo_has_the_threads_that_it_requests() -> None:
    container = server(documents_of("overlays/cpu-demo"))
    (threads,) = [each for each in container["env"] if each["name"] == THREADS]
    assert threads["valueFrom"] == {"resourceFieldRef": {"resource": "requests.cpu"}}
    assert "cpu" not in container["resources"]["limits"], "it may use what others leave idle"


@pytest.mark.parametrize(("overlay", "count"), [("overlays/embeddings", 1), ("overlays/multi-gpu", 4)])
def test_gpu_overlays_ask_for_gpus(overlay: str, count: int) -> None:
    documents = documents_of(overlay)
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert server(documents)["resources"]["limits"]["nvidia.com/gpu"] == str(count)
    assert pod(documents)["tolerations"] == [toleration]
    names = variables(documents)
    named = (names["VITWIRE_DEVICE"], names.get("VITWIRE_DEVICES", ""))
    assert named == (("cuda", "") if count == 1 else ("auto", ",".join(f"cuda:{n}" for n in range(count))))
    (spread,) = pod(documents)["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    on_cpus = documents_of("overlays/embeddings-cpu")
    assert "nvidia.com/gpu" not in str(on_cpus)
    assert variables(on_cpus)["VITWIRE_DEVICE"] == "cpu"
