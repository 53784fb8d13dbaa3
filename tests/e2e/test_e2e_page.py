"""The built-in page in a real browser: chat, load and machine, behind a proxy's path and an API key."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from e2e_support import Server, launched

from srv_matrix.pytest_plugin import covers

if TYPE_CHECKING:
    from site_browser import Browser

pytestmark = pytest.mark.e2e
KEY = "a key for tests"


class KeyedServer(Server):
    def client(self, **more: Any) -> httpx.Client:
        return super().client(headers={"authorization": f"Bearer {KEY}"}, **more)


@pytest.fixture(scope="module")
def common(letters_model: Path, srv_device: str) -> tuple[str, ...]:
    return ("--device", srv_device, "--model-path", str(letters_model), "--load-format", "dummy")


@pytest.fixture(scope="module")
def server(common: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("page") / "log"
    keyed = KeyedServer((*common, "--root-path", "/llm", "--api-key", KEY), log)
    try:
        keyed.start()
        yield keyed
    finally:
        if keyed.process is not None and keyed.process.poll() is None:
            keyed.kill()


@pytest.mark.slow
@covers("ui=true", "ui=false", *(f"endpoint:GET {path}" for path in ("/", "/ui/app.js", "/ui/style.css", "/ui/state")))
def test_ui(server: Server, common: tuple[str, ...], tmp_path: Path) -> None:
    """The page's files need no key and load nothing from elsewhere; what they show needs one. --no-ui removes it."""
    with launched(tmp_path / "log", *common, "--no-ui") as without:
        assert [without.get(path).status_code for path in ("/ui/app.js", "/ui/state")] == [404, 404]
        assert without.get("/").status_code in (404, 405)
    for path, kind in (("/", "text/html"), ("/ui/app.js", "text/javascript"), ("/ui/style.css", "text/css")):
        response = httpx.get(f"{server.base}/llm{path}")
        assert (response.status_code, response.headers["content-type"].partition(";")[0]) == (200, kind)
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "://" not in response.text
    assert httpx.head(f"{server.base}/").status_code == 200
    assert httpx.get(f"{server.base}/ui/state").status_code == 401
    state = server.get("/ui/state").json()
    assert (state["model"], state["chat"], state["load"]["running"]) == ("letters", True, 0)
    info = server.get("/server_info").json()
    assert state["machine"]["cell"] == f"{info['platform']} / {info['device']['variant']}"


@pytest.fixture(scope="module")
def window(server: Server) -> Iterator[Browser]:
    lacks = [program for program in ("chromium", "chromedriver") if shutil.which(program) is None]
    if lacks or importlib.util.find_spec("selenium") is None:
        reason = "there is no browser; run apt-get install chromium chromium-driver and make env"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    from site_browser import Browser

    browser = Browser(server.base)
    try:
        yield browser
    finally:
        browser.close()


@pytest.fixture
def browser(window: Browser) -> Iterator[Browser]:
    """A window with the page, which has the key. Only refusals of requests may be in its console."""
    window.emulate()
    window.open("/llm/")
    window.wait("document.getElementById('status').textContent !== 'connecting'")
    if not window.run("return document.getElementById('key-section').hidden"):
        window.find("#key").send_keys(KEY)
        window.click("#key-form button")
    window.wait("document.getElementById('status').textContent === 'ready'")
    yield window
    window.wait("!document.getElementById('send').disabled")
    assert [line for line in window.console() if " 401 " not in line and " 400 " not in line] == []


def ask(browser: Browser, prompt: str, tokens: int) -> None:
    field = browser.find("#max-tokens")
    field.clear()
    field.send_keys(str(tokens))
    browser.find("#prompt").send_keys(prompt)
    browser.press(browser.keys.ENTER)


@pytest.mark.proof(minutes=0.2)
@pytest.mark.xdist_group("page")
class TestBrowser:
    def test_a_conversation(self, browser: Browser, server: Server) -> None:
        """The answer is that of the API, and its tokens are counted."""
        browser.click("#clear")
        browser.find("#temperature").send_keys("0")
        ask(browser, "a b", 8)
        browser.wait("document.querySelectorAll('.message .who')[1]?.textContent.includes('8 tokens')")
        body = {"messages": [{"role": "user", "content": "a b"}], "temperature": 0, "max_tokens": 8}
        expected = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
        assert browser.texts(".message .text") == ["a b", expected.strip()]
        ask(browser, "c", 4)
        browser.wait("document.querySelectorAll('.message .who')[3]?.textContent.includes('4 tokens')")

    def test_markup_is_shown_as_text(self, browser: Browser) -> None:
        browser.click("#clear")
        ask(browser, "<img src=x onerror=alert(1)>", 1)
        browser.wait("document.querySelectorAll('.message').length === 2")
        assert browser.texts(".message .text")[0] == "<img src=x onerror=alert(1)>"
        assert browser.run("return document.querySelectorAll('.message img').length") == 0

    def test_stopping_ends_the_request(self, browser: Browser, server: Server) -> None:
        browser.click("#clear")
        ask(browser, "a", 60_000)
        browser.wait("document.querySelectorAll('.message .text')[1]?.textContent.length > 20")
        browser.wait("/Running\\n1/.test(document.getElementById('load').innerText)")
        browser.click("#stop")
        browser.wait("document.querySelectorAll('.message .who')[1].textContent.includes('stopped')")
        server.wait_pages_back()
        assert server.metrics()["srv_requests_running"] == 0

    def test_a_refusal_is_shown(self, browser: Browser) -> None:
        browser.click("#clear")
        ask(browser, "a", 900_000)
        browser.wait("document.querySelector('.message .who.error') !== null")
        assert "max_tokens" in browser.texts(".message .who.error")[0]

    def test_load_and_machine(self, browser: Browser, server: Server) -> None:
        cell = server.get("/ui/state").json()["machine"]["cell"]
        assert cell in browser.texts("#machine")[0]
        assert "attention_backend" in browser.texts("#machine")[0]
        browser.wait("/KV cache in use\\n\\d+ %/.test(document.getElementById('load').innerText)")
        browser.wait("document.querySelector('#history polyline').getAttribute('points').includes(',')")

    def test_contrast_and_phones(self, browser: Browser) -> None:
        for scheme in ("light", "dark"):
            browser.emulate(scheme=scheme)
            checked, low = browser.low_contrast("body")
            assert (checked > 20, low) == (True, [])
        browser.emulate((390, 844))
        assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
