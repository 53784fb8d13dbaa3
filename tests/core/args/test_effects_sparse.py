"""Arguments of sparse attention have an effect: which backend computes prefill and decode of models with an indexer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_small import Small, engine, make_small, messages, saved_small
from indexed_small import small
from platform_plugins import write_plugin
from torch import Tensor

from srv.errors import Refusal, Rejection
from srv.platform.interface import AttentionLayer
from srv_cpu.latent_attention import TorchLatentAttention
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.slow  # each test starts engines

PREFILL, DECODE = "nsa_prefill_backend", "nsa_decode_backend"
OUTPUT = 6
SPEC = f"""
from srv.platform.facts import BackendSpec, Requires

SPEC = BackendSpec(
    "zero", 1, lambda context: Requires(), "{__name__}:ZeroAttention", kv_order="page_token_head",
    traits=("indexer",), latent="{__name__}:ZeroAttention",
)
"""


class ZeroAttention(TorchLatentAttention):
    """Sparse attention whose result is always zero."""

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: Any) -> Tensor:
        return torch.zeros_like(super().forward(layer, q, k, v, metadata))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return saved_small(small("v32-dense"), tmp_path_factory.mktemp("sparse"), (5, 17, 33))


@pytest.fixture
def zero_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention backend "zero" is installed for the CPU platform."""
    write_plugin(tmp_path, "zero", SPEC, group="srv.backends.attention", entry="cpu.zero", attribute="SPEC")
    monkeypatch.syspath_prepend(tmp_path)


def tokens(model: Small, **flags: object) -> list[list[int]]:
    with engine(model, page=4, **flags) as served:
        return [result.tokens for result in served.generate(messages(model.prompts))]


def refusals(model: Small, **flags: object) -> dict[str, Rejection]:
    with pytest.raises(Refusal) as refused, engine(model, page=4, **flags):
        pass
    return {rejection.what: rejection for rejection in refused.value.rejections}


@covers("nsa_prefill_backend=torch_native", "nsa_decode_backend=torch_native", platform="cpu")
def test_the_backends_of_sparse_attention_that_are_named_are_used(sparse: Small) -> None:
    """Those of --attention-backend are, too, and may be named again."""
    assert tokens(sparse, **{PREFILL: "torch_native", DECODE: "torch_native"}) == sparse.tokens
    with engine(sparse, page=4, attention_backend="torch_native", **{DECODE: "torch_native"}) as served:
        choice = served.context.resolved.backends["decode_attention_backend"]
        assert (choice.spec.name, DECODE in str(served.context.resolved.provenance["decode_attention_backend"])) == (
            "torch_native",
            True,
        )


@pytest.mark.usefixtures("zero_attention")
def test_nsa_prefill_backend(sparse: Small) -> None:
    """If the zero backend is used only for prefill, the first output tokens differ. It overrides other arguments."""
    wrong = tokens(sparse, **{PREFILL: "zero"}, attention_backend="torch_native")
    assert [one[0] for one in wrong] != [one[0] for one in sparse.tokens]


@pytest.mark.usefixtures("zero_attention")
def test_nsa_decode_backend(sparse: Small) -> None:
    """If the zero backend is used only for decode, the first token of each prompt is still correct."""
    wrong = tokens(sparse, **{DECODE: "zero"}, attention_backend="torch_native")
    assert [one[0] for one in wrong] == [one[0] for one in sparse.tokens]
    assert [one[1:] for one in wrong] != [one[1:] for one in sparse.tokens]


@pytest.mark.usefixtures("zero_attention")
def test_a_value_that_is_overridden_is_refused(sparse: Small) -> None:
    actual = refusals(sparse, **{PREFILL: "torch_native", "prefill_attention_backend": "zero"})
    assert {name: (rejection.code, rejection.reason) for name, rejection in actual.items()} == {
        "prefill_attention_backend": ("inert", "nsa_prefill_backend overrides it")
    }


def test_only_backends_of_sparse_attention_and_models_with_it_are_accepted(
    sparse: Small, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also with names of other engines, and with values that a model without an indexer would not need."""
    for argument in (PREFILL, DECODE):
        (unfit,) = refusals(sparse, **{argument: "native"}).values()
        assert (unfit.code, unfit.what) == ("backend_unfit", argument)
        assert "it does not support keys chosen by an indexer (sparse attention)" in unfit.reason
        (unknown,) = refusals(sparse, **{argument: "flashmla_sparse"}).values()
        assert (unknown.code, unknown.what) == ("unknown_backend", argument)
        assert "Available backends: native, torch_native" in unknown.remedy
    plain = make_small("llama", tmp_path_factory.mktemp("plain"), num_hidden_layers=1)
    actual = refusals(plain, **{PREFILL: "torch_native", DECODE: "fa3", "attention_backend": "torch_native"})
    assert {name: rejection.code for name, rejection in actual.items()} == {PREFILL: "inert", DECODE: "inert"}
    assert actual[DECODE].reason == "no layer of the model has an indexer, which chooses the keys of sparse attention"
