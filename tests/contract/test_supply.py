"""Bill of materials, audit and release: what our scripts make of the output of tools that are not installed here."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tools import supply

ROOT = Path(__file__).parents[2]


def tool(path: Path, script: str) -> None:
    """A command in the place of a tool that is not installed for the everyday tests."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def package(**more: Any) -> dict[str, Any]:
    return {"name": "torch", "version": "2.13.0", "vulns": [], **more}


@pytest.mark.parametrize(
    ("packages", "code", "said"),
    [
        ([package()], 0, "1 packages audited, 0 known vulnerabilities"),
        ([package(vulns=[{"id": "PYSEC-1", "fix_versions": ["2.13.1"]}])], supply.FOUND, "PYSEC-1, fixed in 2.13.1"),
        ([package(vulns=[{"id": "PYSEC-2", "fix_versions": []}])], 0, "PYSEC-2, fixed in no release yet"),
        ([package(), package(skip_reason="not on PyPI")], supply.UNREACHABLE, "no advisories for 1 of 2 packages"),
        (None, supply.UNREACHABLE, "NOT AUDITED: connection refused"),
    ],
)
def test_only_what_can_be_fixed_fails_and_what_was_not_read_is_not_safe(
    packages: list[dict[str, Any]] | None, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = json.dumps({"dependencies": packages}) if packages is not None else ""
    tool(tmp_path / "pip-audit", f"echo 'connection refused' >&2\nprintf '%s' '{output}'")
    assert supply.audit(tmp_path, tmp_path / "requirements.txt") == code
    assert said in "".join(capsys.readouterr())


def test_the_bill_of_materials_has_the_licences_that_packages_declare(tmp_path: Path) -> None:
    """The tools print here what cyclonedx-py and pip-licenses printed of the lock."""
    bill = {"components": [{"name": "torch"}, {"name": "Some.Thing"}, {"name": "odd"}, {"name": "nvidia-nvtx"}]}
    torch = "Apache-2.0 AND Apache-2.0 WITH LLVM-exception AND BSD-3-Clause"
    licences = {"torch": torch, "some-thing": "BSD License", "odd": "UNKNOWN"}
    stated = [{"Name": name, "License": licence} for name, licence in licences.items()]
    tool(tmp_path / "cyclonedx-py", f"for out; do :; done; printf '%s' '{json.dumps(bill)}' > \"$out\"")
    tool(tmp_path / "pip-licenses", f"printf '%s' '{json.dumps(stated)}'")
    out = tmp_path / "sbom.json"
    assert supply.sbom(tmp_path, tmp_path / "requirements.txt", Path("python3"), out) == 0
    packages = {each["name"]: each.get("licenses") for each in json.loads(out.read_text())["components"]}
    assert packages == {
        "torch": [{"expression": torch}],
        "Some.Thing": [{"license": {"name": "BSD License"}}],
        "odd": None,
        "nvidia-nvtx": None,
    }


RELEASE_PYTHON = """
case "$*" in
*hatchling*) touch dist/vitwire.whl ;;
*venv*) mkdir -p .tools/release-check/bin && cp "$0" .tools/release-check/bin/vitwire ;;
*supply?audit*) echo "{said}" >&2; exit {code} ;;
esac
"""


@pytest.mark.parametrize(
    ("code", "said"), [(0, "9 packages audited"), (supply.FOUND, "PYSEC-1"), (supply.UNREACHABLE, "NOT AUDITED: x")]
)
def test_only_an_audited_release_is_tagged(code: int, said: str, tmp_path: Path) -> None:
    """With a python that builds and installs nothing."""
    names = ("tools/release.sh", "tools/locked.py", "requirements.lock", "CHANGELOG.md", "Dockerfile", "pyproject.toml")
    tool(tmp_path / ".tools/supply/bin/python", RELEASE_PYTHON.format(said=said, code=code))
    for name in (*names, ".gitignore"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("unreleased", "2026-12-01"))
    for words in (
        ("init", "--quiet"),
        ("config", "user.name", "test"),
        ("config", "user.email", "test@localhost"),
        ("add", "."),
        ("commit", "--quiet", "--message", "all"),
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    command = ["bash", "tools/release.sh", "--no-image"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == code, run.stderr
    assert said in run.stdout
    assert ("dist/ is ready" in run.stdout) == (code != supply.FOUND)
    assert ("NOT AUDITED" in run.stderr) == (code == supply.UNREACHABLE)
    if code != supply.FOUND:
        assert (tmp_path / "dist/RELEASE.md").read_text().endswith(f"{said}\n")
    show = ["git", "tag", "--list", "--format=%(contents)", "v*"]
    tagged = subprocess.run(show, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert ("The first release." in tagged and "packages audited" in tagged) == (code == 0)
