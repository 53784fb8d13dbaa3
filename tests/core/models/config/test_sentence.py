"""The files of sentence-transformers: what is read of them, and which of their faults are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from args_world import CONFIG

from srv.errors import ModelError
from srv.models.config.sentence import Sentence, read_sentence
from srv.models.read import read_facts

HIDDEN = 48
PROMPTS = "config_sentence_transformers.json"
LIMITS = "sentence_bert_config.json"
DENSE = {"activation_function": "torch.nn.Identity"}


def write(folder: Path, **files: Any) -> Path:
    """`files`: the JSON of each, by its name."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
    return folder


def modules(*more: tuple[str, str]) -> list[dict[str, str]]:
    """The list in modules.json; `more`: (kind, folder) of the modules after pooling."""
    listed = [("Transformer", ""), ("Pooling", "1_Pooling"), *more]
    return [{"type": f"sentence_transformers.models.{kind}", "path": folder} for kind, folder in listed]


def read(folder: Path, **files: Any) -> Sentence:
    return read_sentence(write(folder, **files), {}, HIDDEN, 0)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        (PROMPTS, {"prompts": {"query": None}}, "not an object of texts"),
        (PROMPTS, {"prompts": ["query"]}, "not an object of texts"),
        (PROMPTS, {"prompts": {"query": ""}, "default_prompt_name": ["query"]}, "default_prompt_name"),
        (PROMPTS, {"prompts": {"query": ""}, "default_prompt_name": "document"}, "default_prompt_name"),
        (LIMITS, {"max_seq_length": "512"}, "max_seq_length"),
        (LIMITS, {"do_lower_case": 1}, "do_lower_case"),
        ("modules.json", [{"type": "x.Dense", "path": None}], "texts type and path"),
    ],
)
def test_a_faulty_file_is_named(file: str, content: object, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        read(tmp_path, **{"modules.json": modules(), file: content})
    assert (caught.value.code, caught.value.what) == ("damaged", str(tmp_path / file))


def test_files_that_name_nothing_are_read(tmp_path: Path) -> None:
    empty = {PROMPTS: {"prompts": None, "default_prompt_name": None}, LIMITS: {"max_seq_length": None}}
    found = read(tmp_path, **{"modules.json": modules(), **empty})
    assert (found.head.prompts, found.head.default_prompt, found.max_tokens) == ((), None, None)


def test_a_mode_that_is_stated_twice_is_one_mode(tmp_path: Path) -> None:
    both = {"pooling_mode": "mean", "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    assert read(tmp_path, **{"modules.json": modules(), "1_Pooling/config.json": both}).pooling == "mean"


def test_the_file_of_the_transformer_limits_texts(tmp_path: Path) -> None:
    limits = {LIMITS: {"max_seq_length": 24, "do_lower_case": True}}
    write(tmp_path, **{"config.json": CONFIG, **limits})
    whole = read_facts(tmp_path).context_length
    facts = read_facts(write(tmp_path, **{"modules.json": modules()}))
    assert (facts.context_length, facts.head.lower_case) == (24, True)
    assert whole > 24  # without modules it is no model of sentence-transformers
    assert read_facts(write(tmp_path, **{LIMITS: {"max_seq_length": 10 * whole}})).context_length == whole


@pytest.mark.parametrize(
    ("sizes", "stored", "reason"),
    [
        ([(HIDDEN, 20), (20, 8)], 2, ""),
        ([(HIDDEN, 20), (20, 8)], 1, "its weights 3_Dense/model.safetensors are missing"),
        ([(HIDDEN + 1, 20)], 1, "2_Dense reads 49 elements, and 48 precede it"),
        ([(HIDDEN, 20), (21, 8)], 2, "3_Dense reads 21 elements, and 20 precede it"),
    ],
)
def test_dense_layers_follow_one_another(
    sizes: list[tuple[int, int]], stored: int, reason: str, tmp_path: Path
) -> None:
    folders = [f"{number}_Dense" for number in range(2, 2 + len(sizes))]
    configs = {
        f"{folder}/config.json": {**DENSE, "in_features": inputs, "out_features": outputs}
        for folder, (inputs, outputs) in zip(folders, sizes, strict=True)
    }
    write(tmp_path, **configs)
    for folder in folders[:stored]:
        (tmp_path / folder / "model.safetensors").touch()
    head = read(tmp_path, **{"modules.json": modules(*(("Dense", folder) for folder in folders))}).head
    assert head.unsupported == reason
    assert head.dense_bytes == (0 if reason else 4 * (48 * 20 + 20 + 20 * 8 + 8))
