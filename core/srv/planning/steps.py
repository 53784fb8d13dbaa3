"""What a configuration says about steps, for the scheduler and for ranks: captured row counts, and drafts per row."""

from __future__ import annotations

from srv.args.config import Config
from srv.args.rules.graphs import captured_rows
from srv.args.rules.pieces import captured_tokens
from srv.speculative.algorithm import DraftAlgorithm
from srv.speculative.registry import find

OVERLAP_DEPTH = 2  # one step runs while the next one is planned and enqueued


def step_depth(config: Config) -> int:
    """Maximum steps in flight."""
    return 1 if config.schedule.disable_overlap_schedule else OVERLAP_DEPTH


def draft_count(config: Config) -> int:
    """Maximum drafts per row; 0 without a drafter."""
    algorithm = draft_algorithm(config)
    verified = config.speculative.speculative_num_draft_tokens
    if algorithm is None or verified is None:
        return 0
    most = algorithm.max_drafts(draft_values(config, algorithm))
    return verified - 1 if most is None else min(verified - 1, most)


def draft_algorithm(config: Config) -> DraftAlgorithm | None:
    """The algorithm that proposes drafts. Raises PluginError if that of a third party is faulty."""
    return find(config.speculative.speculative_algorithm)


def draft_values(config: Config, algorithm: DraftAlgorithm) -> dict[str, int]:
    """The values of the arguments that an algorithm reads."""
    return {name: getattr(config.speculative, name) for name in algorithm.reads}


def rows_to_capture(config: Config) -> tuple[int, ...]:
    """The row counts for which a step is captured, ascending; () if capture is disabled."""
    graphs = config.graphs
    if graphs.disable_graphs:
        return ()
    compiled = graphs.torch_compile_max_bs if graphs.enable_torch_compile else 0
    return captured_rows(
        graphs.graph_batch_sizes,
        graphs.graph_max_batch_size,
        config.schedule.max_running_requests,
        padding=not graphs.disable_graph_padding,
        above=compiled,
    )


def tokens_to_capture(config: Config) -> tuple[int, ...]:
    """The token counts for which the forward pass is captured in pieces, ascending; () if it is not."""
    graphs, schedule = config.graphs, config.schedule
    if graphs.disable_graphs or not graphs.enable_piecewise_graphs:
        return ()
    chunk = schedule.chunked_prefill_size if schedule.chunked_prefill_size > 0 else schedule.max_prefill_tokens
    return captured_tokens(
        graphs.piecewise_graph_tokens, graphs.piecewise_graph_max_tokens, chunk + schedule.max_running_requests
    )


def rows_to_compile(config: Config) -> int:
    """The most tokens of a compiled step, each a row of its own or a draft of one; 0 if no step is compiled."""
    if not config.graphs.enable_torch_compile:
        return 0
    return min(config.graphs.torch_compile_max_bs, config.schedule.max_running_requests * (1 + draft_count(config)))
