"""Builds tokenizers from the metadata of GGUF files, without converting to another format first.

Owns the meaning of `tokenizer.*` keys. Must not know how a header is read or how text is split (`pretokenize`). There
are four models: "gpt2" (byte-level BPE with a merge table), "llama" (SentencePiece BPE, whose merges follow from the
scores of the pieces; a character without a piece becomes byte tokens), "t5" (SentencePiece unigrams, of XLM-RoBERTa)
and "bert" (WordPiece, whose tokens begin with U+2581 if they begin a word). A byte without a token in a byte-level
vocabulary is dropped, as in llama.cpp: SmolLM2 has none for some control characters and the first bytes of unassigned
planes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from srv.errors import ModelError
from srv.models.checkpoints.gguf_header import read_header
from srv.server.text.processor import SpecialTokenAffixes
from srv.server.text.tokenizers.codec import METASPACE, ByteCodec, byte_level_bytes, sentencepiece_bytes
from srv.server.text.tokenizers.pretokenize import PRE_TOKENIZERS, PreTokenizer
from srv.server.text.tokenizers.source import TextSource

UNKNOWN_PIECE = "[UNK]"
UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6  # values of tokenizer.ggml.token_type; 1 is normal
ARRAYS = tuple(
    f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges", "scores", "precompiled_charsmap")
)
REMEDY = "Use the original model's tokenizer with --tokenizer-path FOLDER"
ROLE_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # misspelt in the format
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
END_KEYS = ("eot_token_id", "eom_token_id")


def read_gguf(path: Path) -> TextSource:
    """Read the tokenizer of a GGUF file.

    Raises ModelError with code no_tokenizer, unknown_tokenizer, unknown_pretokenizer or damaged.
    """
    return source_from_metadata(read_header(path, ARRAYS).metadata, str(path))


def source_from_metadata(metadata: Mapping[str, Any], origin: str) -> TextSource:
    """Like `read_gguf`, from metadata with the arrays in `ARRAYS`; `origin` names the file in errors."""
    vocabulary = _Vocabulary(metadata, origin)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return vocabulary.byte_level()
    if kind == "llama":
        return vocabulary.sentencepiece()
    if kind == "t5":
        return vocabulary.unigrams()
    if kind == "bert":
        return vocabulary.word_pieces()
    readable = (
        "'gpt2' (byte-level BPE), 'llama' (SentencePiece BPE), 't5' (SentencePiece unigrams) and 'bert' (WordPiece)"
    )
    reason = f"tokenizer.ggml.model is {kind!r}; srv reads {readable}"
    raise ModelError("no_tokenizer" if kind is None else "unknown_tokenizer", origin, reason, REMEDY)


class _Vocabulary:
    """The tokens of one file with their types; builds either kind of tokenizer from them."""

    def __init__(self, metadata: Mapping[str, Any], origin: str) -> None:
        self._metadata, self._origin = metadata, origin
        self.tokens: Sequence[str] = self._array("tokens", str)
        if not self.tokens:
            raise ModelError("no_tokenizer", origin, "the file has no vocabulary (tokenizer.ggml.tokens)", REMEDY)
        self.types: Sequence[int] = self._array("token_type", int) or (1,) * len(self.tokens)
        if len(self.types) != len(self.tokens):
            self._damaged(f"it has {len(self.tokens)} tokens and {len(self.types)} token types")
        self.special_by_role = {role: token for role, key in ROLE_KEYS.items() if (token := self._id(key)) is not None}
        ends = {token for key in END_KEYS if (token := self._id(key)) is not None}
        control = (token for token, kind in enumerate(self.types) if kind in (CONTROL, UNKNOWN))
        self.special = frozenset(control) | ends | set(self.special_by_role.values())
        self.ids: dict[str, int] = {}
        for token, text in enumerate(self.tokens):
            self.ids.setdefault(text, token)

    def _get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def _array(self, name: str, kind: type) -> Sequence[Any]:
        values = self._get(name, ())
        if not isinstance(values, Sequence) or isinstance(values, str) or (values and not isinstance(values[0], kind)):
            self._damaged(f"tokenizer.ggml.{name} is not an array of {kind.__name__}")
        return values

    def _id(self, name: str) -> int | None:
        token = self._get(name)
        if token is None:
            return None
        if not isinstance(token, int) or not 0 <= token < len(self.tokens):
            self._damaged(f"tokenizer.ggml.{name} is {token!r}, but the vocabulary has {len(self.tokens)} tokens")
        return token

    def _damaged(self, reason: str) -> NoReturn:
        raise ModelError("damaged", self._origin, reason, f"Download the file again. {REMEDY}")

    def byte_level(self) -> TextSource:
        """Byte-level BPE, with the file's pre-tokenizer and merges in the order of the table."""
        pre_tokenizer = self._pre_tokenizer()
        merges: list[tuple[str, str]] = []
        for merge in self._array("merges", str):
            split = merge.find(" ", 1)
            merges.append((merge[:split], merge[split + 1 :]))
        if not merges:
            self._damaged("it has no merges (tokenizer.ggml.merges)")
        tokenizer = self._bpe(merges=merges, ignore_merges=pre_tokenizer.ignore_merges)
        tokenizer.pre_tokenizer = pre_tokenizer.build()
        if (normalizer := pre_tokenizer.normalizer()) is not None:
            tokenizer.normalizer = normalizer
        added = self._add_tokens(tokenizer)

        def to_bytes(token: int) -> bytes:
            if self.types[token] == UNUSED:
                return b""
            text = self.tokens[token]
            return text.encode() if token in added else byte_level_bytes(text)

        return self._source(tokenizer, to_bytes, strip_space=False, default_bos=pre_tokenizer.add_bos)

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self._get("pre")
        if name in PRE_TOKENIZERS:
            return PRE_TOKENIZERS[name]
        fault = "is missing" if name is None else f"is {name!r}, which srv does not support"
        reason = f"tokenizer.ggml.pre {fault} (supported: {', '.join(sorted(PRE_TOKENIZERS))})"
        raise ModelError("unknown_pretokenizer", self._origin, reason, REMEDY)

    def sentencepiece(self) -> TextSource:
        """SentencePiece BPE: no pre-tokenizer; spaces become U+2581, and one is added before the text."""
        scores = self._array("scores", float)
        if len(scores) != len(self.tokens):
            self._damaged(f"it has {len(self.tokens)} tokens and {len(scores)} scores")
        if self._get("remove_extra_whitespaces", False):
            reason = "its tokenizer removes repeated spaces (remove_extra_whitespaces), which srv does not support"
            raise ModelError("unknown_tokenizer", self._origin, reason, REMEDY)
        unknown = self.special_by_role.get("unk_token")
        options = {} if unknown is None else {"unk_token": self.tokens[unknown]}
        tokenizer = self._bpe(merges=self._merges(scores), fuse_unk=True, byte_fallback=True, **options)
        add_prefix = bool(self._get("add_space_prefix", True))
        prepend = [normalizers.Prepend(METASPACE)] if add_prefix else []
        tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", METASPACE)])
        self._add_tokens(tokenizer)

        def to_bytes(token: int) -> bytes:
            return b"" if self.types[token] == UNUSED else sentencepiece_bytes(self.tokens[token])

        return self._source(tokenizer, to_bytes, strip_space=add_prefix, default_bos=True)

    def unigrams(self) -> TextSource:
        """SentencePiece unigrams, with the file's map of characters; repeated spaces are one."""
        scores = self._array("scores", float)
        if len(scores) != len(self.tokens):
            self._damaged(f"it has {len(self.tokens)} tokens and {len(scores)} scores")
        pieces = list(zip(self.tokens, scores, strict=True))
        unknown = self._id("unknown_token_id")
        try:
            tokenizer = Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=BYTE in self.types))
            charsmap = self._array("precompiled_charsmap", int)
            mapped = [normalizers.Precompiled(bytes(byte % 256 for byte in charsmap))] if charsmap else []
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            self._damaged(f"its pieces or its map of characters are invalid ({error})")
        tokenizer.normalizer = normalizers.Sequence([*mapped, normalizers.Replace(Regex(" {2,}"), " ")])
        add_prefix = bool(self._get("add_space_prefix", True))
        scheme: Literal["always", "never"] = "always" if add_prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(METASPACE, prepend_scheme=scheme)]
        )
        self._add_tokens(tokenizer)

        def to_bytes(token: int) -> bytes:
            return b"" if self.types[token] == UNUSED else sentencepiece_bytes(self.tokens[token])

        return self._source(tokenizer, to_bytes, strip_space=add_prefix, default_bos=False, default_eos=True)

    def word_pieces(self) -> TextSource:
        """WordPiece. Texts are in lower case, without accents, unless any token has a capital letter."""
        plain = [text for token, text in enumerate(self.tokens) if token not in self.special]
        cased = any(text != text.lower() for text in plain if not text.startswith(f"{METASPACE}["))
        role = self.special_by_role.get("unk_token")
        unknown = UNKNOWN_PIECE if role is None else self.tokens[role]
        if unknown not in self.ids:
            self._damaged(f"its vocabulary has no token {unknown} for unknown words")
        tokenizer = Tokenizer(
            models.WordPiece(
                {self._written(token): token for token in range(len(self.tokens))},
                unk_token=unknown,
                max_input_chars_per_word=100,
            )
        )
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self._add_tokens(tokenizer)

        def to_bytes(token: int) -> bytes:
            return sentencepiece_bytes(self.tokens[token])

        source = self._source(tokenizer, to_bytes, strip_space=True, default_bos=True)
        suffix = self._affix("sep_token", self._get("add_sep_token", True))
        prefix = source.affixes.prefix if source.affixes else ()
        affixes = SpecialTokenAffixes(prefix or self._affix("cls_token", self._get("add_bos_token", True)), suffix)
        return replace(source, affixes=affixes)

    def _written(self, token: int) -> str:
        """A token as BERT's own vocabulary has it: with ## if it continues a word."""
        text = self.tokens[token]
        if token in self.special or self.types[token] in (CONTROL, UNKNOWN):
            return text
        return text[1:] if text.startswith(METASPACE) else f"##{text}"

    def _merges(self, scores: Sequence[float]) -> list[tuple[str, str]]:
        """SentencePiece merges the neighbours whose concatenation has the highest score: each split of a piece into two
        pieces is a merge, ranked by the score of the piece."""
        kinds = (CONTROL, UNKNOWN, BYTE, UNUSED)
        parts = {text for text, token in self.ids.items() if self.types[token] not in kinds}
        ranked = []
        for text in parts:
            token = self.ids[text]
            if self.types[token] == USER_DEFINED:
                continue
            for split in range(1, len(text)):
                left, right = text[:split], text[split:]
                if left in parts and right in parts:
                    ranked.append((-scores[token], self.ids[left], self.ids[right], left, right))
        return [(left, right) for *_, left, right in sorted(ranked)]

    def _bpe(self, *, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
        try:
            return Tokenizer(models.BPE(vocab=self.ids, merges=merges, **options))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            self._damaged(f"its merges do not fit its vocabulary ({error})")

    def _add_tokens(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Add the tokens that are matched in the text before all other steps; returns their ids."""
        plain = [token for token, kind in enumerate(self.types) if kind == USER_DEFINED and token not in self.special]
        for ids, special in ((sorted(self.special), True), (plain, False)):
            texts = [self.tokens[token] for token in ids if self.tokens[token]]
            tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
        return self.special | frozenset(plain)

    def _source(
        self,
        tokenizer: Tokenizer,
        to_bytes: Callable[[int], bytes],
        *,
        strip_space: bool,
        default_bos: bool,
        default_eos: bool = False,
    ) -> TextSource:
        affixes = SpecialTokenAffixes(
            prefix=self._affix("bos_token", self._get("add_bos_token", default_bos)),
            suffix=self._affix("eos_token", self._get("add_eos_token", default_eos)),
        )
        codec = ByteCodec(to_bytes, len(self.tokens), self.special, strip_space)
        special_tokens = {role: self.tokens[token] for role, token in self.special_by_role.items()}
        return TextSource(tokenizer, codec, len(self.tokens), affixes, special_tokens)

    def _affix(self, role: str, enabled: object) -> tuple[int, ...]:
        return (self.special_by_role[role],) if enabled and role in self.special_by_role else ()
