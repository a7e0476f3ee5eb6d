"""The operators' page in a real headless browser (Debian: apt-get install chromium-headless-shell)."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from tests.serving.operators_port import operators_port
from tests.serving.test_top import with_traffic

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    assert found, f"none of {', '.join(BROWSERS)} is on the path; on Debian: apt-get install chromium-headless-shell"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.slow  # needs a browser, which setup does not install
def test_the_page_shows_tenants_adapters_jobs_and_live_figures(browser: Browser, tmp_path: Path) -> None:
    parts, requests = with_traffic(tmp_path)
    with operators_port(parts.core) as (url, loop):

        def ask(**fields: object) -> None:
            asyncio.run_coroutine_threadsafe(parts.complete(**fields), loop).result(10)

        for fields in requests:
            ask(**fields)
        page = browser.new_page()
        problems: list[str] = []
        requested: list[str] = []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requested.append(request.url))
        page.goto(url)
        expect(page.locator("#state")).to_be_hidden()
        page.fill("#key", "wrong")
        page.click("#login button")
        expect(page.locator("#status")).to_have_text("incorrect API key provided")
        expect(page.locator("#state")).to_be_hidden()
        problems.clear()  # the browser reports the 401 itself
        page.fill("#key", "admin-key")
        page.click("#login button")
        expect(page.locator("#state")).to_be_visible()
        expect(page.locator("#login")).to_be_hidden()
        acme = page.locator("#tenants tbody tr", has_text="acme").locator("td")
        expect(acme.nth(1)).to_have_text("3")
        expect(acme.nth(2)).to_have_text("1")
        expect(acme.nth(7)).to_have_text("250.0 ms")
        tone = page.locator("#adapters tbody tr", has_text="tone").locator("td")
        expect(tone.nth(0)).to_have_text("(shared)")
        expect(tone.nth(5)).to_have_text("base")
        reward = page.locator(".job figcaption", has_text="reward")
        expect(reward).to_have_text("reward: 1.00")
        points = page.locator(".job polyline").first.get_attribute("points")
        assert points is not None
        assert [float(pair.split(",")[1]) for pair in points.split()] == [97.0, 73.5, 50.0, 26.5, 3.0]
        ask()  # what happens now shows without a reload
        expect(acme.nth(1)).to_have_text("4", timeout=10_000)
        page.reload()  # the key is kept for the tab
        expect(page.locator("#state")).to_be_visible()
        assert problems == []
        assert {request.split("/")[2] for request in requested} == {url.split("/")[2]}  # no other host is asked
        page.close()


def test_the_page_needs_no_key_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    parts, _ = with_traffic(tmp_path)
    with operators_port(parts.core) as (url, _loop):
        for path, kind in (("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")):
            answer = httpx.get(url + path)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(kind)
            assert answer.headers["content-security-policy"].startswith("default-src 'none'")
            assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
            assert "https://" not in answer.text
            assert "innerHTML" not in answer.text
        assert httpx.get(f"{url}/page.html").status_code == 404
