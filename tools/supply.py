"""Reports on the packages in requirements.lock: `sbom` (CycloneDX), `audit` (known vulnerabilities) and `licences`.

The tools are those of tools/requirements-supply.txt; `--bin` is the folder that has them.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from tools.locked import LOCK, select

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "server,cli,jpeg,videos,gateway,nixl"
FOUND, UNREACHABLE = 1, 3
_COPYLEFT = re.compile(r"(?<!L)GPL|(?<!Lesser )General Public License", re.IGNORECASE)


def requirements(variant: str, extras: str, folder: str) -> Path:
    """The selection of the lock as a file."""
    path = Path(folder, "requirements.txt")
    path.write_text(select((ROOT / LOCK).read_text(encoding="utf-8"), frozenset(extras.split(",")), variant))
    return path


def sbom(tools: Path, selected: Path, python: Path, out: Path) -> int:
    """Write a bill of materials: hashes, and the licences that packages installed for `python` declare.

    The same input gives the same bytes.
    """
    command: list[str | Path] = [
        tools / "cyclonedx-py",
        "requirements",
        selected,
        "--pyproject",
        ROOT / "pyproject.toml",
    ]
    command += ["--mc-type", "application", "--spec-version", "1.6", "--output-reproducible", "--output-file", out]
    subprocess.run(command, check=True, cwd=ROOT)  # noqa: S603 - a pinned tool
    document = json.loads(out.read_text(encoding="utf-8"))
    packages, stated = document["components"], _stated(tools, python)
    for package in packages:
        if licence := stated.get(_normal(package["name"]), {}).get("License", "UNKNOWN").replace("UNKNOWN", ""):
            package["licenses"] = [_licence(licence)]
    out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"{len(packages)} packages in {out}, {sum('licenses' in each for each in packages)} with their licence")
    return 0


def _licence(text: str) -> dict[str, Any]:
    """As CycloneDX has it: an SPDX expression, or a name."""
    try:
        return {"expression": canonicalize_license_expression(text)}
    except InvalidLicenseExpression:
        return {"license": {"name": text}}


def audit(tools: Path, selected: Path) -> int:
    """Report known vulnerabilities; fails on those that a release fixes, since others leave nothing to lock.

    A package for which no advisory was read counts as not audited, not as safe.
    """
    command: list[str | Path] = [tools / "pip-audit", "--requirement", selected, "--require-hashes", "--disable-pip"]
    command += ["--format", "json", "--progress-spinner", "off"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a pinned tool
    if not done.stdout.startswith("{"):
        return _unreachable(done.stderr.strip().rpartition("\n")[2])
    every = json.loads(done.stdout)["dependencies"]
    found = [(package, each) for package in every for each in package.get("vulns", ())]
    for package, each in found:
        fixed = ", ".join(each["fix_versions"]) or "no release yet: read whether it concerns a server"
        print(f"{package['name']} {package['version']}: {each['id']}, fixed in {fixed}")
    # A local version (torch's CPU build) is not on PyPI; the CUDA variant has the same release.
    skipped = [each["name"] for each in every if "skip_reason" in each]
    if any(each["fix_versions"] for _, each in found):
        return FOUND
    if skipped:
        return _unreachable(f"no advisories for {len(skipped)} of {len(every)} packages: {', '.join(skipped[:5])}, ...")
    print(f"{len(every)} packages audited, {len(found)} known vulnerabilities")
    return 0


def _unreachable(reason: str) -> int:
    sys.stderr.write(
        f"NOT AUDITED: {reason}\nRun `make audit` where https://pypi.org/pypi/NAME/VERSION/json is reachable.\n"
    )
    return UNREACHABLE


def licences(tools: Path, selected: Path, python: Path, out: Path) -> int:
    """Write a table of the licences that the packages of an environment declare; fails if one is copyleft."""
    names = re.findall(r"^([\w.-]+)==(\S+)", selected.read_text(encoding="utf-8"), re.MULTILINE)
    stated = _stated(tools, python)
    rows = ["| package | version | licence | source |", "|---|---|---|---|"]
    refused = []
    for name, version in names:
        each = stated.get(_normal(name), {})
        licence = each.get("License", "not read: not installed here")
        rows.append(f"| {name} | {version} | {licence} | {each.get('URL', '')} |")
        refused += [name] if _COPYLEFT.search(licence) else []
    out.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{len(names)} licences in {out}")
    if refused:
        sys.stderr.write(f"copyleft: {', '.join(refused)}\n")
    return int(bool(refused))


def _stated(tools: Path, python: Path) -> dict[str, dict[str, str]]:
    """What the packages of an environment declare, by name."""
    command: list[str | Path] = [tools / "pip-licenses", "--python", python, "--format", "json"]
    command += ["--with-urls", "--with-system"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - a pinned tool
    return {_normal(each["Name"]): each for each in json.loads(done.stdout)}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    """Run a command on a selection of the lock."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=["sbom", "audit", "licences"])
    parser.add_argument("--bin", type=Path, required=True, help="folder of the tools")
    parser.add_argument("--variant", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--extras", default=EXTRAS)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="environment whose licences are read")
    parser.add_argument("--out", type=Path, help="file to write")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        selected = requirements(given.variant, given.extras, folder)
        if given.command == "audit":
            return audit(given.bin, selected)
        out = given.out or Path("dist", "sbom.cdx.json" if given.command == "sbom" else "licences.md")
        out.parent.mkdir(parents=True, exist_ok=True)
        if given.command == "sbom":
            return sbom(given.bin, selected, given.python, out.resolve())
        return licences(given.bin, selected, given.python, out)


if __name__ == "__main__":
    sys.exit(main())
