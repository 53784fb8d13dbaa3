"""Special tokens that are markers of a reply format have text, while all others are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from srv.server.text.tokenizer import ModelTextProcessor
from srv.server.text.tokenizers.folder import read_folder

WORDS = {"a": 0, "b": 1}
SPECIAL = ("<call>", "<|x|>", "<end>")
CALL, BAR, END = 2, 3, 4


@pytest.fixture(params=["bytes", "windows"])
def text(request: pytest.FixtureRequest, tmp_path: Path) -> ModelTextProcessor:
    """With a decoder whose tokens have bytes, and with one that decodes sequences."""
    if request.param == "bytes":
        tokenizer = Tokenizer(models.BPE(vocab=WORDS, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return ModelTextProcessor(read_folder(tmp_path), None, "test")


def shown(text: ModelTextProcessor, skip: bool, keep: tuple[str, ...]) -> str:
    target = text.detokenizer([END], (), skip, False, keep)
    tokens = [0, CALL, 1, BAR, END]
    parts = [target.push([token], False).text for token in tokens]
    return "".join([*parts, target.push([], True).text]).replace(" ", "")


def test_markers_are_kept(text: ModelTextProcessor) -> None:
    assert shown(text, True, ()) == "ab"
    assert shown(text, True, ("<call>", "</call>")) == "a<call>b"
    assert shown(text, True, ("<call>",)) == "a<call>b"
    assert shown(text, True, ("<tag <|x|>tag>",)) == "ab<|x|>", "a marker may contain a special token"
    assert shown(text, False, ("<call>",)) == "a<call>b<|x|><end>"
