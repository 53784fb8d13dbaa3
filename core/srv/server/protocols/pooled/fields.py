"""The fields of the bodies of `/rerank`, `/score` and `/classify`.

Source: the APIs of Jina and Cohere for the first, vLLM's for all. Must not know how a request is served.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PlainValidator

from srv.server.protocols.openai.fields import PromptInput
from srv.server.request.fields import Refused, field_error, json_type
from srv.server.request.sampling_fields import NamedBody, PooledTruncation, Salt, TokenIds, User

_ACTIVATE = "Turn logits into scores as the model's files say (default true)."
Image = Annotated[object, Refused("images and audio")]
Priority = Annotated[object, Refused("all requests have the same priority")]


class PooledBody(NamedBody):
    """What these bodies share."""

    model: str | None = Field(None, description="The name of the served model; optional.")
    use_activation: bool | None = Field(None, description=_ACTIVATE)
    activation: bool | None = Field(None, description="The older name of use_activation.")
    truncate_prompt_tokens: PooledTruncation = None
    cache_salt: Salt = None
    extra_key: Salt = None

    user: User = None

    truncation_side: Annotated[object, Refused("the longer text of a pair loses its end")] = None
    priority: Priority = None
    mm_processor_kwargs: Image = None
    lora_path: Annotated[object, Refused("adapters")] = None

    @property
    def activates(self) -> bool:
        return (self.activation if self.use_activation is None else self.use_activation) is not False


def _text(value: object) -> str:
    """A text, or the one of an object as in the APIs of Jina and Cohere."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and set(value) == {"text"} and isinstance(value["text"], str):
        return value["text"]
    if isinstance(value, dict):
        raise field_error("invalid_value", 'must be a string or an object with "text" alone')
    raise field_error("invalid_type", f'must be a string or an object with "text", not {json_type(value)}')


def _texts(value: object) -> list[str]:
    """A text, or an array of texts; [] for null."""
    if value is None:
        return []
    if isinstance(value, list) and value and all(isinstance(element, str) for element in value):
        return value
    if isinstance(value, str):
        return [value]
    if value == []:
        raise field_error("invalid_value", "is empty; send at least one text")
    raise field_error("invalid_type", "must be a string or an array of strings")


Document = Annotated[str, PlainValidator(_text, json_schema_input_type=str | dict[str, str])]
Texts = Annotated[list[str], PlainValidator(_texts, json_schema_input_type=str | list[str])]
Instruction = Annotated[
    str | None,
    Field(max_length=4096, description="What documents are judged by, for models that are asked by a template."),
]


class RerankBody(PooledBody):
    RENAMED = {"texts": "documents", "top_k": "top_n"}  # noqa: RUF012

    query: Document = Field(description="What the documents are compared with.")
    documents: list[Document] = Field(min_length=1, description='Texts, or objects with "text".')
    top_n: int | None = Field(None, ge=0, description="Return this many of the best documents (default 0: all).")
    return_documents: bool | None = Field(None, description="Return the texts of the documents (default true).")
    instruction: Instruction = None

    max_tokens_per_doc: Annotated[object, Refused("use truncate_prompt_tokens")] = None
    max_chunks_per_doc: Annotated[object, Refused("a document is one text; use truncate_prompt_tokens")] = None
    overlap_tokens: Annotated[object, Refused("a document is one text")] = None
    rank_fields: Annotated[object, Refused("documents are texts")] = None


class ScoreBody(PooledBody):
    RENAMED = {  # noqa: RUF012 - a ClassVar by its declaration in the base
        "queries": "text_1",
        "documents": "text_2",
        "data_1": "text_1",
        "data_2": "text_2",
    }

    text_1: Texts = Field([], description="A text, or one for each of text_2.")
    text_2: Texts = Field([], description="A text, or an array of texts, each compared with text_1.")
    query: PromptInput = Field(None, description="SGLang's form: a text or token ids, beside items.")
    items: PromptInput = Field(None, description="A text, or an array of texts or of arrays of token ids.")
    label_token_ids: TokenIds = Field((), description="The tokens whose probabilities after query and item are scores.")
    apply_softmax: bool | None = Field(None, description="Probabilities among label_token_ids, not among all tokens.")
    item_first: bool | None = Field(None, description="The item stands before the query.")
    instruction: Instruction = None

    encoding_format: Annotated[object, Refused("scores are numbers")] = None


class ClassifyBody(PooledBody):
    RENAMED = {"text": "input", "prompt": "input"}  # noqa: RUF012

    input: PromptInput = Field(description="A text, or an array of texts, of token ids, or of arrays of token ids.")
    add_special_tokens: bool | None = Field(None, description="Add the tokenizer's special tokens (default true).")

    messages: Annotated[object, Refused("conversations as input; send text")] = None
