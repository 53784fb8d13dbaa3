"""The text processor of a served model: encoding, decoding, chat prompts, incremental detokenization.

Decides which files the tokenizer and the chat template are read from. Must not know HTTP, the engine or torch.

Special tokens are recognised anywhere in a text, because a chat template writes them as text, and a user's message
cannot be distinguished from the template afterwards. A message that contains `<|im_end|>` therefore ends a turn, as in
other LLM servers. Services that combine untrusted users with trusted system prompts should reject or rewrite such
messages first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from tokenizers import Tokenizer

from srv.errors import ModelError, RequestError
from srv.models.chat_templates import chat_templates, is_gguf
from srv.server.text.detokenize import IncrementalDetokenizer
from srv.server.text.encode_pool import EncodePool
from srv.server.text.pairs import join_pair
from srv.server.text.processor import EncodedPair, SpecialTokenAffixes
from srv.server.text.stop_regex import StopRegex
from srv.server.text.template_process import TemplateProcess
from srv.server.text.tokenizers.codec import Codec
from srv.server.text.tokenizers.folder import read_folder
from srv.server.text.tokenizers.gguf import read_gguf
from srv.server.text.tokenizers.source import TextSource
from srv.specs import ModelFacts
from srv.types import Vocabulary


def load_tokenizer(path: str, remote_code: bool = False) -> ModelTextProcessor:
    """The text processor of a tokenizer's file or folder, without a chat template.

    `remote_code`: whether Python code in the folder may be run to load it.
    """
    return ModelTextProcessor(_read(Path(path), remote_code), None, path)


def load_text_processor(
    facts: ModelFacts, tokenizer_path: str | None = None, chat_template: str | None = None, processes: int = 1
) -> ModelTextProcessor:
    """Load the text processor of a model. `processes`: those that encode longer texts; 1: only this one.

    `tokenizer_path` (--tokenizer-path): a folder, a tokenizer.json or a GGUF file instead of the model's own
    tokenizer. `chat_template` (--chat-template): a file; by default the tokenizer's, else the model's.
    Raises ModelError with code not_found, no_tokenizer, unknown_tokenizer, unknown_pretokenizer, remote_code,
    bad_chat_template, damaged or truncated.
    """
    model = Path(facts.path)
    chosen = model if tokenizer_path is None else Path(tokenizer_path).expanduser()
    if not chosen.exists():
        path = "the path of the model" if tokenizer_path is None else "the path of --tokenizer-path"
        remedy = "Set --tokenizer-path to a local folder, tokenizer.json or GGUF file"
        raise ModelError("not_found", str(chosen), f"{path} does not exist", remedy)
    remote_code = facts.remote_code and tokenizer_path is None
    source = _read(chosen, remote_code)
    templates = chat_templates(model, None if tokenizer_path is None else chosen, chat_template)
    chat = TemplateProcess(templates, source.special_tokens, facts.name) if templates else None
    text = ModelTextProcessor(source, chat, facts.name, tuple(templates.values()))
    if processes > 1:
        text.start_processes(chosen, processes, remote_code)
    return text


def _read(path: Path, remote_code: bool = False) -> TextSource:
    if path.is_dir():
        return read_folder(path, remote_code=remote_code)
    return read_gguf(path) if is_gguf(path) else read_folder(path.parent, path)


class ModelTextProcessor:
    """A `srv.server.text.processor.TextProcessor` on top of the `tokenizers` library. Thread-safe."""

    has_tokenizer = True

    def __init__(
        self, source: TextSource, chat: TemplateProcess | None, model: str, templates: tuple[str, ...] = ()
    ) -> None:
        self._tokenizer: Tokenizer = source.tokenizer
        self._codec: Codec = source.codec
        self._affixes: SpecialTokenAffixes | None = source.affixes
        self._vocab_size = source.vocab_size
        self._chat, self._model = chat, model
        # A process of their own: what they do must not end that of the model's template.
        self._requested = TemplateProcess({}, source.special_tokens, "the request", starts=False)
        self.templates = templates
        self._kept: dict[tuple[str, ...], frozenset[int]] = {(): frozenset()}
        self._pool: EncodePool | None = None

    def start_processes(self, path: Path, count: int, remote_code: bool = False) -> None:
        """Let `count` processes, which load the tokenizer of this file or folder, serve `encode_batch`."""
        self._pool = EncodePool(path, count, self._batch, remote_code)

    @property
    def vocab_size(self) -> int:
        """The tokenizer's ids are in [0, vocab_size); the logits of a model may have padding beyond."""
        return self._vocab_size

    @cached_property
    def affixes(self) -> SpecialTokenAffixes:
        if self._affixes is not None:
            return self._affixes
        encoded = self._tokenizer.encode("a")
        added = encoded.special_tokens_mask
        begin = next((at for at, special in enumerate(added) if not special), len(added))
        end = next((at for at in range(len(added), begin, -1) if not added[at - 1]), begin)
        return SpecialTokenAffixes(tuple(encoded.ids[:begin]), tuple(encoded.ids[end:]))

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text, recognising special tokens in it. `add_special_tokens` adds BOS and EOS as the model requires;
        it is False for a rendered chat template, which contains them.

        Raises RequestError for text that cannot be encoded as UTF-8 (a lone surrogate).
        """
        _check_unicode(text)
        return self._batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        for text in texts:
            _check_unicode(text)
        encode = self._batch if self._pool is None else self._pool.encode
        return encode(texts, add_special_tokens)

    def _batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Uses the batch method even for one text: unlike `encode`, it releases the GIL."""
        own = add_special_tokens and self._affixes is None  # the tokenizer's post-processor adds them
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=own)
        if self._affixes is None or not add_special_tokens:
            return [list(encoding.ids) for encoding in encoded]
        return [[*self._affixes.prefix, *encoding.ids, *self._affixes.suffix] for encoding in encoded]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], keep: int | None = None) -> list[EncodedPair]:
        for text in (text for pair in pairs for text in pair):
            _check_unicode(text)
        sides = [[pair[side] for pair in pairs] for side in (0, 1)]
        firsts, seconds = (self._tokenizer.encode_batch(texts, add_special_tokens=False) for texts in sides)
        both = zip(firsts, seconds, strict=True)
        return [join_pair(self._tokenizer, self._affixes, first, second, keep) for first, second in both]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode ids; invalid UTF-8 becomes U+FFFD, and ids outside the vocabulary are skipped."""
        return self._codec.decode(ids, skip_special_tokens)

    def apply_chat_template(
        self,
        messages: list[dict[str, object]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """The prompt text of a conversation, to be encoded with `add_special_tokens=False`."""
        if self._chat is None:
            message = f"{self._model} has no chat template; start the server with --chat-template FILE, "
            raise RequestError(message + "or use /v1/completions", code="no_chat_template", param="messages")
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt, extra=variables)

    def apply_template_of_request(
        self,
        source: str,
        messages: list[dict[str, object]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        return self._requested.render(
            messages, add_generation_prompt=add_generation_prompt, extra=variables, source=source
        )

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        stop: Sequence[str],
        skip_special_tokens: bool,
        include_stop: bool,
        keep: tuple[str, ...] = (),
        regex: StopRegex | None = None,
    ) -> IncrementalDetokenizer:
        stream = self._codec.stream(prompt_ids, skip_special_tokens, self._special_in(keep))
        return IncrementalDetokenizer(stream, stop, include_stop, regex)

    def _special_in(self, markers: tuple[str, ...]) -> frozenset[int]:
        """The special tokens that the markers consist of; cached, because a model has few sets of markers."""
        if (tokens := self._kept.get(markers)) is None:
            texts = ((token, self.token_text(token)) for token in self._codec.special)
            tokens = frozenset(token for token, text in texts if text and any(text in marker for marker in markers))
            self._kept[markers] = tokens
        return tokens

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")

    def close(self) -> None:
        self._requested.close()
        if self._chat is not None:
            self._chat.close()
        if self._pool is not None:
            self._pool.close()

    def token_bytes(self, token: int) -> bytes:
        return self._codec.token_bytes(token)

    def vocabulary(self) -> Vocabulary | None:
        return self._codec.vocabulary()


def _check_unicode(text: str) -> None:
    """Raises RequestError for text that cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"the text is not valid Unicode: character {error.start} is a lone surrogate"
        raise RequestError(message, code="invalid_text") from error
