"""What a configuration says about steps, for the scheduler and for ranks: captured row counts, and drafts per row."""

from __future__ import annotations

from srv.args.config import Config
from srv.args.rules.graphs import captured_rows

OVERLAP_DEPTH = 2  # one step runs while the next one is planned and enqueued


def step_depth(config: Config) -> int:
    """Maximum steps in flight."""
    return 1 if config.schedule.disable_overlap_schedule else OVERLAP_DEPTH


def draft_count(config: Config) -> int:
    """Maximum drafts per row; 0 without a drafter."""
    if config.speculative.speculative_algorithm is None or config.speculative.speculative_num_draft_tokens is None:
        return 0
    return min(config.speculative.speculative_num_draft_tokens - 1, config.speculative.speculative_ngram_branch_length)


def rows_to_capture(config: Config) -> tuple[int, ...]:
    """The row counts for which a step is captured, ascending; () if capture is disabled."""
    graphs = config.graphs
    if graphs.disable_graphs:
        return ()
    return captured_rows(
        graphs.graph_batch_sizes,
        graphs.graph_max_batch_size,
        config.schedule.max_running_requests,
        padding=not graphs.disable_graph_padding,
    )
