"""Encoders and classification heads in the whole engine: they compute what transformers does, alone and in batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from models_small import built
from planned_sizes import check_sizes
from pooled_engine import PROMPTS, close, engine, pooled, states_of, vector
from pooled_models import MODELS, POSITIONS, pooled_model, write_modules
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

from srv.errors import ModelError, Refusal
from srv.models import derive
from srv.models.config.tensor_notes import tensor_notes
from srv.models.families.trees import native_tree
from srv.models.read import read_facts
from srv.testing.pooled import pooled_reference
from srv.types import PooledOutput, Pooling

ENCODERS = (
    "bert",
    "bert masked",
    "roberta",
    "xlm-roberta",
    "xlm-roberta masked",
    "modernbert",
    "modernbert masked",
    "gte",
    "gte masked",
    "nomic",
    "nomic masked",
    "jina",
    "jina masked",
    "distilbert",
    "distilbert masked",
    "mpnet",
    "mpnet masked",
    "eurobert",
    "eurobert masked",
    "gemma3 alone",
    "gemma3 causal",
    "qwen3 alone",
)
CLASSIFIERS = (
    "bert classifier",
    "roberta classifier",
    "xlm-roberta scorer",
    "modernbert classifier",
    "modernbert mean classifier",
    "gte classifier",
    "nomic classifier",
    "jina scorer",
    "distilbert classifier",
    "mpnet classifier",
    "eurobert classifier",
    "eurobert scorer",
    "gemma3 classifier",
    "qwen3 classifier",
    "llama classifier",
)


LAST = ("qwen3 alone", "gemma3 causal")  # whose tokens do not attend to later ones


def pool_of(name: str) -> tuple[str, ...]:
    """A small pool for the models that keep keys."""
    return ("--max-total-tokens", "512") if name.startswith(("qwen3", "llama", "gemma3 causal")) else ()


def of_each(names: Sequence[str], fast: Sequence[str]) -> Any:
    """A case for each name; those that take another path than the fast ones only in names are slow."""
    cases = [pytest.param(each, marks=() if each in fast else pytest.mark.slow) for each in names]
    return pytest.mark.parametrize("name", cases)


@of_each(ENCODERS, ("bert", "xlm-roberta", "modernbert", "gte", "mpnet", "gemma3 alone"))
def test_pooled_states_are_those_of_transformers_alone_and_in_a_batch(name: str, tmp_path: Path) -> None:
    model = pooled_model(name, tmp_path)
    facts = read_facts(tmp_path)
    tree = native_tree(facts.architecture, facts.config)
    assert derive.parameters(tree) == sum(each.numel() for each in _served(model).parameters())
    check_sizes(tmp_path, built(tmp_path))
    poolings = list(Pooling) if name in ("bert", "modernbert") else [Pooling.MEAN]
    with engine(tmp_path, "--is-embedding", *pool_of(name)) as running:
        assert running.context.resolved.config.model.pooling == ("last" if name in LAST else "mean")
        for pooling in poolings:
            specs = [pooled(str(number), each, pooling) for number, each in enumerate(PROMPTS)]
            alone = [running.generate([each])[0] for each in specs]
            together = running.generate(
                [*specs[::-1], *(pooled(f"again {each.id}", each.tokens, pooling) for each in specs)]
            )
            for prompt, one, other in zip(PROMPTS, alone, together[3::-1], strict=True):
                close(vector(one), normalize(pooled_reference(states_of(model, prompt), pooling), dim=0))
                close(vector(other), vector(one))


def _served(model: Any) -> Any:
    """The part of a model of transformers that is served, without the pooler of BERT."""
    encoder = getattr(model, model.base_model_prefix, model)
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    return encoder


@of_each(CLASSIFIERS, ("bert classifier", "modernbert mean classifier", "qwen3 classifier"))
def test_logits_of_labels_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = pooled_model(name, tmp_path)
    facts = read_facts(tmp_path)
    assert facts.parameters == sum(each.numel() for each in model.parameters())
    assert derive.parameters(native_tree(facts.architecture, facts.config)) == facts.parameters
    check_sizes(tmp_path, built(tmp_path))
    with engine(tmp_path, *pool_of(name)) as running:
        pooling = Pooling(running.context.resolved.config.model.pooling)
        half = {"types_from": 2} if name == "bert classifier" else {}
        results = running.generate(
            [
                pooled(str(number), each, pooling, output=PooledOutput.LABELS, **(half if len(each) > 2 else {}))
                for number, each in enumerate(PROMPTS)
            ]
        )
    for prompt, result in zip(PROMPTS, results, strict=True):
        types = {}
        if half and len(prompt) > 2:
            types = {"token_type_ids": torch.tensor([[0, 0] + [1] * (len(prompt) - 2)])}
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt]), **types).logits[0]
        close(vector(result), logits)


@every("name", sorted(set(MODELS) - {*ENCODERS, *CLASSIFIERS, "qwen3 generator"}))
def test_planned_sizes_of_other_classes_are_those_that_are_loaded(name: str, tmp_path: Path) -> None:
    pooled_model(name, tmp_path)
    check_sizes(tmp_path, built(tmp_path))


def test_an_encoder_has_no_pool_and_takes_prompts_whole(tmp_path: Path) -> None:
    pooled_model("bert", tmp_path)
    with engine(tmp_path, "--max-prefill-tokens", "16") as running:
        config = running.context.resolved.config
        assert (config.schedule.chunked_prefill_size, config.memory.disable_radix_cache) == (-1, True)
        assert running.ready.pages == [6]
        assert running.ready.max_request_tokens == POSITIONS
        assert ("page", "no KV pool: all layers attend within one step, and 6 requests may run at a time") in (
            running.ready.budget
        )
        results = running.generate([pooled(str(number), PROMPTS[3], Pooling.MEAN) for number in range(8)])
        assert {result.vectors for result in results} == {results[0].vectors}
        assert all(result.cached_tokens == 0 for result in results)
        (refused,) = running.generate([pooled("long", [5] * (POSITIONS + 1), Pooling.MEAN)])
        assert refused.error is not None
        assert refused.error[0] == "context_length_exceeded"


@pytest.mark.slow
@every("name", ["modernbert", "mpnet classifier"])
def test_two_ranks_divide_an_encoder(name: str, tmp_path: Path) -> None:
    """Fused projections, biases of distances and heads: the vectors of one rank, with about half of the weights."""
    pooled_model(name, tmp_path, num_attention_heads=4, vocab_size=96)
    specs = [
        pooled(str(number), each, Pooling.CLS if name.endswith("classifier") else Pooling.MEAN)
        for number, each in enumerate(PROMPTS)
    ]
    with engine(tmp_path, "--is-embedding") as one, engine(tmp_path, "--is-embedding", "--tp-size", "2") as two:
        for alone, together in zip(one.generate(specs), two.generate(specs), strict=True):
            close(vector(together), vector(alone))
        (whole,), parts = one.executor.measure(), two.executor.measure()
        assert all(part.weight_bytes < 0.6 * whole.weight_bytes for part in parts)
        assert two.context.kernels.differences(two.ready.kernels) == {}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--chunked-prefill-size", "32"), "chunked_prefill_size"),
        (("--attention-backend", "native"), "it does not support attention to later tokens"),
        (("--speculative-algorithm", "NGRAM"), "generates no text that could be drafted"),
        (("--context-length", "65"), "65"),
        (("--tp-size", "3"), "its 2 attention heads are not a multiple of 3"),
        (("--score-template", "qwen3_reranker"), "generates no text that could answer yes or no"),
    ],
)
def test_what_an_encoder_cannot_is_refused(arguments: tuple[str, str], text: str, tmp_path: Path) -> None:
    pooled_model("bert", tmp_path, num_attention_heads=2)
    with pytest.raises(Refusal, match=text), engine(tmp_path, *arguments):
        pass


def test_biases_of_all_distances_are_those_of_transformers(tmp_path: Path) -> None:
    """Of those beyond the prompts of other tests as well: the ends of the table are those of greater distances."""
    model = pooled_model("mpnet", tmp_path)
    values = torch.tensor(built(tmp_path).attention_layers[0].bias_values)
    most = values.shape[1] // 2
    distances = torch.arange(-3 * most, 3 * most + 1)
    expected = model.encoder.relative_attention_bias(model.encoder.relative_position_bucket(distances)).T
    assert torch.equal(values[:, distances.clamp(-most, most) + most], expected)


def test_a_decoder_whose_output_layer_is_not_stored_serves_embeddings(tmp_path: Path) -> None:
    """As Qwen3-Embedding-8B: its configuration names the class that generates text, and ties nothing."""
    model = pooled_model("qwen3 generator", tmp_path)
    generator, stored = read_facts(tmp_path), load_file(tmp_path / "model.safetensors")
    del stored["lm_head.weight"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_modules(tmp_path, {"pooling_mode_lasttoken": True}, ("Normalize", "2_Normalize", {}))
    facts = read_facts(tmp_path)
    assert (generator.architecture, generator.generates, generator.headless) == ("Qwen3ForCausalLM", True, False)
    assert (facts.architecture, facts.generates, facts.headless) == ("Qwen3Model", False, True)
    assert facts.parameters == sum(each.numel() for each in stored.values())
    (note,) = tensor_notes(facts, tmp_path)
    assert "names a class that generates text, but its weights have no output layer: it is served for" in note
    with engine(tmp_path, *pool_of("qwen3")) as running:
        assert running.context.resolved.config.model.is_embedding
        results = running.generate([pooled(str(number), each, Pooling.LAST) for number, each in enumerate(PROMPTS)])
    for prompt, result in zip(PROMPTS, results, strict=True):
        close(vector(result), normalize(pooled_reference(states_of(model, prompt), Pooling.LAST), dim=0))


def test_a_head_reads_what_it_was_trained_on(tmp_path: Path) -> None:
    pooled_model("bert scorer", tmp_path)
    with pytest.raises(Refusal, match="pooled as cls"), engine(tmp_path, "--pooling", "mean"):
        pass


def test_embeddinggemma_as_published(tmp_path: Path) -> None:
    """Weights without the prefix of the decoder; the mean, two dense layers without bias or activation, and a norm."""
    model = pooled_model("gemma3 alone", tmp_path)
    assert "layers.0.self_attn.q_proj.weight" in load_file(tmp_path / "model.safetensors")
    sizes = {"2_Dense": (48, 80), "3_Dense": (80, 48)}
    linear = [torch.nn.Linear(*each, bias=False) for each in sizes.values()]
    identity = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    dense = [
        ("Dense", folder, {"in_features": inputs, "out_features": outputs, **identity})
        for folder, (inputs, outputs) in sizes.items()
    ]
    write_modules(tmp_path, {"pooling_mode_mean_tokens": True}, *dense, ("Normalize", "4_Normalize", {}))
    for folder, layer in zip(sizes, linear, strict=True):
        save_file({"linear.weight": layer.weight.detach()}, tmp_path / folder / "model.safetensors")
    with engine(tmp_path) as running:
        assert running.context.resolved.config.model.pooling == "mean"
        assert running.ready.pages == [6]  # no KV pool
        results = running.generate([pooled(str(number), each, Pooling.MEAN) for number, each in enumerate(PROMPTS)])
    for prompt, result in zip(PROMPTS, results, strict=True):
        mean = pooled_reference(states_of(model, prompt), Pooling.MEAN)
        close(vector(result), normalize(linear[1](linear[0](mean)), dim=0).detach())


def test_dense_layers_and_the_norm_are_those_of_the_files(tmp_path: Path) -> None:
    """sentence-transformers: pooling, Dense (linear, then its activation), and no norm unless a module says so."""
    model = pooled_model("bert", tmp_path)
    dense = {
        "in_features": 48,
        "out_features": 20,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    write_modules(tmp_path, {"pooling_mode_max_tokens": True}, ("Dense", "2_Dense", dense))
    linear = torch.nn.Linear(48, 20)
    stored = {f"linear.{name}": tensor.detach() for name, tensor in linear.named_parameters()}
    save_file(stored, tmp_path / "2_Dense" / "model.safetensors")
    head = read_facts(tmp_path).head
    assert (head.normalize, head.dense[0].outputs, head.unsupported) == (False, 20, "")
    with engine(tmp_path) as running:
        (weights,) = (line for line in running.ready.memory[0] if line.name == "weights")
        assert weights.predicted == weights.measured
        (result,) = running.generate([pooled("a", PROMPTS[1], Pooling.MAX, normalize=False)])
    close(vector(result), torch.tanh(linear(pooled_reference(states_of(model, PROMPTS[1]), Pooling.MAX))).detach())
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(Refusal, match=r"2_Dense/model.safetensors, which is not in its folder"), engine(tmp_path):
        pass


def test_deterministic_dense_layers_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    pooled_model("qwen3 alone", tmp_path)
    dense = {"in_features": 48, "out_features": 20, "bias": False}
    write_modules(tmp_path, {"pooling_mode_lasttoken": True}, ("Dense", "2_Dense", dense))
    save_file({"linear.weight": torch.randn(20, 48)}, tmp_path / "2_Dense" / "model.safetensors")
    with engine(tmp_path, *pool_of("qwen3 alone"), "--enable-deterministic-inference") as running:
        (alone,) = running.generate([pooled("alone", PROMPTS[0], Pooling.LAST)])
        batch = running.generate([pooled(str(number), PROMPTS[0], Pooling.LAST) for number in range(6)])
    assert len(vector(alone)) == 20
    assert {result.vectors for result in batch} == {alone.vectors}


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ([("CNN", "2_CNN", {"in_word_embedding_dimension": 48})], r"2_CNN \(CNN\) is not implemented"),
        ([("Dense", "2_Dense", {"in_features": 48})], "2_Dense/config.json has no in_features and out_features"),
        (
            [("Normalize", "2_Normalize", {}), ("Dense", "3_Dense", {"in_features": 48, "out_features": 4})],
            "3_Dense follows the norm",
        ),
        (
            [("Dense", "2_Dense", {"in_features": 48, "out_features": 1, "activation_function": "x.SiLU"})],
            "activation SiLU",
        ),
    ],
)
def test_modules_that_are_not_computed_are_refused(more: list[Any], text: str, tmp_path: Path) -> None:
    pooled_model("bert", tmp_path)
    write_modules(tmp_path, {"pooling_mode_mean_tokens": True}, *more)
    with pytest.raises(Refusal, match=text), engine(tmp_path):
        pass


def test_a_module_outside_the_folder_is_refused(tmp_path: Path) -> None:
    pooled_model("bert", tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "../elsewhere", "type": "x.Dense"}]))
    with pytest.raises(ModelError, match="leaves the folder"):
        read_facts(tmp_path)


def test_old_names_of_norms_are_read(tmp_path: Path) -> None:
    """Checkpoints that were converted from TensorFlow call the weights of a norm gamma and beta."""
    model = pooled_model("bert masked", tmp_path)
    file = tmp_path / "model.safetensors"
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(file).items()
    }
    assert {name.rpartition(".")[2] for name in renamed if ".LayerNorm." in name} == {"gamma", "beta"}
    save_file(renamed, file, metadata={"format": "pt"})
    with engine(tmp_path) as running:
        (result,) = running.generate([pooled("a", PROMPTS[0], Pooling.CLS)])
    close(vector(result), normalize(states_of(model, PROMPTS[0])[0], dim=0))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"is_decoder": True}, "is_decoder"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_act": "silu"}, "hidden_act"),
        ({"architectures": ["JinaBertForMaskedLM"]}, "JinaBertForMaskedLM"),
        ({"architectures": ["MegatronBertModel"]}, "MegatronBertModel"),
        (
            {"architectures": ["MPNetModel"], "relative_attention_num_buckets": 16},
            "relative_attention_num_buckets = 16",
        ),
    ],
)
def test_relatives_that_differ_are_refused_by_name(fields: dict[str, Any], text: str, tmp_path: Path) -> None:
    pooled_model("bert", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises((ModelError, Refusal), match=text), engine(tmp_path, "--model-impl", "srv"):
        pass
