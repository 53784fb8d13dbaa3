"""Tokenizers and chat templates from Hugging Face folders."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from every import every
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from srv.errors import ModelError, RequestError
from srv.server.text.tokenizer import ModelTextProcessor, load_text_processor
from srv.server.text.tokenizers.codec import BYTE_OF_CHARACTER
from srv.specs import ModelFacts

FACTS = ModelFacts(
    name="small", path="", format="safetensors", architecture="LlamaForCausalLM", config={}, dtype="float32",
    quantization=None, vocab_size=300, hidden_size=1, layers=1, heads=1, kv_heads=1, head_dim=1, context_length=1,
    parameters=1, weight_bytes=1, cache_groups=(),
)  # fmt: skip
DEEP = '{"a":' * 30_000 + "1" + "}" * 30_000
HELLO = [{"role": "user", "content": "hello"}]


def byte_level() -> Tokenizer:
    vocab = {character: token for token, character in enumerate(BYTE_OF_CHARACTER)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab | {"he": 256}, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<é tool>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    return tokenizer


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "e", "▁he", "▁h"]
    merges = [("▁", "h"), ("▁h", "e")]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    return tokenizer


LLAMA_DECODER = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "he": 1, "it": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def folder(path: Path, tokenizer: Tokenizer | None = None, **files: Any) -> Path:
    """A folder with a tokenizer.json and further files: a Jinja file per str value, else a JSON file."""
    path.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        if isinstance(content, str):
            (path / f"{name}.jinja").write_text(content)
        else:
            (path / f"{name}.json").write_text(json.dumps(content))
    return path


def load(path: Path, tokenizer_path: str | None = None, chat_template: str | None = None) -> ModelTextProcessor:
    return load_text_processor(dataclasses.replace(FACTS, path=str(path)), tokenizer_path, chat_template)


@pytest.mark.parametrize(
    "make",
    [byte_level, lambda: sentencepiece(LLAMA_DECODER), lambda: sentencepiece(decoders.Metaspace()), word_level],
    ids=["byte level", "sentencepiece", "metaspace", "words"],
)
def test_ids_and_text_equal_those_of_the_tokenizers_library(tmp_path: Path, make: Any) -> None:
    tokenizer, text = make(), load(folder(tmp_path, make()))
    for sample in ("he he", "he it", " he", "h"):
        ids = tokenizer.encode(sample).ids
        assert text.encode(sample) == ids
        assert text.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids, skip_special_tokens=False)
        assert text.decode(ids) == tokenizer.decode(ids)
        stream = text.detokenizer([], [], True, False)
        assert "".join(stream.push([token], False).text for token in ids) + stream.push([], True).text == text.decode(
            ids
        )
    assert text.vocab_size == 1 + max(tokenizer.get_vocab().values())


def test_byte_tokens_of_sentencepiece_join_to_characters(tmp_path: Path) -> None:
    text = load(folder(tmp_path, sentencepiece(LLAMA_DECODER)))
    ids = text.encode("h😀中")
    assert text.decode(ids) == "h😀中"
    assert text.token_bytes(ids[-1]) == "中".encode()[-1:]
    assert text.token_text(text.encode("he")[0]) == " he"


def test_added_tokens_decode_to_their_text_and_special_ones_can_be_skipped(tmp_path: Path) -> None:
    text = load(folder(tmp_path, byte_level()))
    ids = text.encode("he<é tool></s>")
    assert ids == [257, 256, 259, 258]
    assert text.decode(ids) == "he<é tool>"
    assert text.decode(ids, skip_special_tokens=False) == "<s>he<é tool></s>"


EOS_TEMPLATE = processors.TemplateProcessing(
    single="$A </s>", pair="$A </s> $B:1 </s>:1", special_tokens=[("</s>", 258)]
)


@every(
    ("processor", "expected"),
    [
        (EOS_TEMPLATE, [256, 258]),
        (processors.ByteLevel(), [256]),
        (processors.Sequence([processors.ByteLevel(), EOS_TEMPLATE]), [256, 258]),
    ],
)
def test_special_tokens_are_those_of_the_post_processor_as_in_transformers(
    processor: processors.PostProcessor, expected: list[int], tmp_path: Path
) -> None:
    """Whatever add_bos_token and add_eos_token say."""
    tokenizer = byte_level()
    tokenizer.post_processor = processor
    roles = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "TokenizersBackend"}
    cases: list[dict[str, Any]] = [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}]
    for added in cases:
        path = folder(tmp_path, tokenizer, tokenizer_config={**roles, **added})
        theirs, ours = AutoTokenizer.from_pretrained(str(path)), load(path)
        assert ours.encode("he") == theirs("he").input_ids == expected, added
        assert ours.encode("he", add_special_tokens=False) == [256]
        assert ours.encode_pairs([("he", "h")])[0].tokens == theirs("he", "h").input_ids, added


def test_truncation_and_padding_of_a_saved_tokenizer_are_disabled(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50, pad_id=0)
    assert len(load(folder(tmp_path, tokenizer)).encode("hhhhhhhh")) == 9


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"chat_template": "config"}}, "config"),
        ({"tokenizer_config": {"chat_template": [{"name": "default", "template": "named"}]}}, "named"),
        ({"tokenizer_config": {"chat_template": "config"}, "chat_template": {"chat_template": "json"}}, "json"),
        ({"tokenizer_config": {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": "<s>"},
          "special_tokens_map": {"bos_token": "no", "eos_token": {"content": "</s>"}}}, "<s></s>"),
    ],
)  # fmt: skip
def test_chat_template_is_read_from_the_folder(tmp_path: Path, files: Mapping[str, Any], expected: str) -> None:
    assert load(folder(tmp_path, byte_level(), **files)).apply_chat_template(HELLO) == expected


def test_jinja_file_overrides_tokenizer_config(tmp_path: Path) -> None:
    path = folder(tmp_path, byte_level(), tokenizer_config={"chat_template": "config"})
    assert load(folder(path, chat_template="jinja")).apply_chat_template(HELLO) == "jinja"


def test_requests_with_tools_use_the_tool_use_template(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools | length }}"}]
    text = load(folder(tmp_path, byte_level(), tokenizer_config={"chat_template": named}))
    assert text.apply_chat_template(HELLO) == "plain"
    assert text.apply_chat_template(HELLO, variables={"tools": [{}]}) == "with 1"


def test_chat_template_argument_overrides_the_folder(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", byte_level(), chat_template="own")
    folder(tmp_path, other="file")
    folder(tmp_path, other={"chat_template": "json"})
    assert load(path, None, str(tmp_path / "other.jinja")).apply_chat_template(HELLO) == "file"
    assert load(path, None, str(tmp_path / "other.json")).apply_chat_template(HELLO) == "json"


def test_another_tokenizer_keeps_the_models_chat_template_unless_it_has_one(tmp_path: Path) -> None:
    model = folder(tmp_path / "model", byte_level(), chat_template="model's")
    bare = folder(tmp_path / "bare", word_level())
    full = folder(tmp_path / "full", word_level(), chat_template="tokenizer's")
    assert load(model, str(bare)).encode("it") == [2]
    assert load(model, str(bare / "tokenizer.json")).apply_chat_template(HELLO) == "model's"
    assert load(model, str(full)).apply_chat_template(HELLO) == "tokenizer's"


def test_error_for_a_folder_without_a_tokenizer_lists_the_supported_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json nor tokenizer\.model") as caught:
        load(folder(tmp_path))
    assert caught.value.code == "no_tokenizer"
    assert "--tokenizer-path" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("tokenizer.json", "{", "damaged"),
        ("tokenizer_config.json", "[1]", "damaged"),
        ("tokenizer_config.json", DEEP, "damaged"),
        ("special_tokens_map.json", DEEP, "damaged"),
        ("chat_template.jinja", "{% for x %}", "bad_chat_template"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, content: str, code: str) -> None:
    (folder(tmp_path, byte_level()) / name).write_text(content)
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert caught.value.code == code


def test_a_chat_template_file_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text(DEEP)
    with pytest.raises(ModelError) as caught:
        load(folder(tmp_path, byte_level()), chat_template=str(tmp_path / "deep.json"))
    assert caught.value.code == "bad_chat_template"


@pytest.mark.parametrize("argument", ["tokenizer_path", "chat_template"])
def test_error_for_a_missing_file_names_the_argument(tmp_path: Path, argument: str) -> None:
    path, flag = folder(tmp_path, byte_level()), f"--{argument.replace('_', '-')}"
    with pytest.raises(ModelError, match=flag) as caught:
        load(path, **{argument: str(tmp_path / "absent")})
    assert caught.value.code == "not_found"


def test_chat_without_template_is_a_request_error_naming_the_flag(tmp_path: Path) -> None:
    text = load(folder(tmp_path, byte_level()))
    assert not text.has_chat_template
    with pytest.raises(RequestError, match="--chat-template") as caught:
        text.apply_chat_template(HELLO)
    assert (caught.value.code, caught.value.status) == ("no_chat_template", 400)


@pytest.mark.slow
def test_folder_of_an_older_format_is_converted_by_transformers(tmp_path: Path) -> None:
    byte_level().model.save(str(tmp_path))  # vocab.json and merges.txt
    folder(
        tmp_path,
        tokenizer_config={"tokenizer_class": "GPT2Tokenizer", "unk_token": "<unk>"},
        config={"model_type": "gpt2"},
    )
    text = load(tmp_path)
    assert text.decode(text.encode("he é😀")) == "he é😀"
    assert text.encode("he", add_special_tokens=False) == [256]
