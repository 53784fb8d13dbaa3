"""What a model's chat template can do to the server that renders it: nothing but fail with a clear error."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from every import every

from srv.errors import ModelError, RequestError
from srv.io.bounded_process import WorkLimits
from srv.server.text.template_process import TemplateProcess

MESSAGES: list[dict[str, object]] = [{"role": "user", "content": "hi é"}]
LIMITS = WorkLimits(processor_seconds=0.3, seconds=20, memory_bytes=128 * 2**20)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ enable_thinking }}"
)


def load(source: str, limits: WorkLimits = LIMITS) -> TemplateProcess:
    return TemplateProcess({"default": source}, {"bos_token": "<s>"}, "test model", limits)


def render(template: TemplateProcess, **extra: Any) -> str:
    return template.render(MESSAGES, add_generation_prompt=True, extra=extra)


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "template_child" in " ".join(child.cmdline())]


@pytest.fixture
def several() -> Iterator[TemplateProcess]:
    """One template with a hostile statement for each value of `kind`."""
    statements = {
        "power": "{{ (messages | length * 10) ** (10 ** kind_size) }}",
        "memory": "{{ ('x' * 10 ** kind_size) | length }}",
        "filter": "{{ (range(kind_size) | list | join(',') * 40) | wordwrap(1) | length }}",
        "truncate": "{{ messages[0].content | truncate(-1) }}",
        "surrogate": "{{ '\\ud800' }}",
        "fine": "fine {{ messages[0].content }}",
    }
    source = "".join(
        f"{{% {'if' if index == 0 else 'elif'} kind == '{kind}' %}}{statement}"
        for index, (kind, statement) in enumerate(statements.items())
    )
    template = load(source + "{% endif %}")
    yield template
    template.close()


def test_a_conversation_is_rendered_with_its_variables() -> None:
    template = load(CHATML)
    expected = "<|im_start|>user\nhi é<|im_end|>\n<|im_start|>assistant\n"
    assert render(template, enable_thinking=False) == expected + "False"
    with pytest.raises(RequestError, match=r"tojson|Undefined"):
        render(load("{{ absent | tojson }}"))
    template.close()


def test_what_no_sandbox_limits_is_an_error_and_the_next_request_is_served(several: TemplateProcess) -> None:
    for kind, size, said in (
        ("power", 9, "0.3 seconds of processor time|memory"),
        ("memory", 10, "memory"),
        ("filter", 90000, "seconds of processor time|memory"),
        ("truncate", 0, "AssertionError"),
        ("surrogate", 0, "surrogates"),
    ):
        with pytest.raises(RequestError, match=said) as caught:
            render(several, kind=kind, kind_size=size)
        assert (caught.value.code, caught.value.status) == ("chat_template_error", 400), kind
        assert "test model" in caught.value.message
        assert render(several, kind="fine") == "fine hi é"


@every(
    ("source", "said"),
    [
        ("{{ 10 ** (10 ** 9) }}", "processor time|memory"),
        ("{{ 'x' * 10 ** 11 }}", None),  # not folded, or refused: see below
        ("{% for a in messages %}" * 30 + "{% endfor %}" * 30, "cannot be compiled"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled"),
        ("a\n{% if %}", "line 2"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_refused_at_load(source: str, said: str | None) -> None:
    if said is None:
        with pytest.raises((ModelError, RequestError), match="memory"):
            render(load(source))
        return
    with pytest.raises(ModelError, match=said) as caught:
        load(source)
    assert caught.value.code == "bad_chat_template"


def test_a_process_that_is_stopped_or_killed_is_replaced() -> None:
    template = load(CHATML, WorkLimits(seconds=2))
    (child,) = children()
    child.send_signal(signal.SIGTERM)  # a signal to the group of the server does not end it
    child.send_signal(signal.SIGINT)
    assert render(template)
    child.send_signal(signal.SIGSTOP)
    with pytest.raises(RequestError, match=r"machine is busy: it took more than 2 seconds; retry later") as caught:
        render(template, more="x" * 200_000)  # more than a pipe holds
    assert (caught.value.code, caught.value.status) == ("chat_template_busy", 503)
    template_again = TemplateProcess({"default": CHATML}, {}, "test model")
    for process in children():
        process.kill()
    with pytest.raises(RequestError, match="status -9") as caught:
        render(template_again)
    assert caught.value.status == 503
    assert render(template_again)
    template_again.close()
    template.close()
    assert not children()


def test_closing_ends_a_rendering_that_runs() -> None:
    template = load("{{ (messages | length * 10) ** (10 ** 9) }}", WorkLimits(processor_seconds=60, memory_bytes=2**32))
    failed: list[str] = []

    def work() -> None:
        try:
            render(template)
        except RequestError as error:
            failed.append(error.message)

    thread = threading.Thread(target=work)
    thread.start()
    (child,) = children()
    deadline = time.monotonic() + 10
    while child.cpu_times().user < 0.3 and time.monotonic() < deadline:
        time.sleep(0.01)
    template.close()
    thread.join(10)
    assert not thread.is_alive()
    assert failed


def test_a_closed_template_renders_no_more() -> None:
    template = load(CHATML)
    template.close()
    for _ in range(2):
        with pytest.raises(RequestError, match=r"ended|shutting down"):
            render(template)


def test_a_template_that_is_dropped_leaves_no_process() -> None:
    before = {child.pid for child in children()}
    template = load(CHATML)
    (pid,) = {child.pid for child in children()} - before
    del template
    assert not psutil.pid_exists(pid)


def test_templates_of_requests_are_rendered_within_the_limits_and_end_with_their_request() -> None:
    """Each with the special tokens of the model; one that ends the process does not harm the next."""
    requested = TemplateProcess({}, {"bos_token": "<s>"}, "the request", LIMITS, starts=False)
    assert children() == []

    def of(source: str) -> str:
        return requested.render(MESSAGES, add_generation_prompt=True, extra={}, source=source)

    for _ in range(2):
        assert of("{{ bos_token }}{{ messages[0].content }}") == "<s>hi é"
        for source, said, param in (
            ("a\n{% if %}", "chat_template is refused: it is not valid Jinja: line 2", "chat_template"),
            ("{{ raise_exception('no') }}", "the chat template of the request: no", "messages"),
            ("{{ messages.__class__.__mro__ }}", "the chat template of the request", "messages"),
            ("{{ 10 ** (10 ** 9) }}", "0.3 seconds of processor time|memory", "messages"),
            ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "steps", "messages"),
        ):
            with pytest.raises(RequestError, match=said) as caught:
                of(source)
            assert (caught.value.param, caught.value.status) == (param, 400), source
    many = [of(f"{number}") for number in range(40)]
    assert many == [str(number) for number in range(40)]
    requested.close()
    assert children() == []
