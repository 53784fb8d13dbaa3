"""Tokenizers from the metadata of GGUF files, exact and without a detour over another format.

Owns the meaning of `tokenizer.*` keys. Must not know how a header is read nor how words are cut
(`pretokenize`). Two models: "gpt2" (byte-level BPE with a table of merges) and "llama" (SentencePiece BPE,
whose merges follow from the scores of the pieces; a character without a piece becomes byte tokens). A byte
that a byte-level vocabulary has no token for is left out, as llama.cpp does: SmolLM2 lacks some control
characters and the first bytes of unassigned planes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import AddedToken, Tokenizer, models, normalizers

from srv.errors import ModelError
from srv.models.formats.gguf_header import read_header
from srv.server.text.tokenizers.codec import WORD_BORDER, ByteCodec, byte_level_bytes, sentencepiece_bytes
from srv.server.text.tokenizers.pretokenize import PRE_TOKENIZERS, PreTokenizer
from srv.server.text.tokenizers.source import Frame, TextSource

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6  # values of tokenizer.ggml.token_type; 1 is normal
ARRAYS = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges", "scores"))
ANOTHER = "Give the tokenizer of the original model with --tokenizer-path FOLDER"
ROLE_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the format
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
END_KEYS = ("eot_token_id", "eom_token_id")


def read_gguf(path: Path) -> TextSource:
    """The tokenizer and chat templates in a GGUF file.

    Raises ModelError with code no_tokenizer, unknown_tokenizer, unknown_pretokenizer or damaged.
    """
    return source_of_metadata(read_header(path, ARRAYS).metadata, str(path))


def read_gguf_templates(path: Path) -> dict[str, str]:
    """The chat templates in a GGUF file, by name."""
    return _templates(read_header(path, ()).metadata)


def source_of_metadata(metadata: Mapping[str, Any], what: str) -> TextSource:
    """As `read_gguf`, from metadata already read (with the arrays in `ARRAYS`); `what` names it in errors."""
    vocabulary = _Vocabulary(metadata, what)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return vocabulary.byte_level()
    if kind == "llama":
        return vocabulary.sentencepiece()
    reason = f"tokenizer.ggml.model is {kind!r}; srv reads 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE)"
    raise ModelError("no_tokenizer" if kind is None else "unknown_tokenizer", what, reason, ANOTHER)


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {name.removeprefix(key + "."): text for name, text in metadata.items() if name.startswith(key + ".")}
    default = {"default": metadata[key]} if key in metadata else {}
    return {name: text for name, text in (named | default).items() if isinstance(text, str)}


class _Vocabulary:
    """The tokens of one file with their types, and the two ways to build a tokenizer from them."""

    def __init__(self, metadata: Mapping[str, Any], what: str) -> None:
        self._metadata, self._what = metadata, what
        self.tokens: Sequence[str] = self._array("tokens", str)
        if not self.tokens:
            raise ModelError("no_tokenizer", what, "the file carries no vocabulary (tokenizer.ggml.tokens)", ANOTHER)
        self.types: Sequence[int] = self._array("token_type", int) or (1,) * len(self.tokens)
        if len(self.types) != len(self.tokens):
            self._damaged(f"it has {len(self.tokens)} tokens and {len(self.types)} token types")
        self.roles = {role: token for role, key in ROLE_KEYS.items() if (token := self._id(key)) is not None}
        ends = {token for key in END_KEYS if (token := self._id(key)) is not None}
        control = (token for token, kind in enumerate(self.types) if kind in (CONTROL, UNKNOWN))
        self.special = frozenset(control) | ends | set(self.roles.values())
        self.ids: dict[str, int] = {}
        for token, text in enumerate(self.tokens):
            self.ids.setdefault(text, token)

    def _get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def _array(self, name: str, kind: type) -> Sequence[Any]:
        values = self._get(name, ())
        if not isinstance(values, Sequence) or isinstance(values, str) or (values and not isinstance(values[0], kind)):
            self._damaged(f"tokenizer.ggml.{name} is no array of {kind.__name__}")
        return values

    def _id(self, name: str) -> int | None:
        token = self._get(name)
        if token is None:
            return None
        if not isinstance(token, int) or not 0 <= token < len(self.tokens):
            self._damaged(f"tokenizer.ggml.{name} is {token!r} in a vocabulary of {len(self.tokens)}")
        return token

    def _damaged(self, reason: str) -> NoReturn:
        raise ModelError("damaged", self._what, reason, f"Fetch the file again. {ANOTHER}")

    def byte_level(self) -> TextSource:
        """Byte-level BPE: words by the file's pre-tokenizer, merges in the order of the table."""
        words = self._pre_tokenizer()
        merges: list[tuple[str, str]] = []
        for merge in self._array("merges", str):
            split = merge.find(" ", 1)
            merges.append((merge[:split], merge[split + 1 :]))
        tokenizer = self._bpe(merges=merges, ignore_merges=words.whole_words)
        tokenizer.pre_tokenizer = words.build()
        if (normalizer := words.normalizer()) is not None:
            tokenizer.normalizer = normalizer
        verbatim = self._add_tokens(tokenizer)

        def spell(token: int) -> bytes:
            if self.types[token] == UNUSED:
                return b""
            text = self.tokens[token]
            return text.encode() if token in verbatim else byte_level_bytes(text)

        return self._source(tokenizer, spell, strip_space=False, begin=words.begin_token)

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self._get("pre")
        if name in PRE_TOKENIZERS:
            return PRE_TOKENIZERS[name]
        said = "the file does not say" if name is None else f"tokenizer.ggml.pre is {name!r}, and srv does not know"
        reason = f"{said} how its text is cut into words (known: {', '.join(sorted(PRE_TOKENIZERS))})"
        raise ModelError("unknown_pretokenizer", self._what, reason, ANOTHER)

    def sentencepiece(self) -> TextSource:
        """SentencePiece BPE: no words; spaces become the border sign, one is put before the text."""
        scores = self._array("scores", float)
        if len(scores) != len(self.tokens):
            self._damaged(f"it has {len(self.tokens)} tokens and {len(scores)} scores")
        if self._get("remove_extra_whitespaces", False):
            reason = "its tokenizer removes repeated spaces (remove_extra_whitespaces), which srv does not do"
            raise ModelError("unknown_tokenizer", self._what, reason, ANOTHER)
        unknown = self.roles.get("unk_token")
        options = {} if unknown is None else {"unk_token": self.tokens[unknown]}
        tokenizer = self._bpe(merges=self._merges(scores), fuse_unk=True, byte_fallback=True, **options)
        prefix = bool(self._get("add_space_prefix", True))
        border = [normalizers.Replace(" ", WORD_BORDER)]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_BORDER), *border] if prefix else border)
        self._add_tokens(tokenizer)

        def spell(token: int) -> bytes:
            return b"" if self.types[token] == UNUSED else sentencepiece_bytes(self.tokens[token])

        return self._source(tokenizer, spell, strip_space=prefix, begin=True)

    def _merges(self, scores: Sequence[float]) -> list[tuple[str, str]]:
        """SentencePiece joins the neighbours whose union scores highest: each way to halve a piece into two
        pieces is a merge, ranked by the piece's score."""
        kinds = (CONTROL, UNKNOWN, BYTE, UNUSED)
        parts = {text for text, token in self.ids.items() if self.types[token] not in kinds}
        ranked = []
        for text in parts:
            token = self.ids[text]
            if self.types[token] == USER_DEFINED:
                continue
            for cut in range(1, len(text)):
                left, right = text[:cut], text[cut:]
                if left in parts and right in parts:
                    ranked.append((-scores[token], self.ids[left], self.ids[right], left, right))
        return [(left, right) for *_, left, right in sorted(ranked)]

    def _bpe(self, *, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
        try:
            return Tokenizer(models.BPE(vocab=self.ids, merges=merges, **options))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            self._damaged(f"its merges do not fit its vocabulary ({error})")

    def _add_tokens(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Tokens that are found in the text as they are, before any other step; returns their ids."""
        own = [token for token, kind in enumerate(self.types) if kind == USER_DEFINED and token not in self.special]
        for ids, special in ((sorted(self.special), True), (own, False)):
            texts = [self.tokens[token] for token in ids if self.tokens[token]]
            tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
        return self.special | frozenset(own)

    def _source(
        self, tokenizer: Tokenizer, spell: Callable[[int], bytes], *, strip_space: bool, begin: bool
    ) -> TextSource:
        frame = Frame(
            before=self._framing("bos_token", self._get("add_bos_token", begin)),
            after=self._framing("eos_token", self._get("add_eos_token", False)),
        )
        codec = ByteCodec(spell, len(self.tokens), self.special, strip_space)
        roles = {role: self.tokens[token] for role, token in self.roles.items()}
        return TextSource(tokenizer, codec, len(self.tokens), frame, roles, _templates(self._metadata))

    def _framing(self, role: str, wanted: object) -> tuple[int, ...]:
        return (self.roles[role],) if wanted and role in self.roles else ()
