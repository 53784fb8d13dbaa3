"""Rules for the arguments of the HTTP server."""

from __future__ import annotations

from srv.platform.facts import Constraint, ResolutionContext


def _one_key(context: ResolutionContext) -> str | None:
    if context["api_key_file"] is None or context["api_key"] is None:
        return None
    return "the key is set twice (api_key)"


# Arguments that say how text is encoded, each with the value that asks for nothing.
_OF_TEXT = {
    "chat_template": None,
    "score_template": None,
    "tokenizer_worker_num": 1,
    "enable_tokenizer_batch_encode": False,
    "enable_dynamic_batch_tokenizer": False,
}


def _no_text(context: ResolutionContext) -> str | None:
    if not context["skip_tokenizer_init"]:
        return None
    text_arguments = [name for name, neutral in _OF_TEXT.items() if context[name] != neutral]
    return f"without a tokenizer, {text_arguments[0]} has no effect" if text_arguments else None


CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "skip_tokenizer_init",
        "excluded",
        _no_text,
        "Leave one of them out.",
        reads=tuple(_OF_TEXT),
    ),
    Constraint("api_key_file", "excluded", _one_key, "Leave one of them out.", reads=("api_key",)),
)
