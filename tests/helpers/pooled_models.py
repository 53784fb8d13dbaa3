"""Small random encoders and classifiers of transformers, saved with a tokenizer and the files of sentence-transformers.

The tokenizer has one token per letter, and joins texts as BERT's does, or RoBERTa's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from models_small import randomized
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    DistilBertForSequenceClassification,
    DistilBertModel,
    EuroBertConfig,
    EuroBertForMaskedLM,
    EuroBertForSequenceClassification,
    EuroBertModel,
    Gemma3TextConfig,
    Gemma3TextForSequenceClassification,
    Gemma3TextModel,
    GteConfig,
    GteForMaskedLM,
    GteForSequenceClassification,
    GteModel,
    JinaEmbeddingsV3Config,
    JinaEmbeddingsV3ForMaskedLM,
    JinaEmbeddingsV3ForSequenceClassification,
    JinaEmbeddingsV3Model,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    MistralConfig,
    MistralForSequenceClassification,
    MistralModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
    ModernBertModel,
    MPNetConfig,
    MPNetForMaskedLM,
    MPNetForSequenceClassification,
    MPNetModel,
    NomicBertConfig,
    NomicBertForMaskedLM,
    NomicBertForSequenceClassification,
    NomicBertModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

POSITIONS = 64
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROBERTA: dict[str, Any] = {**SIZES, "max_position_embeddings": POSITIONS + 2, "pad_token_id": 1}
MODERN: dict[str, Any] = {**SIZES, "cls_token_id": 1, "sep_token_id": 2}
DISTILLED: dict[str, Any] = {
    **{name: SIZES[name] for name in ("vocab_size", "max_position_embeddings", "initializer_range", "pad_token_id")},
    **{"dim": 48, "hidden_dim": 80, "n_layers": 4, "n_heads": 3},
}
DECODER: dict[str, Any] = {**SIZES, "num_key_value_heads": 1, "head_dim": 16}
GEMMA: dict[str, Any] = {**DECODER, "query_pre_attn_scalar": 16, "sliding_window": 8, "sliding_window_pattern": 2}
EURO: dict[str, Any] = {**DECODER, "mask_token_id": 3}
# By name: the class, and its configuration.
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bert": (BertModel, BertConfig, SIZES),
    "bert masked": (BertForMaskedLM, BertConfig, {**SIZES, "hidden_act": "gelu_new"}),
    "bert classifier": (BertForSequenceClassification, BertConfig, {**SIZES, "num_labels": 3}),
    "bert scorer": (BertForSequenceClassification, BertConfig, {**SIZES, "num_labels": 1}),
    "roberta": (RobertaModel, RobertaConfig, {**ROBERTA, "type_vocab_size": 1}),
    "roberta masked": (RobertaForMaskedLM, RobertaConfig, ROBERTA),
    "roberta classifier": (RobertaForSequenceClassification, RobertaConfig, {**ROBERTA, "num_labels": 2}),
    "xlm-roberta": (XLMRobertaModel, XLMRobertaConfig, {**ROBERTA, "type_vocab_size": 1}),
    "xlm-roberta masked": (XLMRobertaForMaskedLM, XLMRobertaConfig, ROBERTA),
    "xlm-roberta scorer": (XLMRobertaForSequenceClassification, XLMRobertaConfig, {**ROBERTA, "num_labels": 1}),
    "modernbert": (ModernBertModel, ModernBertConfig, {**MODERN, "local_attention": 8}),
    "modernbert masked": (
        ModernBertForMaskedLM,
        ModernBertConfig,
        {**MODERN, "local_attention": 6, "norm_bias": True, "attention_bias": True, "mlp_bias": True},
    ),
    "modernbert classifier": (
        ModernBertForSequenceClassification,
        ModernBertConfig,
        {**MODERN, "local_attention": 8, "num_labels": 2},
    ),
    "modernbert mean classifier": (
        ModernBertForSequenceClassification,
        ModernBertConfig,
        {**MODERN, "num_labels": 2, "classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True},
    ),
    "gte": (GteModel, GteConfig, SIZES),
    "gte masked": (GteForMaskedLM, GteConfig, {**SIZES, "type_vocab_size": 0, "hidden_act": "silu"}),
    "gte classifier": (GteForSequenceClassification, GteConfig, {**SIZES, "type_vocab_size": 2, "num_labels": 3}),
    "nomic": (NomicBertModel, NomicBertConfig, SIZES),
    "nomic masked": (NomicBertForMaskedLM, NomicBertConfig, {**SIZES, "head_dim": 8, "hidden_act": "gelu"}),
    "nomic classifier": (NomicBertForSequenceClassification, NomicBertConfig, {**SIZES, "num_labels": 3}),
    "jina": (JinaEmbeddingsV3Model, JinaEmbeddingsV3Config, SIZES),
    "jina masked": (JinaEmbeddingsV3ForMaskedLM, JinaEmbeddingsV3Config, SIZES),
    "jina scorer": (JinaEmbeddingsV3ForSequenceClassification, JinaEmbeddingsV3Config, {**SIZES, "num_labels": 1}),
    "distilbert": (DistilBertModel, DistilBertConfig, DISTILLED),
    "distilbert masked": (DistilBertForMaskedLM, DistilBertConfig, {**DISTILLED, "sinusoidal_pos_embds": True}),
    "distilbert classifier": (DistilBertForSequenceClassification, DistilBertConfig, {**DISTILLED, "num_labels": 3}),
    "mpnet": (MPNetModel, MPNetConfig, ROBERTA),
    "mpnet masked": (MPNetForMaskedLM, MPNetConfig, {**ROBERTA, "hidden_act": "relu"}),
    "mpnet classifier": (MPNetForSequenceClassification, MPNetConfig, {**ROBERTA, "num_labels": 3}),
    "eurobert": (EuroBertModel, EuroBertConfig, EURO),
    "eurobert masked": (EuroBertForMaskedLM, EuroBertConfig, {**EURO, "attention_bias": True, "mlp_bias": True}),
    "eurobert classifier": (
        EuroBertForSequenceClassification,
        EuroBertConfig,
        {**EURO, "num_labels": 3, "classifier_pooling": "mean"},
    ),
    "eurobert scorer": (
        EuroBertForSequenceClassification,
        EuroBertConfig,
        {**EURO, "num_labels": 1, "classifier_pooling": "bos"},
    ),
    "gemma3 alone": (Gemma3TextModel, Gemma3TextConfig, {**GEMMA, "use_bidirectional_attention": True}),
    "gemma3 causal": (Gemma3TextModel, Gemma3TextConfig, GEMMA),
    "gemma3 classifier": (
        Gemma3TextForSequenceClassification,
        Gemma3TextConfig,
        {**GEMMA, "use_bidirectional_attention": True, "num_labels": 3},
    ),
    "qwen3 alone": (Qwen3Model, Qwen3Config, DECODER),
    "qwen3 generator": (Qwen3ForCausalLM, Qwen3Config, DECODER),
    "qwen3 classifier": (Qwen3ForSequenceClassification, Qwen3Config, {**DECODER, "num_labels": 3}),
    "llama alone": (LlamaModel, LlamaConfig, DECODER),
    "llama classifier": (LlamaForSequenceClassification, LlamaConfig, {**DECODER, "num_labels": 2}),
    "mistral alone": (MistralModel, MistralConfig, DECODER),
    "mistral classifier": (MistralForSequenceClassification, MistralConfig, {**DECODER, "num_labels": 2}),
    "qwen2 alone": (Qwen2Model, Qwen2Config, DECODER),
    "qwen2 classifier": (Qwen2ForSequenceClassification, Qwen2Config, {**DECODER, "num_labels": 1}),
}
_SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "yes", "no"]


def tokenizer(pairs: bool = True) -> Tokenizer:
    """`pairs`: the second text of a pair has type 1, as in BERT; otherwise all tokens have type 0."""
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL, *(chr(code) for code in range(33, 123))])}
    word_level = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    word_level.normalizer = normalizers.NFC()
    word_level.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("", "isolated")]
    )
    word_level.add_special_tokens(_SPECIAL)
    word_level.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1" if pairs else "[CLS] $A [SEP] [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return word_level


def pooled_model(name: str, folder: Path, **fields: Any) -> Any:
    """A model of `MODELS` in float32, saved to `folder` with a tokenizer; `fields`: changes to its configuration."""
    kind, config, sizes = MODELS[name]
    torch.manual_seed(7)
    model = randomized(kind(config(**{**sizes, **fields})).float())
    model.save_pretrained(folder)
    tokenizer("roberta" not in name).save(str(folder / "tokenizer.json"))
    return model


def write_modules(folder: Path, pooling: dict[str, object], *more: tuple[str, str, dict[str, object]]) -> None:
    """The files of sentence-transformers. `more`: (kind, folder, config) of the modules after pooling."""
    modules = [("Transformer", "", {}), ("Pooling", "1_Pooling", pooling), *more]
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path, _) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for _, path, config in modules:
        if path:
            (folder / path).mkdir(exist_ok=True)
            if config:
                (folder / path / "config.json").write_text(json.dumps(config))
