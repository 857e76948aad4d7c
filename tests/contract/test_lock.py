"""requirements.lock: complete, hashed, and the same versions that the tests ran with."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def locked(extras: str, variant: str = "cuda") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools/locked.py", "--variant", variant, extras]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def selected(extras: str, variant: str = "cuda") -> dict[str, str]:
    """Version by name of what an image with these extras installs."""
    done = locked(extras, variant)
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE))


def test_every_package_is_pinned_and_hashed() -> None:
    blocks = re.findall(r"^[^#\s].*\n(?: .*\n)*", LOCK, re.MULTILINE)
    assert blocks
    for block in blocks:
        assert re.match(r"[\w.-]+==\S+ \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+$", block), block
    assert LOCK.count("# for: ") == len(blocks)


def test_versions_are_those_of_the_tests() -> None:
    pins: dict[str, str] = {canonicalize_name(name): version for name, version in PINS.items()}
    everything = selected("build,client,cli,server,videos,gateway,nixl", "cpu")
    differ = {name: version for name, version in everything.items() if pins.get(name, version) != version.split("+")[0]}
    assert differ == {}, "run `make lock`"


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_every_extra_that_the_image_offers_is_locked(variant: str) -> None:
    """What pyproject.toml asks for is in the selection, at a version that it allows."""
    for extra in (
        "cli",
        "server",
        "videos",
        "router",
        "nixl",
        "sglang",
        "gateway",
        *(["flash"] if variant == "cuda" else []),
    ):
        versions = selected(extra, variant)
        wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]
        for requirement in map(Requirement, wanted):
            if requirement.name != "vitwire":
                version = versions[canonicalize_name(requirement.name)]
                assert requirement.specifier.contains(version, prereleases=True), (extra, requirement)


def test_the_cpu_variant_has_nothing_of_cuda() -> None:
    cpu, cuda = selected("server", "cpu"), selected("server", "cuda")
    assert cpu["torch"] == f"{cuda['torch']}+cpu"
    assert not [name for name in cpu if name.startswith(("nvidia-", "cuda-", "triton"))]
    assert "triton" in cuda
    assert set(cpu) < set(cuda)


def test_an_unknown_extra_is_named() -> None:
    done = locked("server,vidoes")
    assert done.returncode == 2
    assert "requirements.lock has no extra vidoes; it has build, cli, client, flash, gateway, jpeg, nixl" in done.stderr


def test_the_gateway_is_all_of_its_extras() -> None:
    assert selected("gateway") == selected("router,sglang")
