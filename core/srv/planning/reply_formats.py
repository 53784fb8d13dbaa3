"""Why a launch cannot use the reply formats that other distributions add: faulty, or claimed by two. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from srv.args.statement import Resolved
from srv.errors import ModelError, PluginError, Rejection, as_sentence
from srv.models.chat_templates import chat_templates
from srv.reply.formats import NONE, REASONING_EXTENSIONS, TOOL_EXTENSIONS, choose


def unusable_reply_formats(resolved: Resolved, model: Path | None) -> Iterator[Rejection]:
    """What is wrong with the formats of tool calls, then with those of reasoning.

    `model`: None if its files are not on this machine; then two formats that fit its chat template are not found.
    """
    if not (TOOL_EXTENSIONS.names() or REASONING_EXTENSIONS.names()):
        return
    server, templates = resolved.config.server, _templates(resolved, model)
    choices = {
        "tool_call_parser": (server.tool_call_parser, NONE),
        "reasoning_parser": (NONE, server.reasoning_parser),
    }
    for argument, names in choices.items():
        try:
            choose(*names, templates)
        except PluginError as error:
            set_by = resolved.provenance[argument]
            reason = f"plugin {error.distribution}: {error.member}: {error.reason}"
            remedy = as_sentence(error.remedy)
            yield Rejection("plugin_refused", argument, set_by.value, set_by.owner, reason, remedy)


def _templates(resolved: Resolved, model: Path | None) -> tuple[str, ...]:
    """The chat templates, as far as they can be read; the launch says what is wrong with the others."""
    options = resolved.config.model
    if model is None or options.skip_tokenizer_init:
        return ()
    tokenizer = None if options.tokenizer_path is None else Path(options.tokenizer_path).expanduser()
    override = None if options.chat_template is None else str(options.chat_template)
    try:
        return tuple(chat_templates(model, tokenizer, override).values())
    except (ModelError, OSError):
        return ()
