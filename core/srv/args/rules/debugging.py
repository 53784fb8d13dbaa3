"""Rules for the arguments of debugging and of observability: what they need, and what would keep them from an effect.

Must not know how tensors are dumped or hooks are called.
"""

from __future__ import annotations

import functools

from srv.args.config import ARGUMENTS
from srv.platform.facts import Constraint, ResolutionContext
from srv.platform.forward_hooks import read_hooks
from srv.platform.host import versions

_EAGER = ("debug_tensor_dump_output_folder", "forward_hooks")
# Of the extra "trace"; an environment variable chooses the exporter.
TRACE_DISTRIBUTIONS = (
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry-exporter-otlp-proto-http",
)
_OF_DUMPS = ("debug_tensor_dump_input_file", "debug_tensor_dump_prefill_only")
_OF_METRICS = (
    "bucket_time_to_first_token",
    "bucket_inter_token_latency",
    "bucket_e2e_request_latency",
    "collect_tokens_histogram",
    "tokenizer_metrics_allowed_custom_labels",
    "enable_expert_distribution_metrics",
)


def _needs_eager_steps(name: str) -> Constraint:
    """Captured and compiled steps do not run the code of modules, so that nothing would be called."""

    def check(context: ResolutionContext) -> str | None:
        if context[name] is None:
            return None
        if not context["disable_graphs"]:
            return "a captured step does not run the code of the model's modules (disable_graphs is false)"
        if context["enable_torch_compile"]:
            return "a compiled step does not run the code of the model's modules (enable_torch_compile is true)"
        return None

    remedy = "Add --disable-graphs and leave out --enable-torch-compile."
    return Constraint(name, "excluded", check, remedy, reads=("disable_graphs", "enable_torch_compile"))


def _needs(name: str, other: str) -> Constraint:
    default = ARGUMENTS[name].default

    def check(context: ResolutionContext) -> str | None:
        if context[name] == default or context[other]:
            return None
        return f"it has no effect while {other} is not set"

    return Constraint(name, "other_missing", check, f"Set {other} too, or leave it out.", reads=(other,))


def _needs_metrics(name: str) -> Constraint:
    default = ARGUMENTS[name].default

    def check(context: ResolutionContext) -> str | None:
        off = context[name] != default and not context["enable_metrics"]
        return "there are no metrics (enable_metrics is false)" if off else None

    return Constraint(name, "inert", check, "Leave one of the two out.", reads=("enable_metrics",))


def _exports_traces(context: ResolutionContext) -> str | None:
    if not context["enable_trace"]:
        return None
    missing = [name for name in TRACE_DISTRIBUTIONS if name not in _installed(*TRACE_DISTRIBUTIONS)]
    return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed" if missing else None


@functools.cache  # it reads folders, and every resolution asks
def _installed(*distributions: str) -> frozenset[str]:
    return frozenset(versions(*distributions))


def _hooks_exist(context: ResolutionContext) -> str | None:
    if context["forward_hooks"] is None:
        return None
    try:
        read_hooks(context["forward_hooks"])
    except ValueError as error:
        return str(error)
    return None


CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "enable_trace", "not_installed", _exports_traces, "Install them with pip install 'srv[trace]', or leave it out."
    ),
    Constraint(
        "forward_hooks",
        "invalid_hooks",
        _hooks_exist,
        'Pass objects such as {"hook": NAME, "target_modules": ["model.layers.*"], "config": {}}; docs/hooks.md'
        " says how a package offers a hook.",
    ),
)

# Constraints on values that a user sets.
USER_CONSTRAINTS: tuple[Constraint, ...] = (
    *map(_needs_eager_steps, _EAGER),
    *(_needs(name, "debug_tensor_dump_output_folder") for name in _OF_DUMPS),
    _needs("tokenizer_metrics_custom_labels_header", "tokenizer_metrics_allowed_custom_labels"),
    *map(_needs_metrics, _OF_METRICS),
)
