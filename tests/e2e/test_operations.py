"""Access, certificates and the overlay for new weights of docs/operations/, as they are written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from checkpoints import Checkpoints
from servers import PIXELS_ONLY, ServerProcess, serving
from waiting import until

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "operations"
TOKEN = "steady-0123456789abcdef"


def blocks(page: str, section: str, language: str = "sh") -> list[str]:
    """The code of a section of a page."""
    text = (GUIDE / page).read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


class Shell:
    """Bash in a folder, with the tools of this environment; functions are those of the first block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._setup = "".join(blocks("access.md", "Certificates")[0].splitlines(keepends=True)[:2])

    def __call__(self, script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-uc", self._setup + script],
            cwd=self._folder,
            env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TOKEN": TOKEN},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def succeeds(self, script: str) -> str:
        run = self(script)
        assert run.returncode == 0, run.stderr
        return run.stdout


def addressed(script: str, server: ServerProcess) -> str:
    """With the address of `server`; certificates name localhost."""
    return re.sub(r"(localhost|host):50051", f"localhost:{server.port}", script)


@pytest.mark.matrix
def test_certificates_are_issued_renewed_and_revoked(checkpoints: Checkpoints, tmp_path: Path) -> None:
    issue, renew, revoke = blocks("access.md", "Certificates")
    shell = Shell(tmp_path)
    shell.succeeds(issue)
    (tmp_path / "tokens").write_text(f"{TOKEN} alice\n")
    serve, ask = blocks("access.md", "Access")[0].replace("\\\n", "").splitlines()
    files = dict(re.findall(r"(--(?:tls|auth)-[\w-]+) ([\w.]+)", serve))
    assert files.keys() == {"--tls-cert", "--tls-key", "--auth-tokens-file", "--tls-client-ca"}
    flags = [word for name, file in files.items() for word in (name, str(tmp_path / file))]
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, *flags) as server:
        ask = addressed(ask.partition("#")[0], server)
        mutual = f"{ask.rstrip()} --cert client.crt --key client.key"
        assert "qwen2_vl" in shell.succeeds(mutual)
        assert shell(ask).returncode, "without a certificate"

        check, replace, served = (addressed(line, server) for line in renew.splitlines())
        assert "expires within" not in shell.succeeds(check)
        assert "notAfter=" in shell.succeeds(served)
        fingerprint = served.replace("-enddate", "-fingerprint")
        before = shell.succeeds(fingerprint)
        shell.succeeds(replace)
        after = shell.succeeds("openssl x509 -in tls.crt -noout -fingerprint")
        assert before != after
        until(lambda: shell.succeeds(fingerprint) == after)

        trust_both, trust_new = revoke.splitlines()
        shell.succeeds(trust_both)
        shell.succeeds(
            issue.splitlines()[1].replace("ca.crt", "ca-2.crt").replace("ca.key", "ca-2.key")
            + "\nsigned frontend successor -addext subjectAltName=DNS:frontend"
        )
        successor = mutual.replace("client.", "successor.")
        until(lambda: shell(successor).returncode == 0)
        shell.succeeds(mutual)
        shell.succeeds(trust_new)
        until(lambda: shell(mutual).returncode != 0)
        shell.succeeds(successor)


@pytest.fixture
def beside(tmp_path: Path) -> list[dict[str, object]]:
    """The overlay for new weights, rendered."""
    (overlay,) = blocks("rollouts.md", "Roll-outs", "yaml")
    folder = ROOT / "deploy" / "overlays"
    at = tmp_path / "overlays" / "next"
    at.mkdir(parents=True)
    for each in ("base", "overlays/gpu"):
        (tmp_path / each).parent.mkdir(exist_ok=True)
        subprocess.run(["cp", "-r", folder.parent / each, tmp_path / each], check=True)
    (at / "kustomization.yaml").write_text(overlay)
    kubectl = Path(sys.executable).with_name("kubectl")
    run = subprocess.run([kubectl, "kustomize", at], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(run.stdout))


def test_a_second_service_beside_the_first_shares_nothing_with_it(beside: list[dict[str, object]]) -> None:
    shown = {str(each["kind"]): yaml.safe_dump(each) for each in beside}
    assert "value: 0123456789abcdef0123456789abcdef01234567" in shown["Deployment"]
    for kind in ("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"):
        assert "name: vitwire-next" in shown[kind]
        assert "instance: vitwire-next" in shown[kind].partition("spec:")[2]
    assert not re.search(r"instance: vitwire$", "".join(shown.values()), re.MULTILINE)
