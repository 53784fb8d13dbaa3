"""GGUF headers: read exactly, and validated. Everything here runs without torch."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from every import every
from models_small import built

from srv.errors import ModelError
from srv.models.checkpoints.gguf_header import GGUFHeader, read_header
from srv.models.locate import demo_model
from srv.models.read import read_facts
from srv.specs import FullAttention


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, value: Any) -> bytes:
    """One metadata pair: strings, booleans, floats, unsigned integers and lists of strings or integers."""
    if isinstance(value, list):
        strings = isinstance(value[0], str)
        items = b"".join(text(item) if strings else struct.pack("<i", item) for item in value)
        return text(key) + struct.pack("<IIQ", 9, 8 if strings else 5, len(value)) + items
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    code, kind = {bool: ("?", 7), float: ("f", 6), int: ("I", 4)}[type(value)]
    return text(key) + struct.pack("<I" + code, kind, value)


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    axes = shape[::-1]
    return text(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, kind, offset)


LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "<|im_end|>"],
    "tokenizer.ggml.eos_token_id": 1,
}


def file_of(
    metadata: dict[str, Any], tensors: list[bytes], data: int = 4096, version: int = 3, magic: bytes = b"GGUF"
) -> bytes:
    body = magic + struct.pack("<IQQ", version, len(tensors), len(metadata))
    body += b"".join(pair(key, value) for key, value in metadata.items()) + b"".join(tensors)
    return body + bytes(-len(body) % 32) + bytes(data)


EMBEDDING = tensor("token_embd.weight", [4, 8])


def written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return path


def refusal(path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        read_facts(path)
    return caught.value


def test_header_values_arrays_and_tensors(tmp_path: Path) -> None:
    more = {"a.flag": True, "a.number": 0.5, "a.list": [3, -4], "a.text": "größe"}
    path = written(tmp_path, file_of({**LLAMA, **more}, [EMBEDDING, tensor("q", [3, 64], kind=3, offset=128)]))
    header = read_header(path)
    assert isinstance(header, GGUFHeader)
    assert [header.metadata[key] for key in ("a.flag", "a.number", "a.text")] == [True, 0.5, "größe"]
    assert "a.list" not in header.metadata
    assert header.skipped == {"a.list": 2, "tokenizer.ggml.tokens": 4}
    quantized = header.tensors["q"]
    assert (quantized.shape, quantized.type.name, quantized.size) == ((3, 64), "Q4_1", 3 * 2 * 20)
    assert quantized.offset == header.tensors["token_embd.weight"].offset + 128
    assert read_header(path, decode_arrays=("a.list",)).metadata["a.list"] == (3, -4)
    assert read_header(path, decode_arrays=None).metadata["tokenizer.ggml.tokens"] == ("<s>", "</s>", "a", "<|im_end|>")


def test_strings_are_searched_for_in_a_skipped_array(tmp_path: Path) -> None:
    """The bytes of "b" with its length also occur inside a longer string, before and after the string itself."""
    inside = "x" + struct.pack("<Q", 1).decode() + "b"
    words = ["a", inside, "long", "b", inside, "", "b", "end"]
    path = written(tmp_path, file_of({**LLAMA, "a.words": words}, [EMBEDDING]))
    searched = ("b", "end", inside, "", "lon", "none")
    header = read_header(path, search={"a.words": searched, "a.absent": ("b",)})
    assert header.found == {"a.words": {text: words.index(text) for text in searched if text in words}}
    assert header.skipped["a.words"] == len(words)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    """A file cut anywhere, in the header or in the last tensor's data, is quickly refused as truncated."""
    whole = file_of(LLAMA, [EMBEDDING], data=4 * 8 * 4)
    read_facts(written(tmp_path, whole))
    for length in range(len(whole)):
        assert refusal(written(tmp_path, whole[:length])).code == "truncated", f"cut at byte {length}"


def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    """With any byte of the header changed, the file is read or refused, without a crash or a huge allocation."""
    whole = file_of({**LLAMA, "a.list": [1, 2]}, [EMBEDDING])
    chance = random.Random(7)
    outcomes: Counter[str] = Counter()
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 2, 8))):
            data[chance.randrange(len(whole) - 4096)] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
        try:
            read_facts(written(tmp_path, bytes(data)))
            outcomes["read"] += 1
        except ModelError as error:
            outcomes[error.code] += 1
    assert outcomes.keys() <= {
        *("read", "truncated", "damaged", "unsupported_config", "unknown_architecture"),
        *("unsupported_format", "unsupported_quantization"),
    }
    assert outcomes["truncated"] > 100
    assert outcomes["damaged"] > 100


HUGE = 2**62


@every(
    ("data", "code", "reason"),
    [
        (b"GGUF", "truncated", "fewer than any GGUF header"),
        (file_of(LLAMA, [], magic=b"PK\x03\x04"), "damaged", "instead of b'GGUF'"),
        (file_of(LLAMA, [], version=1), "unsupported_format", "of version 1"),
        (file_of(LLAMA, [], version=3 << 24), "unsupported_format", "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0) + bytes(64), "damaged", "tensors, more than 1048576"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE) + bytes(64), "damaged", "metadata pairs, more than 1048576"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE) + bytes(64), "damaged", "longer than the 65535"),
        (
            file_of({}, [])[:16] + struct.pack("<Q", 1) + text("k") + struct.pack("<IQ", 8, HUGE),
            "truncated",
            "a string",
        ),
        (
            file_of({}, [])[:16] + struct.pack("<Q", 1) + text("k") + struct.pack("<IIQ", 9, 4, HUGE),
            "truncated",
            "array 'k'",
        ),
        (
            file_of({}, [])[:16] + struct.pack("<Q", 1) + text("k") + struct.pack("<IIQQ", 9, 8, 1, HUGE),
            "truncated",
            "array 'k'",
        ),
        (
            file_of({}, [])[:16] + struct.pack("<Q", 1) + text("k") + struct.pack("<IQ", 77, 0),
            "damaged",
            "unknown type",
        ),
        (file_of(LLAMA, [tensor("t", [4, 8], kind=99)]), "unsupported_quantization", "type 99"),
        (file_of(LLAMA, [tensor("t", [4, 8], kind=2)]), "damaged", "cannot have the shape (4, 8)"),
        (file_of(LLAMA, [tensor("t", [HUGE, 8])]), "truncated", "tensor 't' ends at byte"),
        (file_of(LLAMA, [tensor("t", [0, 8])]), "damaged", "cannot have the shape"),
        (file_of(LLAMA, [tensor("t", [4], offset=7)]), "damaged", "unaligned offset 7"),
        (file_of(LLAMA, [EMBEDDING, EMBEDDING]), "damaged", "occurs twice"),
        (file_of({**LLAMA, "general.alignment": 3}, [EMBEDDING]), "damaged", "not a multiple of 8"),
    ],
)
def test_damaged_headers_are_refused_with_the_reason(data: bytes, code: str, reason: str, tmp_path: Path) -> None:
    error = refusal(written(tmp_path, data))
    assert (error.code, reason in error.reason) == (code, True), str(error)


@every(
    ("metadata", "code", "reason"),
    [
        ({"general.architecture": "mamba"}, "unknown_architecture", "'mamba'"),
        ({"llama.expert_count": 8}, "damaged", "lacks metadata llama.expert_used_count"),
        ({"split.count": 3}, "unsupported_format", "one of 3 parts"),
        ({"general.type": "adapter"}, "unsupported_config", "adapter"),
        ({"llama.attention.value_length": 8}, "unsupported_config", "different sizes"),
        ({"llama.rope.dimension_count": 2}, "unsupported_config", "only 2 of 4"),
        ({"llama.rope.scaling.type": "spiral"}, "unsupported_config", "'spiral'"),
        ({"llama.rope.freq_base": "fast"}, "unsupported_config", "holds an invalid value"),
        ({"llama.block_count": 4_000_000_000}, "damaged", "not an integer from 1 to 10000"),
        ({"llama.attention.head_count": 0}, "damaged", "not an integer from 1"),
        ({"llama.attention.head_count_kv": [2, 1]}, "unsupported_config", "differs between layers"),
    ],
)
def test_metadata_that_cannot_be_served(metadata: dict[str, Any], code: str, reason: str, tmp_path: Path) -> None:
    error = refusal(written(tmp_path, file_of({**LLAMA, **metadata}, [EMBEDDING])))
    assert (error.code, reason in error.reason) == (code, True), str(error)


GRANITE = {key.replace("llama.", "granite."): value for key, value in LLAMA.items()} | {
    "general.architecture": "granite",
    "granite.embedding_scale": 12.0,
    "granite.attention.scale": 0.0625,
    "granite.residual_scale": 0.25,
    "granite.logit_scale": 8.0,
}


def test_numbers_of_one_architecture_become_fields(tmp_path: Path) -> None:
    facts = read_facts(written(tmp_path, file_of(GRANITE, [EMBEDDING])))
    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    assert [facts.config[name] for name in names] == [12.0, 0.0625, 0.25, 8.0]
    without = {key: value for key, value in GRANITE.items() if key != "granite.attention.scale"}
    error = refusal(written(tmp_path, file_of(without, [EMBEDDING])))
    assert (error.code, error.reason) == ("damaged", "it lacks metadata granite.attention.scale")


def test_a_missing_file() -> None:
    error = refusal(Path("/nowhere/model.gguf"))
    assert error.code == "not_found"


@every(
    ("tokens", "ends"),
    [
        ({}, (1, 3)),
        ({"tokenizer.ggml.eot_token_id": 2}, (1, 2)),
        ({"tokenizer.ggml.eos_token_id": 3}, (3,)),
    ],
)
def test_end_tokens(tokens: dict[str, Any], ends: tuple[int, ...], tmp_path: Path) -> None:
    """The declared end tokens; an end-of-turn token is recognised by its text only if none is declared."""
    assert read_facts(written(tmp_path, file_of({**LLAMA, **tokens}, [EMBEDDING]))).end_tokens == ends


def test_scaled_rope_extends_the_context(tmp_path: Path) -> None:
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    original = {"llama.rope.scaling.original_context_length": 64}
    facts = read_facts(written(tmp_path, file_of({**LLAMA, **yarn, **original}, [EMBEDDING])))
    assert facts.context_length == 256
    assert facts.config["rope_parameters"]["attention_factor"] == pytest.approx(1.1386, abs=1e-4)


def test_demo_model_facts() -> None:
    path = demo_model()
    facts = read_facts(path)
    header = read_header(path)
    assert Counter(t.type.name for t in header.tensors.values()) == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert (facts.architecture, facts.format, facts.quantization) == ("LlamaForCausalLM", "gguf", "gguf:Q4_1")
    assert (facts.layers, facts.heads, facts.kv_heads, facts.head_dim) == (30, 9, 3, 64)
    assert (facts.vocab_size, facts.hidden_size, facts.context_length) == (49152, 576, 8192)
    assert (facts.parameters, facts.weight_bytes, facts.dtype) == (134515008, 96576768, "float16")
    assert (facts.end_tokens, facts.config["bos_token_id"]) == ((2,), 1)
    assert facts.config["tie_word_embeddings"] is True
    assert facts.config["rope_parameters"]["rope_theta"] == 100000.0
    (group,) = facts.cache_groups
    assert (type(group), group.layers, group.kv_heads, group.key_dim, group.value_dim) == (
        FullAttention, tuple(range(30)), 3, 64, 64,
    )  # fmt: skip


def test_facts_need_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from srv.models.locate import locate; from srv.models.read import read_facts;"
        "print(read_facts(locate(None)).layers, sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "30 []"


def test_a_file_that_rotates_a_part_of_each_head_is_refused(tmp_path: Path) -> None:
    """llama.cpp computes that; the native layers of these models do not, and transformers ignores it."""
    renamed = {name.replace("llama.", "qwen2."): value for name, value in LLAMA.items()}
    metadata = {**renamed, "general.architecture": "qwen2", "qwen2.rope.dimension_count": 2}
    path = written(tmp_path, file_of(metadata, [EMBEDDING]))
    with pytest.raises(ModelError, match="this GGUF file rotates a part of each head") as caught:
        built(path)
    assert caught.value.code == "unsupported_architecture"
