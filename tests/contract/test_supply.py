"""What `make audit` concludes from the output of pip-audit, whose service cannot be reached from everywhere."""

import json
from pathlib import Path
from typing import Any

import pytest
from tools import supply


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
    script = tmp_path / "pip-audit"
    script.write_text(f"#!/bin/sh\necho 'connection refused' >&2\nprintf '%s' '{output}'\n")
    script.chmod(0o755)
    assert supply.audit(tmp_path, tmp_path / "requirements.txt") == code
    assert said in "".join(capsys.readouterr())
