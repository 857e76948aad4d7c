"""What the README shows, run as it is written."""

import base64
import json
import re
import shutil
from pathlib import Path

import pytest
import skimage

from entered import entered
from servers import ServerProcess, finished, serving, shell

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TARGET = "localhost:50051"
PHOTO = Path(skimage.__file__).parent / "data" / "rocket.jpg"


FLAGS = ("--graphs", "simulated", "--max-budget-tokens", "1024")

server = entered(lambda checkpoints: serving(checkpoints("qwen3_vl"), *FLAGS))


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    return found


def test_the_client_in_ten_lines(server: ServerProcess) -> None:
    program = block("python")
    assert TARGET in program
    ran = finished(program=("-c", program.replace(TARGET, server.target)))
    assert ran.returncode == 0, ran.stderr
    shape, *rows = ran.stdout.splitlines()
    assert re.fullmatch(r"\(\d+, \d+\) (graph|eager)", shape)
    assert len(rows) == 3


def calls() -> list[str]:
    """The lines of "Operate it" that call a server's RPCs."""
    section = README.read_text(encoding="utf-8").partition("## Operate it\n")[2]
    return [line for line in section.splitlines() if line.startswith(("grpcurl ", "buf curl "))]


@pytest.mark.parametrize("line", calls())
def test_grpcurl_and_buf_call_the_server(server: ServerProcess, line: str, tmp_path: Path) -> None:
    answer = json.loads(shell(line.replace(TARGET, server.target), tmp_path))
    if "Health" in line:
        assert answer == {"status": "SERVING"}
    else:
        assert (answer.get("modelType") or answer["model_type"]) == "qwen3_vl"


def test_a_line_shows_graph_hits_and_fallbacks(server: ServerProcess, tmp_path: Path) -> None:
    (line,) = (
        line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("curl -s localhost:9464")
    )
    shown = shell(line.replace("localhost:9464", f"127.0.0.1:{server.metrics_port}"), tmp_path)
    assert "vitwire_graph_hits_total" in shown
    assert "vitwire_eager_fallbacks_total" in shown


def test_both_tools_call_health_and_the_encoder() -> None:
    pairs = {(line.partition(" ")[0], line.partition("#")[0].rstrip().rpartition("/")[2]) for line in calls()}
    assert pairs == {(tool, method) for tool in ("grpcurl", "buf") for method in ("Check", "GetModel")}


def recipes() -> list[str]:
    """The commands of docs/client.md that call grpcurl."""
    text = (ROOT / "docs" / "client.md").read_text(encoding="utf-8")
    return [found for found in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if found.startswith("grpcurl ")]


@pytest.mark.parametrize(("recipe", "tokens"), [(0, 260), (1, 1)], ids=["photograph", "pixels"])
def test_grpcurl_encodes(server: ServerProcess, recipe: int, tokens: int, tmp_path: Path) -> None:
    shutil.copy(PHOTO, tmp_path / "photo.jpg")
    answer = json.loads(shell(recipes()[recipe].replace(TARGET, server.target), tmp_path))
    assert answer["report"]["tokens"] == tokens
    rows, columns = map(int, answer["chunk"]["shape"])
    assert (rows, len(base64.b64decode(answer["chunk"]["data"]))) == (tokens, tokens * columns * 2)


def test_it_is_a_page() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "deploy").rglob("*.md"),
    *(ROOT / "examples").glob("*/*.md"),
]
_CODE = re.compile(r"```.*?```", re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)", _CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_code_names_pages_that_exist() -> None:
    """Comments, help texts and errors name pages by their path from the root."""
    code = [path for room in ("client", "gateway", "server", "bench", "tools") for path in (ROOT / room).rglob("*.py")]
    named = {found for path in code for found in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))}
    assert named
    assert not [page for page in named if not (ROOT / page).exists()]


@pytest.mark.parametrize("folder", ["operations", "performance"])
def test_each_task_and_each_result_is_a_page_that_the_index_names(folder: str) -> None:
    pages = sorted((ROOT / "docs" / folder).glob("*.md"))
    index = (ROOT / "docs" / folder / "README.md").read_text(encoding="utf-8")
    assert all(f"({page.name})" in index for page in pages if page.name != "README.md")
    assert max(len(page.read_text(encoding="utf-8").splitlines()) for page in pages) <= 250
