"""Piecewise graphs on the simulated device: the bits of eager steps, and no page that padding wrote."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_toy_engine import Small, messages
from test_toy_graphs import EAGER, PLAIN, _device_pools, _pools, _written, engine
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from srv.errors import Refusal
from srv.types import Pooling, PoolingParams, RequestSpec, SamplingParams
from srv.worker.pieces import PiecewiseSteps
from srv.worker.runner import Runner
from srv_matrix.pytest_plugin import covers

PIECES = "--enable-piecewise-graphs"
TOKENS = "--piecewise-graph-tokens"
CHUNKS = ("--chunked-prefill-size", "5")
EXACT = (PIECES, TOKENS, json.dumps(list(range(1, 12))))  # chunks of 5, and 6 rows
PADDED = (PIECES, TOKENS, "[4, 11]")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with layers of two cache groups: its folder."""
    torch.manual_seed(3)
    config = Gemma3TextConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,
        sliding_window=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )
    folder = tmp_path_factory.mktemp("gemma3")
    Gemma3ForCausalLM(config).eval().save_pretrained(folder)
    return SimpleNamespace(folder=folder)


def results(small: Small, *flags: str, **params: Any) -> list[tuple[list[int], list[float], list[Any]]]:
    """Tokens of each request, their log-probabilities, and those of the prompt."""
    with engine(small, *flags) as served:
        generated = served.generate(messages(small, logprobs=2, prompt_logprobs=1, **params))
        return [
            (result.tokens, [one.logprob for one in result.logprobs], result.prompt_logprobs) for result in generated
        ]


def test_steps_have_the_bits_of_eager_ones(small: Small) -> None:
    """Prompts in chunks of 5, and mixed steps; requests join and leave, so that numbers of tokens change."""
    expected = results(small, *CHUNKS)
    assert [tokens for tokens, *_ in expected] == small.tokens
    assert results(small, *CHUNKS, *EXACT) == expected


def test_padded_steps_give_the_same_tokens_whatever_ran_before(small: Small) -> None:
    with engine(small, *CHUNKS, *PADDED) as served:
        for _ in range(2):  # then with cached prefixes
            assert [result.tokens for result in served.generate(messages(small))] == small.tokens
        stats = served.stats()
        assert (stats.eager_steps, stats.replayed_steps > 0) == (0, True)


def test_vectors_have_the_bits_of_eager_ones(small: Small) -> None:
    requests = [
        RequestSpec(id=f"{number} {pooling}", tokens=tuple(prompt), params=PoolingParams(pooling=pooling))
        for number, prompt in enumerate(small.prompts)
        for pooling in Pooling
    ]
    runs = []
    for flags in (EAGER,), EXACT:
        with engine(small, *CHUNKS, *flags) as served:
            runs.append([bytes(result.vectors) for result in served.generate(requests)])
    assert runs[0] == runs[1]


def test_weights_of_8_bits(small: Small) -> None:
    weights = ("--quantization", "w8a8_int8")
    assert results(small, *EXACT, *CHUNKS, *weights) == results(small, *CHUNKS, *weights)


def test_drafts_and_layer_markers_change_nothing(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "seconds", lambda self, rows, tokens, repeats=5: 1.0)  # so that every draft pays
    drafts = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "3")
    with engine(small, *CHUNKS, *PADDED, *drafts, "--enable-layer-markers") as served:
        repeated = RequestSpec(id="repeated", tokens=(5, 6) * 8, params=messages(small)[0].params)
        *generated, _ = served.generate([*messages(small), repeated])
        assert [result.tokens for result in generated] == small.tokens
        assert served.stats().drafts_proposed > 0
        assert served.stats().eager_steps == 0


def test_several_cache_groups(small: Small, windowed: Any) -> None:
    runs = []
    for flags in (), EXACT:
        with engine(windowed, *CHUNKS, *flags) as served:
            runs.append([result.tokens for result in served.generate(messages(small))])
            assert len(served._engine.executor.worker.runner.eager._attention) == 2  # type: ignore[attr-defined]
    assert runs[0] == runs[1]


def test_padding_writes_no_page(small: Small) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    with engine(small, PLAIN, PIECES, TOKENS, "[64]") as served:
        for pool in _device_pools(served):
            pool[:4] = float("nan")  # page 0: whoever reads it gets NaN
        before = _pools(served)
        (result,) = served.generate([RequestSpec(id="a", tokens=(9, 9, 9, 9, 9), params=params)])
        assert result.error is None
        written = _written(before, _pools(served)) - {0}
        assert len(written) == 2
        assert all(pool[0].isnan().all() for pool in _pools(served))
        stats = served.stats()
        assert (stats.replayed_steps, stats.piecewise_steps) == (1, 1)


def test_pieces_stay_within_what_is_reserved_for_them(small: Small) -> None:
    with engine(small, *CHUNKS, PIECES) as served:
        worker: Any = served._engine.executor.worker  # type: ignore[attr-defined]
        parts = {part.name: part.amount for part in served.context.resolved.quantities["reserved_memory"].parts}
        sizes = [block.host.nbytes() for block in worker.loaded.platform._graphs._memory._blocks.values()]
        (pieces,) = (way for way in worker.runner.ways if isinstance(way, PiecewiseSteps))
        assert 0 < sum(sizes) + pieces.buffers.nbytes() < parts["piecewise graphs"] + parts["graphs"]
    with engine(small) as served:
        parts = {part.name: part.amount for part in served.context.resolved.quantities["reserved_memory"].parts}
        assert parts["piecewise graphs"] == 0


# ---- arguments: two values of each make the engine do something else


def _counts(small: Small, *flags: str) -> tuple[str, int]:
    """The token counts of pieces, and how many steps of a prompt of 23 tokens in chunks of 5 run eagerly."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    with engine(small, PLAIN, *CHUNKS, *flags) as served:
        served.generate([RequestSpec(id="a", tokens=tuple(range(3, 26)), params=params)])
        text = dict(served.ready.budget).get("piecewise graphs", "")
        return text.partition(" tokens ")[0].partition(" for ")[2], served.stats().eager_steps


def _refused(small: Small, *flags: str) -> list[tuple[str, str, str]]:
    with pytest.raises(Refusal) as refusal, engine(small, *flags):
        pass
    return [(rejection.what, rejection.code, rejection.reason) for rejection in refusal.value.rejections]


@covers("enable_piecewise_graphs=false", "enable_piecewise_graphs=true", platform="toy")
def test_enable_piecewise_graphs(small: Small) -> None:
    assert _counts(small) == ("", 5)
    assert _counts(small, PIECES) == ("8, 11", 0)
    reason = "no step is captured (disable_graphs is true)"
    assert _refused(small, PIECES, EAGER) == [("enable_piecewise_graphs", "excluded", reason)]


@covers("piecewise_graph_tokens", platform="toy")
def test_piecewise_graph_tokens(small: Small) -> None:
    assert _counts(small, PIECES, TOKENS, "[4]") == ("4", 4)  # only the last chunk, of 3 tokens
    assert _counts(small, PIECES, TOKENS, "[20, 3, 3]") == ("3, 20", 0)
    assert _counts(small, PIECES, TOKENS, "[3, 20]", "--disable-graph-padding") == ("3, 20", 4)
    reason = "piecewise_graph_max_tokens is 19"
    large = (TOKENS, "[3, 20]", "--piecewise-graph-max-tokens", "19")
    assert _refused(small, PIECES, *large) == [("piecewise_graph_tokens", "out_of_order", reason)]


@covers("piecewise_graph_max_tokens=4", "piecewise_graph_max_tokens=4096", platform="toy")
def test_piecewise_graph_max_tokens(small: Small) -> None:
    assert _counts(small, PIECES, "--piecewise-graph-max-tokens", "4") == ("4", 4)
    assert _counts(small, PIECES, "--piecewise-graph-max-tokens", "4096") == ("8, 11", 0)
    (refused,) = _refused(small, "--piecewise-graph-max-tokens", "4")
    assert refused[:2] == ("piecewise_graph_max_tokens", "other_missing")


def test_the_engine_runs_the_kernels_that_were_planned_and_counts_steps_without_a_graph(small: Small) -> None:
    with engine(small, "--graph-batch-sizes", "1", "2", PIECES, TOKENS, "[8]") as served:
        running = served.ready.kernels
        assert {kernel.key: kernel.name for kernel in served.context.kernels.kernels} == running
        assert running["rms_norm float32 dim=32"] == "reference"
        served.generate(messages(small))
        slow = served.stats().slow_steps
    assert slow["more_tokens_than_captured"] > 0  # of prompts
    assert set(slow) <= {"more_tokens_than_captured", "more_rows_than_captured"}
