"""The status page in headless Chromium. Run by `make page-test`, which brings Playwright."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, Request, sync_playwright

from servers import ServerProcess, serving
from vitwire import Client, Item
from vitwire_server.demo.checkpoint import write_demo_checkpoint

COLUMNS = 3 * 2 * 14 * 14
NAME = "<img src=x onerror=alert(1)> & co"
GROUND = {"light": (255, 255, 255), "dark": (20, 22, 26)}
REAL = {"light": (26, 95, 180), "dark": (120, 174, 255)}
"""The colour of real tokens in the bars."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    model = tmp_path_factory.mktemp("models") / NAME
    write_demo_checkpoint("qwen2_vl", model)
    flags = ("--graphs", "simulated", "--budgets", "16,64,128", "--max-budget-tokens", "128", "--dtype", "float32")
    with serving(model, *flags) as process:
        yield process


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium of this machine, or the one that Playwright brought."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def faults() -> list[str]:
    """What the browser complained about, blocked requests and policy violations included."""
    return []


def opened(browser: Browser, server: ServerProcess, faults: list[str], **context: Any) -> Page:
    page = browser.new_context(**context).new_page()
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append(dialog.message))

    def requested(request: Request) -> None:
        if not request.url.startswith(f"http://127.0.0.1:{server.metrics_port}/"):
            faults.append(request.url)

    page.on("request", requested)
    page.goto(f"http://127.0.0.1:{server.metrics_port}/")
    return page


def load(server: ServerProcess, count: int) -> None:
    """Images of 4 to 160 tokens, so that every budget is hit and one item is too large for all of them."""
    rng = np.random.default_rng()
    with Client(server.target) as client:
        for number in range(count):
            tokens = (4, 16, 60, 100, 160)[number % 5]
            client.encode([Item(rng.random((4 * tokens, COLUMNS), np.float32), (1, 2 * tokens, 2))])


def cell(page: Page, row: str) -> str:
    """The first figure of the row with this head."""
    return page.locator(f"tr:has(> th:text-is('{row}')) td").first.inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_live_and_calls_nobody_else(
    browser: Browser, server: ServerProcess, faults: list[str], scheme: Any, tmp_path: Path
) -> None:
    load(server, 10)
    page = opened(browser, server, faults, color_scheme=scheme, viewport={"width": 1100, "height": 900})
    assert page.inner_text("h1") == NAME
    assert page.inner_text(".state") == "serving"
    before = int(cell(page, "64"))
    load(server, 20)
    page.wait_for_function(
        "before => [...document.querySelectorAll('tbody tr')].some(row =>"
        " row.cells[0].innerText === '64' && Number(row.cells[1].innerText) > before)",
        arg=before,
    )
    page.locator("#live").uncheck()
    shown = page.inner_text("time")
    file = Path(os.environ.get("VITWIRE_PAGE_SHOTS", tmp_path)) / f"{scheme}.png"
    page.screenshot(path=file, full_page=True)
    shot = np.asarray(Image.open(file).convert("RGB"))
    assert tuple(shot[0, 0]) == GROUND[scheme]
    assert (shot == REAL[scheme]).all(-1).sum() > 1000, "bars are drawn"
    page.wait_for_timeout(4500)
    assert page.inner_text("time") == shown, "it does not refresh when switched off"
    assert not faults


def test_it_is_whole_without_javascript(browser: Browser, server: ServerProcess, faults: list[str]) -> None:
    load(server, 5)
    page = opened(browser, server, faults, java_script_enabled=False)
    assert int(cell(page, "16")) > 0
    assert int(cell(page, "oversize")) > 0
    assert page.locator("svg.bar").count() == 3, "one for each budget"
    assert not page.locator("label").is_visible(), "nothing is offered that does not work"
    assert not faults


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_it_fits_any_width(browser: Browser, server: ServerProcess, faults: list[str], width: int) -> None:
    page = opened(browser, server, faults, viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not faults


CONTRAST = """() => {
  const light = rgb => {
    const parts = rgb.match(/[0-9.]+/g).slice(0, 3).map(each => {
      const share = each / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const ground = node => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!colour.endsWith(", 0)")) return colour;
    }
  };
  const worst = {};
  for (const node of document.querySelectorAll("h1, h2, p, th, td, dt, dd, caption, .state, label")) {
    const style = getComputedStyle(node);
    const pair = [light(style.color), light(ground(node))].sort((a, b) => b - a);
    worst[node.tagName] = Math.min(worst[node.tagName] ?? 99, (pair[0] + 0.05) / (pair[1] + 0.05));
  }
  return worst;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_by_everybody(browser: Browser, server: ServerProcess, faults: list[str], scheme: Any) -> None:
    """Contrast of WCAG AA; headings, heads of rows and columns, a language."""
    page = opened(browser, server, faults, color_scheme=scheme)
    worst = page.evaluate(CONTRAST)
    assert min(worst.values()) >= 4.5, json.dumps(worst)
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("h1").count() == 1
    assert page.locator("svg:not([aria-hidden=true])").count() == 0, "the table says what its bars say"
    assert all(each.locator("caption").count() == 1 for each in page.locator("table").all())
    assert page.locator("tbody tr > td:first-child").count() == 0
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement !== document.body")


def test_a_server_that_went_away_is_reported(browser: Browser, tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    write_demo_checkpoint("qwen2_vl", model)
    with serving(model, wait=False) as process:
        page = opened(browser, process, [])
        assert page.inner_text(".state") in ("starting", "warming", "serving")
        process.stop()
        page.wait_for_function("() => document.getElementById('status').innerText.startsWith('no answer since')")
