"""Chat templates: the Jinja template of a model, which turns messages into prompt text, rendered in a sandbox.

Owns the template language (that of transformers: trim_blocks, lstrip_blocks, loop controls, `raise_exception`,
`strftime_now`, `tojson`, `{% generation %}`) and its limits. Must not know tokens or HTTP.

A template comes with a model or with a request, and is not trusted. Jinja's immutable sandbox hides attributes that
begin with an underscore and prevents changes to the arguments. Also limited: loop iterations plus calls (`MAX_STEPS`
per rendering), the length of a `range` (100,000, Jinja's own limit), recursion depth (Python's), and the length of the
result (`MAX_CHARACTERS`). What this cannot limit, the time and memory of a single operation, is limited by the process
in which templates are rendered (`srv.server.text.template_process`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from srv.errors import ModelError, RequestError

MAX_STEPS = 300_000
MAX_CHARACTERS = 16_000_000
_steps_left: ContextVar[list[int]] = ContextVar("steps left for the current rendering")


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _CountedLoops(CodeGenerator):
    """Compiles `for x in items` as `for x in environment.counted(items)`."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        counted = nodes.EnvironmentAttribute("counted", lineno=node.lineno)
        node.iter = nodes.Call(counted, [node.iter], [], None, None, lineno=node.lineno)
        super().visit_For(node, frame)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a step limit per rendering."""

    code_generator_class = _CountedLoops

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.globals |= {"dict": _make_dict, "namespace": _Namespace}
        del self.globals["lipsum"]

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # As in Jinja: the underscores avoid collisions with keyword arguments of a template.
        __self.count_steps(1)
        return super().call(__context, __obj, *args, **kwargs)

    def counted(self, items: Any) -> Any:
        """Count one step per item: at once if their number is known, else one by one."""
        if hasattr(items, "__len__"):
            self.count_steps(len(items))
            return items
        return self._count_each(items)

    def _count_each(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.count_steps(1)
            yield item

    def count_steps(self, steps: int) -> None:
        budget = _steps_left.get()
        budget[0] -= steps
        if budget[0] < 0:
            raise SecurityError(f"the template needs more than {MAX_STEPS} steps (loop iterations and calls)")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_dict(*items: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict` as a function: with the type, `dict.update(message, ...)` could change a message."""
    return dict(*items, **kwargs)


class _Namespace(Namespace):
    """`namespace` without names that begin with an underscore, which could be special methods."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *items = args  # not a named parameter, so that a template may use any name
        attributes = dict(*items, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a name in a namespace must not begin with an underscore, but {name!r} does")


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _Faulty(Exception):
    """`reason`: why a template cannot be compiled, a clause about it. `remedy`: what it would have to be."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


def _compiled(environment: _Sandbox, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise _Faulty(f"is not valid Jinja: line {error.lineno}: {error.message}", "valid") from error
    except Exception as error:  # of Python's own compiler: nested too deeply, or too large
        raise _Faulty(f"cannot be compiled ({type(error).__name__}: {error})", "simpler") from error


class ChatTemplate:
    """The chat templates of one model, compiled.

    `sources`: template text by name; if there are several, "tool_use" is used for requests with tools and "default"
    for the others. `special_tokens`: text by role ("bos_token" -> "<s>"). `origin` names the model in errors. Raises
    ModelError (bad_chat_template) for a template that is not valid Jinja.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], origin: str) -> None:
        environment = _Sandbox()
        self._special_tokens, self._origin = dict(special_tokens), origin
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = _compiled(environment, source)
            except _Faulty as fault:
                remedy = f"Give a {fault.remedy} template with --chat-template FILE"
                reason = f"its chat template {name!r} {fault.reason}"
                raise ModelError("bad_chat_template", origin, reason, remedy) from fault

    @classmethod
    def of_request(cls, source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Raises RequestError for a template that is not valid Jinja."""
        template = cls({}, special_tokens, "the request")
        try:
            template._templates["default"] = _compiled(_Sandbox(), source)
        except _Faulty as fault:
            message = f"chat_template is refused: it {fault.reason}; send a {fault.remedy} one"
            raise RequestError(message, code="invalid_value", param="chat_template") from fault
        return template

    def render(
        self, messages: list[dict[str, object]], *, add_generation_prompt: bool, extra: Mapping[str, object]
    ) -> str:
        """Render the prompt text. `extra`: more template variables (tools, documents, enable_thinking, ...).

        Raises RequestError with the template's own message if it rejects the messages or fails on them.
        """
        template = self._select(bool(extra.get("tools")))
        variables = {"tools": None, "documents": None, **self._special_tokens, **extra}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        token = _steps_left.set([MAX_STEPS])
        try:
            text = _join(template.generate(variables))
            text.encode()  # a template could write a lone surrogate
            return text
        except jinja2.TemplateError as error:
            raise self._template_error(error.message or type(error).__name__) from error
        except MemoryError:
            raise self._template_error("it needs more memory than a template may have") from None
        except Exception as error:
            raise self._template_error(f"it fails on these messages ({type(error).__name__}: {error})") from error
        finally:
            _steps_left.reset(token)

    def _select(self, with_tools: bool) -> jinja2.Template:
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        message = f"{self._origin} has the chat templates {sorted(self._templates)} and no default one; "
        raise RequestError(message + "start the server with --chat-template FILE", code="no_chat_template")

    def _template_error(self, message: str) -> RequestError:
        text = f"the chat template of {self._origin}: {message}"
        return RequestError(text, code="chat_template_error", param="messages")


def _join(parts: Iterable[str]) -> str:
    joined: list[str] = []
    length = 0
    for part in parts:
        length += len(part)
        if length > MAX_CHARACTERS:
            raise SecurityError(f"the prompt is longer than {MAX_CHARACTERS} characters")
        joined.append(part)
    return "".join(joined)
