"""Chat templates: the supported language, template errors, and the limits of the sandbox."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from every import every

from srv.errors import ModelError, RequestError
from srv.server.text.chat_template import MAX_STEPS, ChatTemplate

MESSAGES: list[dict[str, object]] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def render(source: str, messages: list[dict[str, object]] = MESSAGES, *, generate: bool = True, **extra: Any) -> str:
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"}, "test model")
    return template.render(messages, add_generation_prompt=generate, extra=extra)


def refusal(source: str, **extra: Any) -> str:
    with pytest.raises(RequestError) as caught:
        render(source, **extra)
    assert (caught.value.code, caught.value.param, caught.value.status) == ("chat_template_error", "messages", 400)
    return caught.value.message


@every(
    ("source", "expected"),
    [
        ("{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}",
         "<s>[user]hi[assistant]yes"),
        ("{% for m in messages %}\n  {% if loop.first %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n", "user\n"),
        ("{% for m in messages %}{{ loop.index0 }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}", "0/2,1/2"),
        ("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "user"),
        ("{% for m in messages if m.role != 'user' %}{{ m.role }}{{ loop.length }}{% endfor %}", "assistant1"),
        ("{% for m in absent %}x{% else %}none{% endfor %}{{ absent }}", "none"),
        ("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", "role=user;content=hi;"),
        ("{% for m in messages | map(attribute='role') %}{{ m }}{{ loop.nextitem }} {% endfor %}",
         "userassistant assistant "),
        ("{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}", "yes"),
        ("{{ {'a': '<é>', 'b': [1]} | tojson }}", '{"a": "<é>", "b": [1]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro say(x, context='s') %}{{ x }}{{ context }}{% endmacro %}{{ say('a', context='b') }}", "ab"),
        ("{{ dict(a=1).a }}{{ namespace({'n': 3}, m=4).n }}", "13"),
        ("{% if tools is none and documents is none %}no tools{% endif %}", "no tools"),
        ("{{ messages[-1].content.strip().upper() }}{{ range(3) | list }}", "YES[0, 1, 2]"),
    ],
)  # fmt: skip
def test_template_language(source: str, expected: str) -> None:
    assert render(source) == expected


def test_generation_prompt_and_extra_variables_reach_the_template() -> None:
    source = "{{ add_generation_prompt }} {{ enable_thinking }} {{ tools | length }}"
    assert render(source, generate=False, enable_thinking=False, tools=[1, 2]) == "False False 2"


def test_extra_variables_cannot_replace_the_messages() -> None:
    template = ChatTemplate({"default": "{{ messages | length }}"}, {}, "test model")
    assert template.render(MESSAGES, add_generation_prompt=True, extra={"messages": []}) == "2"


def test_current_date() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


def test_raise_exception_becomes_a_request_error_with_its_message() -> None:
    assert "roles must alternate" in refusal("{{ raise_exception('roles must alternate') }}")


@every(
    "source",
    [
        "{{ messages[0].content + none }}",
        "{{ absent.field }}",
        "{{ 1 / 0 }}",
        "{{ {} | tojson(indent={}) }}",
        "{% for x in 5 %}{% endfor %}",
        "{% macro deep() %}{{ deep() }}{% endmacro %}{{ deep() }}",
    ],
)
def test_a_template_failure_is_a_request_error(source: str) -> None:
    assert "test model" in refusal(source)


@every(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ dict.update(messages[0], role='system') }}",
        "{% set ns = namespace(__html__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ lipsum(n=100000) }}",
        "{{ namespace.__init__.__globals__ }}",
    ],
)
def test_sandbox_blocks_escapes_and_changes(source: str) -> None:
    messages = [dict(message) for message in MESSAGES]
    with pytest.raises(RequestError, match=r"unsafe|not safely|undefined|no attribute|underscore"):
        render(source, messages)
    assert messages == MESSAGES


@every("source", ["{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(1) }}"])
def test_hidden_attributes_render_as_empty(source: str) -> None:
    assert render(source) == ""


@every(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in range(99999) %}{% for b in messages | map('upper') %}{% for c in range(999) %}{% endfor %}"
        "{% endfor %}{% endfor %}",
    ],
)
def test_runaway_template_is_stopped(source: str) -> None:
    begin = time.perf_counter()
    assert f"more than {MAX_STEPS} steps" in refusal(source)
    assert time.perf_counter() - begin < 30  # unbounded, these take hours


def test_the_length_of_a_range_and_of_the_prompt_is_limited() -> None:
    assert "Range too big" in refusal("{% for a in range(100001) %}{% endfor %}")
    assert "longer than" in refusal("{% set s = 'x' * 100000 %}{% for a in range(200) %}{{ s }}{% endfor %}")


def test_step_limit_applies_per_rendering() -> None:
    template = ChatTemplate({"default": "{% for a in range(90000) %}{% endfor %}done"}, {}, "test model")
    results = {template.render(MESSAGES, add_generation_prompt=True, extra={}) for _ in range(15)}
    assert results == {"done"}


def test_template_that_is_not_jinja_is_refused_at_load_with_the_line() -> None:
    with pytest.raises(ModelError, match="line 2") as caught:
        ChatTemplate({"default": "a\n{% if %}"}, {}, "test model")
    assert caught.value.code == "bad_chat_template"


def test_several_templates_without_a_default_are_refused() -> None:
    template = ChatTemplate({"a": "A", "b": "B"}, {}, "test model")
    with pytest.raises(RequestError, match=r"\['a', 'b'\] and no default one"):
        template.render(MESSAGES, add_generation_prompt=True, extra={})
    assert ChatTemplate({"a": "A"}, {}, "m").render(MESSAGES, add_generation_prompt=True, extra={}) == "A"
