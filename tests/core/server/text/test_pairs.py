"""Pairs of texts are joined as transformers joins them, and templates ask what their files say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pooled_models import tokenizer
from tokenizers.normalizers import Lowercase
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from srv.errors import ModelError, RequestError
from srv.models.score_template import SCORE_TEMPLATES, ScoreTemplate, read_score_template
from srv.server.text.checks import check_case
from srv.server.text.encoded_template import answer_tokens
from srv.server.text.tokenizer import load_tokenizer
from srv.server.text.truncation import without_end
from srv.types import PooledHead

FIELDS = {"prefix": "<", "body": "{query}|{document}", "suffix": ">", "instruction": ""}


@pytest.mark.parametrize("keep", [None, 20, 12, 7, 4])
@pytest.mark.parametrize(
    ("first", "second"), [("a b c", "d e f g h i"), ("a b c d e f g h", "i"), ("", "a"), ("a b", "c d")]
)
def test_pairs_are_those_of_transformers(first: str, second: str, keep: int | None, tmp_path: Path) -> None:
    fast = tokenizer()
    fast.save(str(tmp_path / "tokenizer.json"))
    reference = PreTrainedTokenizerFast(tokenizer_object=fast)
    wanted = reference(
        first, second, truncation=keep is not None, max_length=keep, return_token_type_ids=True, verbose=False
    )
    (pair,) = load_tokenizer(str(tmp_path)).encode_pairs([(first, second)], keep)
    types = [0 if pair.types_from is None or at < pair.types_from else 1 for at in range(len(pair.tokens))]
    assert (len(pair.tokens), types.count(1)) == (len(wanted["input_ids"]), wanted["token_type_ids"].count(1))
    assert (pair.tokens, types) == (wanted["input_ids"], wanted["token_type_ids"])


@pytest.mark.parametrize("added", ["[CLS] $A [SEP]", "$A [SEP]", "[CLS] $A", "$A"])
def test_texts_are_shortened_as_in_transformers(added: str, tmp_path: Path) -> None:
    fast = tokenizer()
    fast.post_processor = TemplateProcessing(single=added, special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    fast.save(str(tmp_path / "tokenizer.json"))
    reference = PreTrainedTokenizerFast(tokenizer_object=fast)
    text = load_tokenizer(str(tmp_path))
    for keep in (3, 4, 7):
        wanted = reference("a b c d e f", truncation=True, max_length=keep, verbose=False)["input_ids"]
        assert without_end(text.encode("a b c d e f"), keep, text.affixes) == wanted


def test_a_length_that_leaves_no_text_is_refused(tmp_path: Path) -> None:
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    text = load_tokenizer(str(tmp_path))
    for keep in range(4):
        with pytest.raises(RequestError, match="send at least 4"):
            text.encode_pairs([("a b", "c")], keep)
    for keep in range(3):
        with pytest.raises(RequestError, match="send at least 3"):
            without_end(text.encode("a b c"), keep, text.affixes)
    assert text.encode_pairs([("", "")], 3)[0].tokens == [1, 2, 2]  # it fits as it is


def test_a_template_is_a_name_or_a_file(tmp_path: Path) -> None:
    qwen = read_score_template("qwen3_reranker")
    assert qwen is SCORE_TEMPLATES["qwen3_reranker"]
    text = qwen.filled("q", "d", None)
    assert text.startswith("<Instruct>: Given a web search query, retrieve")
    assert text.endswith("<Query>: q\n<Document>: d")
    assert qwen.suffix == "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    (tmp_path / "own.json").write_text(json.dumps({**FIELDS, "yes": "1", "no": "0"}))
    own_template = read_score_template(str(tmp_path / "own.json"))
    assert (own_template.filled("{document}", "d", None), own_template.yes) == ("{document}|d", "1")


def test_answers_are_single_tokens_of_the_tokenizer_or_those_of_the_checkpoint(tmp_path: Path) -> None:
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    text, qwen = load_tokenizer(str(tmp_path)), SCORE_TEMPLATES["qwen3_reranker"]
    own_template = ScoreTemplate("", "{query}{document}", "", "", yes="no", no="yes")
    named = PooledHead(yes_no=(50, 60))
    assert answer_tokens(qwen, PooledHead(), text) == (4, 5)
    assert answer_tokens(qwen, named, text) == (50, 60)
    assert answer_tokens(own_template, named, text) == (5, 4)  # the checkpoint knows nothing of this template
    with pytest.raises(ModelError, match="not single tokens"):
        answer_tokens(replace(own_template, no="nay"), PooledHead(), text)


def test_texts_in_lower_case_need_a_tokenizer_that_makes_them_so(tmp_path: Path) -> None:
    fast = tokenizer()
    fast.save(str(tmp_path / "tokenizer.json"))
    check_case(PooledHead(), load_tokenizer(str(tmp_path)))
    with pytest.raises(ModelError, match="do_lower_case"):
        check_case(PooledHead(lower_case=True), load_tokenizer(str(tmp_path)))
    fast.normalizer = Lowercase()
    fast.save(str(tmp_path / "tokenizer.json"))
    check_case(PooledHead(lower_case=True), load_tokenizer(str(tmp_path)))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "is not JSON"),
        ("[]", "not an object of texts"),
        (json.dumps({**FIELDS, "yes": 1}), "not an object of texts"),
        (json.dumps({**FIELDS, "body": "{query}"}), "lacks {document} in body"),
        (json.dumps({"prefix": ""}), "lacks body, suffix, instruction"),
        (json.dumps({**FIELDS, "more": ""}), "it has more"),
    ],
)
def test_a_faulty_template_is_refused(content: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(content)
    with pytest.raises(ModelError, match=text) as caught:
        read_score_template(str(tmp_path / "own.json"))
    assert caught.value.code == "bad_score_template"
    with pytest.raises(ModelError, match="no file that can be read"):
        read_score_template("qwen4")
