"""Fill in the middle: which tokenizers can, how the parts are marked, and the file of --completion-template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from every import every
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from srv.errors import ModelError
from srv.server.text.fill_in import FILL_INS, FillIn, fill_in_of, read_fill_in
from srv.server.text.tokenizer import ModelTextProcessor
from srv.server.text.tokenizers.folder import read_folder
from srv.testing.fake_engine import ByteTokenizer

EXPECTED = {
    "qwen_coder": "<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|>",
    "star_coder": "<fim_prefix>A<fim_suffix>B<fim_middle>",
    "deepseek_coder": "<｜fim▁begin｜>A<｜fim▁hole｜>B<｜fim▁end｜>",
    "glm_coder": "<|code_prefix|>A<|code_suffix|>B<|code_middle|>",
    "codestral": "[SUFFIX]B[PREFIX]A",
}


def tokenizer_with(folder: Path, markers: list[str]) -> ModelTextProcessor:
    """A tokenizer whose vocabulary has letters, and the markers as special tokens."""
    tokenizer = Tokenizer(models.WordLevel({letter: token for token, letter in enumerate("abAB?")}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
    tokenizer.save(str(folder / "tokenizer.json"))
    return ModelTextProcessor(read_folder(folder), None, "model")


@every("row", FILL_INS)
def test_a_tokenizer_with_all_markers_of_a_family_is_found(row: FillIn, tmp_path: Path) -> None:
    assert row.prompt("A", "B") == EXPECTED[row.name]
    text = tokenizer_with(tmp_path, row.markers)
    assert fill_in_of(text) == row
    assert len(text.encode(row.prompt("a", "bb"), False)) == 3 + len(row.markers)
    assert fill_in_of(tokenizer_with(tmp_path, row.markers[:-1])) is None


def test_a_tokenizer_without_markers_has_none() -> None:
    assert fill_in_of(ByteTokenizer()) is None


@every(("position", "prompt"), [("middle", "<b>A<m>B<e>"), ("END", "<b>A<e>B<m>")])
def test_a_file_says_where_the_middle_token_stands(position: str, prompt: str, tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    fields = {"fim_begin_token": "<b>", "fim_middle_token": "<m>", "fim_end_token": "<e>", "fim_position": position}
    file.write_text(json.dumps({"name": "own", **fields}))
    assert read_fill_in(str(file)).prompt("A", "B") == prompt


@every(
    ("content", "code"),
    [
        (None, "not_found"),
        ("{", "bad_completion_template"),
        ("[]", "bad_completion_template"),
        ("{}", "bad_completion_template"),
    ],
)
def test_another_value_is_refused_with_the_names(content: str | None, code: str, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ModelError) as refused:
        read_fill_in(str(file))
    assert refused.value.code == code
    assert "star_coder" in str(refused.value)


def test_a_name_is_the_family() -> None:
    assert read_fill_in("codestral").suffix_first
