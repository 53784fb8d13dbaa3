"""Arguments and models with recurrent layers: what cannot be combined, and what has no effect."""

from __future__ import annotations

from typing import Any

from args_world import CAPABLE, manifest, model, resolved, user
from every import every

from srv.errors import Refusal, Rejection
from srv.specs import FullAttention, ModelFacts, Recurrent, StateTensor

STATES = Recurrent((1, 2), (StateTensor("conv", (8, 3), "float32"), StateTensor("state", (4, 8, 8), "float32")))
RECURRENT = model(
    architecture="Qwen3NextForCausalLM",
    config={"num_experts": 0},
    cache_groups=(FullAttention((0,), 4, 64, 64), STATES),
)
WITH_ALL = CAPABLE | {"torch_compile", "piecewise_graphs", "graphs"}


def refusals(facts: ModelFacts, **values: Any) -> dict[str, Rejection]:
    try:
        resolved(user(**values), manifest(capabilities=WITH_ALL), model=facts)
    except Refusal as refusal:
        return {rejection.what: rejection for rejection in refusal.rejections}
    return {}


@every(
    ("facts", "values", "code", "reason"),
    [
        (RECURRENT, {"speculative_algorithm": "NGRAM"}, "excluded", "drafts that are rejected would have advanced"),
        (RECURRENT, {"calculate_kv_scales": True}, "excluded", "have no recurrent states"),
        (RECURRENT, {"enable_torch_compile": True}, "excluded", "not traced by torch.compile"),
        (RECURRENT, {"enable_piecewise_graphs": True}, "excluded", "mix tokens"),
        (RECURRENT, {"max_mamba_cache_size": 3, "max_running_requests": 4}, "out_of_order", "each of the 4 running"),
        (model(), {"max_mamba_cache_size": 300}, "inert", "no layer of the model keeps a recurrent state"),
        (model(), {"mamba_ssm_dtype": "bfloat16"}, "inert", "no layer of the model keeps a recurrent state"),
        (RECURRENT, {"mamba_track_interval": 9, "disable_radix_cache": True}, "inert", "without a prefix cache"),
        (
            RECURRENT,
            {"mamba_full_memory_ratio": 0.5, "max_mamba_cache_size": 300},
            "inert",
            "the number of states is 300",
        ),
    ],
)
def test_what_is_refused(facts: ModelFacts, values: dict[str, Any], code: str, reason: str) -> None:
    actual = refusals(facts, **values)
    assert list(actual) == [next(iter(values))]
    (refused,) = actual.values()
    assert (refused.code, reason in refused.reason) == (code, True), refused
    assert refused.remedy.endswith(".")


@every(
    ("facts", "values"),
    [
        (RECURRENT, {"max_mamba_cache_size": 4, "max_running_requests": 4}),
        (RECURRENT, {"mamba_ssm_dtype": "bfloat16", "mamba_full_memory_ratio": 0.5, "mamba_track_interval": 9}),
        (RECURRENT, {"mamba_track_interval": 256, "disable_radix_cache": True}),  # the default asks for nothing
        (model(), {"mamba_track_interval": 256}),
    ],
)
def test_what_is_accepted(facts: ModelFacts, values: dict[str, Any]) -> None:
    assert refusals(facts, **values) == {}
