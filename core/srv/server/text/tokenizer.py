"""The text processor of a served model: encoding, decoding, chat prompts, incremental detokenization.

Decides which files the tokenizer and the chat template are read from. Must not know HTTP, the engine or torch.

Special tokens are recognised anywhere in a text, because a chat template writes them as text, and a user's message
cannot be distinguished from the template afterwards. A message that contains `<|im_end|>` therefore ends a turn, as in
other LLM servers. Services that combine untrusted users with trusted system prompts should reject or rewrite such
messages first.
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
from srv.server.text.tokenizers.source import SpecialTokenAffixes, TextSource
from srv.specs import ModelFacts


def load_text_processor(
    facts: ModelFacts, tokenizer_path: str | None = None, chat_template: str | None = None
) -> ModelTextProcessor:
    """Load the text processor of a model.

    `tokenizer_path` (--tokenizer-path): a folder, a tokenizer.json or a GGUF file instead of the model's own
    tokenizer. `chat_template` (--chat-template): see `read_override`; by default the tokenizer's, else the model's.
    Raises ModelError with code not_found, no_tokenizer, unknown_tokenizer, unknown_pretokenizer,
    bad_chat_template, damaged or truncated.
    """
    model = Path(facts.path)
    chosen = model if tokenizer_path is None else Path(tokenizer_path).expanduser()
    if not chosen.exists():
        path = "the path of the model" if tokenizer_path is None else "the path of --tokenizer-path"
        remedy = "Set --tokenizer-path to a local folder, tokenizer.json or GGUF file"
        raise ModelError("not_found", str(chosen), f"{path} does not exist", remedy)
    source = _read(chosen)
    if chat_template is not None:
        templates: Mapping[str, str] = read_override(chat_template)
    else:
        templates = source.templates or (_read_templates(model) if chosen != model else {})
    chat = ChatTemplate(templates, source.special_tokens, facts.name) if templates else None
    return ModelTextProcessor(source, chat, facts.name)


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


class ModelTextProcessor:
    """A `srv.server.text.processor.TextProcessor` on top of the `tokenizers` library. Thread-safe."""

    def __init__(self, source: TextSource, chat: ChatTemplate | None, model: str) -> None:
        self._tokenizer: Tokenizer = source.tokenizer
        self._codec: Codec = source.codec
        self._affixes: SpecialTokenAffixes | None = source.affixes
        self._vocab_size = source.vocab_size
        self._chat, self._model = chat, model

    @property
    def vocab_size(self) -> int:
        """The tokenizer's ids are in [0, vocab_size); the logits of a model may have padding beyond."""
        return self._vocab_size

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text, recognising special tokens in it. `add_special_tokens` adds BOS and EOS as the model requires;
        it is False for a rendered chat template, which contains them.

        Raises RequestError for text that cannot be encoded as UTF-8 (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"the text is not valid Unicode: character {error.start} is a lone surrogate"
            raise RequestError(message, code="invalid_text") from error
        if self._affixes is None:
            return self._ids(text, add_special_tokens)
        ids = self._ids(text, False)
        return [*self._affixes.prefix, *ids, *self._affixes.suffix] if add_special_tokens else ids

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """Uses the batch method for one text: unlike `encode`, it releases the GIL."""
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode ids; invalid UTF-8 becomes U+FFFD, and ids outside the vocabulary are skipped."""
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
