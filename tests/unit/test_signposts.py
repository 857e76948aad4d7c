"""Files that the pages for contributors name are there."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"dist/", "towers/models/exaone.py", "transformers/models/exaone4_5/modeling_exaone4_5.py"}
"""What a release writes, the example of adding a model, and a file of transformers."""
PAGES = ("CONTRIBUTING.md", "docs/architecture.md", "docs/adding-a-model.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_named_module_exists(page: str) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {f"{parent}/" for path in tracked for parent in Path(path).parents}
    named = set(re.findall(r"`([\w/]+/[\w.]*)`", (ROOT / page).read_text(encoding="utf-8")))
    named = {name for name in named if name.endswith((".py", "/"))}
    assert named
    known = [f"/{path}" for path in (*tracked, *folders)]
    missing = {name for name in named if not any(path.endswith(f"/{name}") for path in known)}
    assert missing <= ELSEWHERE
