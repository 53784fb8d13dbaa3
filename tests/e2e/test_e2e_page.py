"""The built-in page in a real browser: chat, load and machine, behind a proxy's path and an API key."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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
    assert state["context"] == server.get("/v1/models").json()["data"][0]["max_model_len"]
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


def open_settings(browser: Browser) -> None:
    if not browser.run("return document.getElementById('settings').open"):
        browser.click("#settings summary")


def ask(browser: Browser, prompt: str, tokens: int) -> None:
    open_settings(browser)
    field = browser.find("#max-tokens")
    field.clear()
    field.send_keys(str(tokens))
    browser.find("#prompt").send_keys(prompt)
    browser.press(browser.keys.ENTER)


MARKDOWN = """# Title

Some **bold** and *slanted* text, `x*y*z`, snake_case_name, 2 * 3 * 4, [a link](https://example.org/a) and
https://example.com. [bad](javascript:alert(1))

- one
  - nested

1. first
2. second

```python
def f(x):
    return '<b>'
```

| a | b |
|---|---|
| 1 | 2 |

> quoted

<img src=x onerror=alert(1)><script>alert(1)</script>"""


def show_answer(browser: Browser, text: str) -> None:
    """Open the page with a chat that this browser has kept, in which the model answered with this text."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]
    chat = [{"id": "1", "title": "kept", "system": "", "messages": messages}]
    browser.run("localStorage.setItem('srv-chats /llm', arguments[0])", json.dumps(chat))
    browser.open("/llm/")
    browser.wait("document.querySelectorAll('.message').length === 2")


def stored_chats(browser: Browser) -> list[dict[str, Any]]:
    return list(json.loads(browser.run("return localStorage.getItem('srv-chats /llm')") or "[]"))


@contextmanager
def other_tab(browser: Browser) -> Iterator[None]:
    """A second tab with the page, which has no key, in front of the first one."""
    first = browser.driver.current_window_handle
    browser.driver.switch_to.new_window("tab")
    try:
        browser.open("/llm/")
        browser.wait("document.getElementById('status').textContent !== 'connecting'")
        yield
    finally:
        browser.driver.close()
        browser.driver.switch_to.window(first)


@pytest.mark.proof(minutes=0.4)
@pytest.mark.xdist_group("page")
class TestBrowser:
    def test_a_conversation(self, browser: Browser, server: Server) -> None:
        """The answer is that of the API, and its tokens are counted."""
        browser.click("#clear")
        open_settings(browser)
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
        assert "prefill attention" in browser.texts("#machine")[0]
        reason = "document.querySelector('#machine details p').checkVisibility()"
        assert not browser.run(f"return {reason}")
        browser.click("#machine summary")
        assert browser.run(f"return {reason}")
        assert browser.texts("#model") == ["letters"]
        assert "tokens of context" in browser.texts("#context")[0]
        browser.wait("/KV cache in use\\n\\d+ %/.test(document.getElementById('load').innerText)")
        browser.wait("document.querySelector('#history polyline').getAttribute('points').includes(',')")

    def test_markdown_of_an_answer(self, browser: Browser) -> None:
        """It becomes elements of the page; what could run or load something stays text."""
        show_answer(browser, MARKDOWN)
        answer = ".message.assistant .text"
        for selector, text in (
            ("h3", "Title"),
            ("strong", "bold"),
            ("em", "slanted"),
            ("p > code", "x*y*z"),
            ("li li", "nested"),
            ("ol > li", "first"),
            ("pre code", "def f(x):\n    return '<b>'"),
            ("td", "1"),
            ("blockquote", "quoted"),
        ):
            assert browser.run(f"return document.querySelector('{answer} {selector}')?.textContent.trim()") == text
        links = browser.run(f"return [...document.querySelectorAll('{answer} a')].map((a) => a.getAttribute('href'))")
        assert links == ["https://example.org/a", "https://example.com"]
        assert browser.run(f"return document.querySelectorAll('{answer} :is(img, script, iframe, b)').length") == 0
        shown = browser.texts(answer)[0]
        for part in ("<img src=x onerror=alert(1)>", "[bad](javascript:alert(1))", "snake_case_name", "2 * 3 * 4"):
            assert part in shown

    @pytest.mark.parametrize("mark", ["**", "`", "[", "> ", "_a", "* ", "|-", "#", "~~~\n", "1. \n"])
    def test_marks_that_never_end_are_shown_in_time(self, mark: str, browser: Browser) -> None:
        """The wait for the page would time out."""
        show_answer(browser, mark * 4000)
        assert browser.run("return document.querySelector('.message.assistant .text').childNodes.length") > 0

    def test_chats_are_kept_in_this_browser(self, browser: Browser) -> None:
        browser.click("#clear")
        ask(browser, "a b c", 3)
        browser.wait("document.querySelectorAll('.message .who')[1]?.textContent.includes('3 tokens')")
        before = browser.texts(".message .text")
        browser.open("/llm/")
        browser.wait("document.querySelectorAll('.message').length === 2")
        assert browser.texts(".message .text") == before
        browser.click("#regenerate")
        browser.wait("document.querySelectorAll('.message .who')[1]?.textContent.includes('tokens')")
        assert browser.texts(".message .text")[0] == "a b c"
        assert browser.run("return document.querySelectorAll('.message').length") == 2
        browser.click("#chats [aria-label^=Delete]")
        assert browser.run("return document.querySelectorAll('.message').length") == 0

    def test_a_chat_that_is_deleted_while_it_is_answered_stays_deleted(self, browser: Browser, server: Server) -> None:
        """The request ends, whether it is deleted here or in another tab."""
        browser.run("localStorage.clear()")
        browser.open("/llm/")
        for elsewhere in (False, True):
            browser.wait("document.getElementById('status').textContent === 'ready'")
            ask(browser, "a", 60_000)
            browser.wait("document.querySelectorAll('.message .text')[1]?.textContent.length > 20")
            if elsewhere:
                with other_tab(browser):
                    browser.click("#chats [aria-label^=Delete]")
            else:
                browser.click("#chats .chosen-chat")  # it is the one that is shown: nothing changes
                assert not browser.run("return document.getElementById('stop').hidden")
                browser.click("#chats [aria-label^=Delete]")
            browser.wait("!document.getElementById('send').disabled")
            server.wait_pages_back()
            assert server.metrics()["srv_requests_running"] == 0
            assert (stored_chats(browser), browser.texts(".message")) == ([], [])

    def test_what_two_tabs_add_to_one_chat_is_kept(self, browser: Browser) -> None:
        show_answer(browser, "first")
        browser.wait("document.getElementById('status').textContent === 'ready'")
        ask(browser, "asked here", 60_000)
        browser.wait("document.querySelectorAll('.message .text')[3]?.textContent.length > 20")
        with other_tab(browser):
            assert browser.texts(".message .text")[2:] == ["asked here"]
            ask(browser, "asked there", 1)
            browser.wait("document.querySelectorAll('.message .who.error').length === 1")  # it has no key
            chats = stored_chats(browser)
            chats[0]["messages"].append({"role": "user", "content": "asked there"})
            browser.run("localStorage.setItem('srv-chats /llm', arguments[0])", json.dumps(chats))
        browser.click("#stop")
        browser.wait("!document.getElementById('send').disabled")
        here, there = stored_chats(browser)
        assert [message["content"] for message in here["messages"][:3]] == ["a", "first", "asked here"]
        assert [message["role"] for message in here["messages"]] == ["user", "assistant"] * 2
        assert [message["content"] for message in there["messages"]] == ["a", "first", "asked here", "asked there"]
        with other_tab(browser):
            chats[0]["messages"] = [{"role": "user", "content": "changed"}]
            chats[0]["id"] = here["id"]
            browser.run("localStorage.setItem('srv-chats /llm', arguments[0])", json.dumps(chats))
        browser.wait("document.querySelectorAll('.message').length === 1")
        assert browser.texts(".message .text") == ["changed"]

    def test_an_answer_that_cannot_be_regenerated_stays(self, browser: Browser) -> None:
        show_answer(browser, "first")
        browser.wait("document.getElementById('status').textContent === 'ready'")
        open_settings(browser)
        browser.find("#max-tokens").send_keys("900000")
        browser.click("#regenerate")
        browser.wait("document.querySelector('.message .who.error') !== null")
        assert [message["content"] for message in stored_chats(browser)[0]["messages"]] == ["a", "first"]

    def test_the_system_prompt_is_sent_before_the_messages(self, browser: Browser) -> None:
        browser.run(
            "const real = window.fetch; window.bodies = [];"
            "window.fetch = (path, more) => { if (more.body) window.bodies.push(more.body); return real(path, more); };"
        )
        browser.click("#clear")
        open_settings(browser)
        browser.find("#system").send_keys("a a")
        ask(browser, "b", 2)
        browser.wait("document.querySelectorAll('.message .who')[1]?.textContent.includes('2 tokens')")
        (body,) = browser.run("return window.bodies.map(JSON.parse)")
        assert body["messages"] == [{"role": "system", "content": "a a"}, {"role": "user", "content": "b"}]

    def test_contrast_and_sizes(self, browser: Browser) -> None:
        """Nothing is wider than the window, and the box for the next message follows the last one."""
        show_answer(browser, MARKDOWN)
        for scheme in ("light", "dark"):
            browser.emulate(scheme=scheme)
            checked, low = browser.low_contrast("body")
            assert (checked > 20, low) == (True, [])
        for size in ((390, 844), (1280, 900), (1920, 1080)):
            browser.emulate(size)
            assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
        show_answer(browser, "short")
        gap = browser.run(
            "return document.getElementById('prompt').getBoundingClientRect().top"
            " - document.querySelector('.message.assistant').getBoundingClientRect().bottom"
        )
        assert gap < 40
