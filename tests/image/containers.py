"""Containers of runc from a mounted image: the image's own user, entry point and environment, on a read-only root."""

import json
import os
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_READY_SECONDS = 500
"""Compiling takes 15 s on an idle machine, and minutes where other work has the cores."""


@dataclass(frozen=True, slots=True)
class Image:
    """A built image: where its root is mounted, and its configuration in Docker's format."""

    root: Path
    config: dict[str, Any]

    @property
    def environment(self) -> list[str]:
        """Its variables, as NAME=VALUE."""
        return list(self.config["Env"])

    @property
    def user(self) -> tuple[int, int]:
        """Its uid and gid."""
        uid, _, gid = self.config["User"].partition(":")
        return int(uid), int(gid)


@dataclass(slots=True)
class Container:
    """A container that this process started."""

    name: str
    state: Path
    process: subprocess.Popen[bytes]
    output: Path

    def log(self) -> str:
        """Its output so far."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str) -> None:
        """Wait until its output contains the text. Raises RuntimeError if it exits or takes too long."""
        deadline = time.monotonic() + _READY_SECONDS
        while text not in self.log():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no {text!r} (exit code {self.process.poll()}):\n{self.log()}")
            time.sleep(0.05)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as its user."""
        words = ["runc", "--root", str(self.state), "exec", self.name, *command]
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)

    def signal(self, name: str) -> None:
        """Send a signal to PID 1."""
        subprocess.run(["runc", "--root", self.state, "kill", self.name, name], check=True, timeout=60)


@contextmanager
def running(
    image: Image, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], mounts: Mapping[str, Path]
) -> Iterator[Container]:
    """The image with these arguments, on the host's network, deleted at the end of the block."""
    bundle = folder / uuid.uuid4().hex
    bundle.mkdir(parents=True)
    subprocess.run(["runc", "spec"], cwd=bundle, check=True)
    path = bundle / "config.json"
    path.write_text(json.dumps(_specification(json.loads(path.read_text()), image, arguments, environment, mounts)))
    name, state, output = f"vitwire-{bundle.name[:12]}", bundle / "state", bundle / "output"
    with output.open("wb") as log:
        command = ["runc", "--root", str(state), "run", "--bundle", str(bundle), name]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield Container(name, state, process, output)
    finally:
        if process.poll() is None:
            subprocess.run(["runc", "--root", state, "kill", name, "KILL"], check=False)
            process.wait(60)
        subprocess.run(["runc", "--root", state, "delete", "--force", name], check=False, capture_output=True)


def _specification(
    default: dict[str, Any],
    image: Image,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    mounts: Mapping[str, Path],
) -> dict[str, Any]:
    """What the overlay's pod runs: no capabilities, no new privileges, a read-only root, /tmp in memory."""
    uid, gid = image.user
    process = default["process"]
    process |= {"terminal": False, "user": {"uid": uid, "gid": gid}, "cwd": image.config["WorkingDir"] or "/"}
    process["args"] = [*image.config["Entrypoint"], *(arguments or image.config["Cmd"])]
    process["env"] = [*image.environment, *(f"{key}={value}" for key, value in environment.items())]
    process["capabilities"] = {}
    process["noNewPrivileges"] = True
    process["rlimits"] = []
    default["root"] = {"path": str(image.root), "readonly": True}
    default["mounts"].append(
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777"]}
    )
    for target, source in mounts.items():
        options = ["rbind", "ro"]
        default["mounts"].append(
            {"destination": target, "type": "bind", "source": os.fspath(source), "options": options}
        )
    linux = default["linux"]
    linux["namespaces"] = [each for each in linux["namespaces"] if each["type"] != "network"]
    return default
