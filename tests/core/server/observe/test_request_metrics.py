"""What is counted of requests: token counts under vLLM's names without an argument, and `n` once per prompt."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from starlette.datastructures import Headers

from srv.args.groups.observe import ObserveArgs
from srv.server.http.observing import CustomLabels
from srv.server.observe.metric_aliases import AliasLabels
from srv.server.observe.records import SequenceRecord
from srv.server.observe.request_metrics import RequestMetricsFamilies
from srv.types import RequestSpec, SamplingParams

OUTPUTS = 4


def test_a_prompt_with_several_outputs() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetricsFamilies(registry, ObserveArgs(), AliasLabels("m"), 100).of()
    spec = RequestSpec(id="a", tokens=(1, 2, 3), params=SamplingParams(max_tokens=8))
    for index in range(OUTPUTS):
        record = SequenceRecord("a", 0.0, spec=spec, completion_tokens=5, outputs=OUTPUTS, output_index=index)
        metrics.ended(record)
    of_vllm = {"model_name": "m", "engine": "0"}
    samples = {
        name: [registry.get_sample_value(f"{name}_{suffix}", labels) for suffix in ("count", "sum")]
        for name, labels in (
            ("srv_request_outputs", {}),
            ("vllm:request_prompt_tokens", of_vllm),
            ("vllm:request_generation_tokens", of_vllm),
        )
    }
    assert samples == {
        "srv_request_outputs": [1, OUTPUTS],
        "vllm:request_prompt_tokens": [OUTPUTS, 3 * OUTPUTS],
        "vllm:request_generation_tokens": [OUTPUTS, 5 * OUTPUTS],
    }


def test_labels_in_a_header_are_utf_8() -> None:
    labels = CustomLabels(ObserveArgs(tokenizer_metrics_allowed_custom_labels=("team",)))
    header = (b"x-custom-labels", '{"team": "züri"}'.encode())
    assert labels.read(Headers(raw=[header])) == ("züri",)
