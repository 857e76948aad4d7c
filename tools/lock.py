"""Write requirements.lock: what the image and the wheel's extras install, with the pins of constraints.txt and hashes.

uv resolves each extra for Linux and the oldest Python. PyPI's torch for Linux is the CUDA build; the CPU build comes
from another index, so its hashes are read from the wheel or the index given with `--cpu-torch`.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("client", "cli", "server", "jpeg", "videos", "nvdec", "router", "nixl", "sglang", "gateway", "flash")
CPU_INDEX = "https://download.pytorch.org/whl/cpu/torch/"
_CUDA = re.compile(
    r"(nvidia-(?!ml-py)|triton|cuda-|torch==|flash-attn|quack|apache-tvm-ffi|torch-c-dlpack|pynvvideocodec)"
)
_HEADER = """\
# Written by `make lock`; do not edit. What the image installs, pinned and hashed, for each extra of pyproject.toml.
# torch has two builds, so this file is not installed whole: `tools/locked.py --variant cpu server,cli` selects.
"""


def compiled(extra: str, uv: str) -> dict[str, str]:
    """Name and lines of each package that an extra needs, as uv resolves them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    source, options, text = "pyproject.toml", [], None
    if extra == "build":
        source, text = "-", "\n".join(project["build-system"]["requires"])
    elif extra != "client":
        options = ["--extra", extra]
    command = [uv, "pip", "compile", source, *options, "--constraint", "constraints.txt"]
    command += ["--python-platform", "x86_64-manylinux_2_28", "--python-version", "3.11"]
    command += ["--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
    command += ["--prerelease", "if-necessary-or-explicit"]
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise SystemExit(f"uv could not resolve {extra}:\n{done.stderr}")
    blocks = re.findall(r"^\S.*\n(?:[ \t].*\n)*", done.stdout, flags=re.MULTILINE)
    return {re.split(r"[=\s]", block, maxsplit=1)[0]: block for block in blocks}


def cpu_torch(source: str, version: str) -> str:
    """The lines of torch's CPU build: hashes of a wheel, or of all Linux wheels of an index."""
    if source.endswith(".whl"):
        hashes = {hashlib.sha256(Path(source).read_bytes()).hexdigest()}
    else:
        with urlopen(source, timeout=60) as page:  # noqa: S310 - an https index
            text = page.read().decode()
        hashes = set(re.findall(rf"torch-{version}%2Bcpu-cp3\d+-cp3\d+-manylinux[^#]*#sha256=([0-9a-f]{{64}})", text))
    if not hashes:
        raise SystemExit(f"{source} has no CPU build of torch {version}; name another with --cpu-torch")
    return " \\\n".join([f"torch=={version}+cpu", *(f"    --hash=sha256:{each}" for each in sorted(hashes))]) + "\n"


def lock(by_extra: dict[str, dict[str, str]], cpu: str) -> str:
    """The file: one entry per package, with the extras that need it."""
    lines: dict[str, str] = {}
    needed: dict[str, set[str]] = {}
    for extra, packages in by_extra.items():
        for name, block in packages.items():
            if lines.setdefault(name, block) != block:
                raise SystemExit(f"{name} differs between extras; pin it in constraints.txt")
            needed.setdefault(name, set()).add(extra)
    parts = [_HEADER]
    for name in sorted(lines):
        extras = " ".join(sorted(needed[name]))
        if name == "torch":
            parts.append(f"# for: {extras} (cpu only)\n{cpu}")
        only = " (cuda only)" if _CUDA.match(lines[name]) else ""
        parts.append(f"# for: {extras}{only}\n{lines[name]}")
    return "\n".join(parts)


def main() -> int:
    """Resolve and write; exits 1 with uv's message where it cannot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--uv", default="uv", help="the uv command")
    parser.add_argument("--cpu-torch", default=CPU_INDEX, help="a wheel or a page of links (default: %(default)s)")
    arguments = parser.parse_args()
    by_extra = {extra: compiled(extra, arguments.uv) for extra in ("build", *EXTRAS)}
    found = re.match(r"torch==([0-9.]+)", by_extra["server"]["torch"])
    if not found:
        raise SystemExit("torch is not pinned; add it to constraints.txt")
    text = lock(by_extra, cpu_torch(arguments.cpu_torch, found[1]))
    (ROOT / "requirements.lock").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
