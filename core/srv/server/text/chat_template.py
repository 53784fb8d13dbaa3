"""Chat templates: a model's own Jinja program that turns messages into prompt text, run in a sandbox.

Owns the language that templates may use (that of transformers: trim_blocks, lstrip_blocks, loop controls,
`raise_exception`, `strftime_now`, `tojson`, `{% generation %}`) and its limits. Must not know tokens or HTTP.

A template comes with a model and is not trusted. Jinja's immutable sandbox gives it no attributes that begin
with an underscore and lets it change nothing it was handed. Bounded besides: loop passes and calls together
(`MAX_STEPS` a rendering), one `range` (100,000, Jinja's own limit), depth of recursion (Python's), and the
length of the result (`MAX_CHARACTERS`). Not bounded: the size of a single string that it builds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
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
_steps_left: ContextVar[list[int]] = ContextVar("steps that the running rendering may still take")


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; for a server it only encloses."""

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
    """Jinja's sandbox with a budget of steps for each rendering."""

    code_generator_class = _CountedLoops

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.globals |= {"dict": _make_dict, "namespace": _Namespace}
        del self.globals["lipsum"]

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The names are Jinja's: a template's keyword arguments must not collide with them.
        __self.spend(1)
        return super().call(__context, __obj, *args, **kwargs)

    def counted(self, items: Any) -> Any:
        """`items`, paid for: at once if their number is known, else one by one."""
        if hasattr(items, "__len__"):
            self.spend(len(items))
            return items
        return self._pay_each(items)

    def _pay_each(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(1)
            yield item

    def spend(self, steps: int) -> None:
        left = _steps_left.get()
        left[0] -= steps
        if left[0] < 0:
            raise SecurityError(f"the template took more than {MAX_STEPS} steps (loop passes and calls)")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter would escape what is special in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_dict(*items: Any, **named: Any) -> dict[Any, Any]:
    """`dict` as a function: the type itself would let `dict.update(message, ...)` change what is immutable."""
    return dict(*items, **named)


class _Namespace(Namespace):
    """`namespace` without names that begin with an underscore, which Python might take for special methods."""

    def __init__(*args: Any, **named: Any) -> None:
        self, *items = args  # not a parameter's name, so that a template may use any
        attributes = dict(*items, **named)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may have no name that begins with an underscore, such as {name!r}")


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    """The chat templates of one model, compiled.

    `sources`: text by name; with several, "tool_use" serves requests that bring tools, "default" the others.
    `roles`: special tokens that templates name ("bos_token" -> "<s>"). `origin` says in errors whose they
    are. Raises ModelError (bad_chat_template) for one that is not Jinja.
    """

    def __init__(self, sources: Mapping[str, str], roles: Mapping[str, str], origin: str) -> None:
        environment = _Sandbox()
        self._roles, self._origin = dict(roles), origin
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                reason = f"its chat template {name!r} is not valid Jinja: line {error.lineno}: {error.message}"
                remedy = "Give a working one with --chat-template FILE"
                raise ModelError("bad_chat_template", origin, reason, remedy) from error

    def render(
        self, messages: list[dict[str, object]], *, add_generation_prompt: bool, extra: Mapping[str, object]
    ) -> str:
        """The prompt text. `extra`: further variables for the template (tools, documents, enable_thinking, ...).

        Raises RequestError with the template's own message if it refuses the messages or fails on them.
        """
        template = self._choose(bool(extra.get("tools")))
        variables = {"tools": None, "documents": None, **self._roles, **extra}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        token = _steps_left.set([MAX_STEPS])
        try:
            return _join(template.generate(variables))
        except jinja2.TemplateError as error:
            raise self._refused(error.message or type(error).__name__) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise self._refused(f"it fails on these messages ({type(error).__name__}: {error})") from error
        finally:
            _steps_left.reset(token)

    def _choose(self, with_tools: bool) -> jinja2.Template:
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        message = f"{self._origin} has the chat templates {sorted(self._templates)} and no default; "
        raise RequestError(message + "start the server with --chat-template FILE", code="no_chat_template")

    def _refused(self, message: str) -> RequestError:
        text = f"the chat template of {self._origin}: {message}"
        return RequestError(text, code="chat_template_error", param="messages")


def _join(parts: Iterable[str]) -> str:
    kept: list[str] = []
    length = 0
    for part in parts:
        length += len(part)
        if length > MAX_CHARACTERS:
            raise SecurityError(f"the prompt is longer than {MAX_CHARACTERS} characters")
        kept.append(part)
    return "".join(kept)


def read_override(value: str) -> dict[str, str]:
    """`--chat-template`: the path of a Jinja file, or of a JSON file with a `chat_template`.

    Raises ModelError with code not_found or bad_chat_template.
    """
    path = Path(value).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = f"--chat-template names it and it cannot be read ({error})"
        raise ModelError("not_found", value, reason, "Give the path of a Jinja file") from error
    if path.suffix != ".json":
        return {"default": text}
    try:
        return {"default": str(json.loads(text)["chat_template"])}
    except (ValueError, KeyError, TypeError) as error:
        reason = "--chat-template names it and it is no JSON object with a field chat_template"
        raise ModelError("bad_chat_template", value, reason, "Give a Jinja file instead") from error
