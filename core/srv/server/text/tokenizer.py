"""The text processor of a served model: encode, decode, chat prompts, incremental detokenizing.

Owns which files the tokenizer and the chat template come from. Must not know HTTP, the engine or torch.

Special tokens in text. Text is encoded with special tokens recognised, wherever they stand: a chat template
writes them as text, and what a user's message contains cannot be told from it afterwards. So a message that
spells out `<|im_end|>` ends a turn, in this server as in others of its kind; whoever serves untrusted users
with trusted system prompts should refuse or rewrite such messages before they get here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from srv.errors import ModelError, RequestError
from srv.server.text.chat_template import ChatTemplate, read_override
from srv.server.text.detokenize import IncrementalDetokenizer
from srv.server.text.tokenizers.codec import Codec
from srv.server.text.tokenizers.folder import read_folder, read_folder_templates
from srv.server.text.tokenizers.gguf import read_gguf, read_gguf_templates
from srv.server.text.tokenizers.source import Frame, TextSource
from srv.specs import ModelFacts


def load_text_processor(
    facts: ModelFacts, tokenizer_path: str | None = None, chat_template: str | None = None
) -> ModelText:
    """The text processor of a model.

    `tokenizer_path` (--tokenizer-path): a folder, a tokenizer.json or a GGUF file instead of the model's own
    tokenizer. `chat_template` (--chat-template): see `read_override`; else the tokenizer's, else the model's.
    Raises ModelError with code not_found, no_tokenizer, unknown_tokenizer, unknown_pretokenizer,
    bad_chat_template, damaged or truncated.
    """
    model = Path(facts.path)
    chosen = model if tokenizer_path is None else Path(tokenizer_path).expanduser()
    if not chosen.exists():
        who = "the model" if tokenizer_path is None else "--tokenizer-path"
        remedy = "Give --tokenizer-path a folder, a tokenizer.json or a GGUF file on this disk"
        raise ModelError("not_found", str(chosen), f"{who} names it for the tokenizer and it is not there", remedy)
    source = _read(chosen)
    if chat_template is not None:
        templates: Mapping[str, str] = read_override(chat_template)
    else:
        templates = source.templates or (_read_templates(model) if chosen != model else {})
    chat = ChatTemplate(templates, source.roles, facts.name) if templates else None
    return ModelText(source, chat, facts.name)


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF" or path.suffix == ".gguf"


def _read(path: Path) -> TextSource:
    if path.is_dir():
        return read_folder(path)
    return read_gguf(path) if _is_gguf(path) else read_folder(path.parent, path)


def _read_templates(path: Path) -> dict[str, str]:
    if path.is_dir():
        return read_folder_templates(path)
    return read_gguf_templates(path) if path.is_file() and _is_gguf(path) else {}


class ModelText:
    """`srv.server.text.processor.TextProcessor` over a tokenizer of the `tokenizers` library. Thread-safe."""

    def __init__(self, source: TextSource, chat: ChatTemplate | None, model: str) -> None:
        self._tokenizer: Tokenizer = source.tokenizer
        self._codec: Codec = source.codec
        self._frame: Frame | None = source.frame
        self._vocab_size = source.vocab_size
        self._chat, self._model = chat, model

    @property
    def vocab_size(self) -> int:
        """The tokenizer's ids are in [0, vocab_size); a model's logits may have more, which mean nothing."""
        return self._vocab_size

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; special tokens in it are recognised. `add_special_tokens` puts the model's own
        around it: False for the text of a chat template, which writes them itself.

        Raises RequestError for text that has no UTF-8 form (half a surrogate pair).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"the text is no valid Unicode: character {error.start} is half of a surrogate pair"
            raise RequestError(message, code="invalid_text") from error
        if self._frame is None:
            return self._ids(text, add_special_tokens)
        ids = self._ids(text, False)
        return [*self._frame.before, *ids, *self._frame.after] if add_special_tokens else ids

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """The batch form, although there is one text: unlike `encode` it lets other threads run meanwhile."""
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; what is no UTF-8 shows as U+FFFD, ids outside the vocabulary as nothing."""
        return self._codec.decode(ids, skip_special_tokens)

    def apply_chat_template(
        self, messages: list[dict[str, object]], *, add_generation_prompt: bool = True, **extra: object
    ) -> str:
        """The prompt text of a conversation, to be encoded with `add_special_tokens=False`."""
        if self._chat is None:
            message = f"{self._model} has no chat template; start the server with --chat-template FILE, "
            raise RequestError(message + "or use /v1/completions", code="no_chat_template", param="messages")
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt, extra=extra)

    def detokenizer(
        self, prompt_ids: Sequence[int], stop: Sequence[str], skip_special_tokens: bool, include_stop: bool
    ) -> IncrementalDetokenizer:
        stream = self._codec.stream(prompt_ids, skip_special_tokens)
        return IncrementalDetokenizer(stream, stop, include_stop)

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return self._codec.token_bytes(token)
