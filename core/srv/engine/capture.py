"""Captured steps of an engine that starts: whether, of which row counts, and what they took of the memory.

Knows configuration, platform and runner; which steps then replay one is `srv.runner.graphs`.
"""

from __future__ import annotations

import torch

from srv.args.config import Config
from srv.args.rules.graphs import captured_rows
from srv.args.statement import amount_text
from srv.errors import PlatformUnavailable
from srv.models.base import CausalLM, torch_dtype
from srv.platform.contract import graphs_of
from srv.platform.interface import AttentionBackend, Graphs, Platform
from srv.runner.graphs import CapturedSteps, StaticBuffers

Story = tuple[tuple[str, str], ...]


def rows_to_capture(config: Config) -> tuple[int, ...]:
    """The row counts of which steps are captured, ascending; () if none is."""
    graphs = config.graphs
    if graphs.disable_graphs:
        return ()
    return captured_rows(
        graphs.graph_batch_sizes,
        graphs.graph_max_batch_size,
        config.schedule.max_running_requests,
        padding=not graphs.disable_graph_padding,
    )


def capture_steps(
    config: Config,
    platform: Platform,
    model: CausalLM,
    decode: AttentionBackend,
    *,
    pages: int,
    vocab_size: int,
    device: torch.device,
) -> tuple[CapturedSteps | None, Story]:
    """Capture what the configuration asks for, and tell what it took; (None, ()) if it asks for nothing.

    `decode` is the backend of steps that decode alone, `pages` the most that a request can have. The story
    goes with that of the memory budget. PlatformUnavailable if the platform promised what it does not have.
    """
    rows = rows_to_capture(config)
    if not rows:
        return None, ()
    before = platform.memory(device).free
    with torch.inference_mode():
        buffers = StaticBuffers(rows[-1], pages, vocab_size, torch_dtype(config.model.dtype), device)
    captured = CapturedSteps(
        model, decode, _graphs(platform), buffers, rows, padding=not config.graphs.disable_graph_padding
    )
    seconds = captured.capture()
    taken = amount_text(max(before - platform.memory(device).free, 0), "bytes")
    counts = ", ".join(map(str, rows))
    told = f"steps of {counts} rows captured in {seconds:.1f} s; they take {taken} of what is reserved"
    return captured, (("graphs", told),)


def _graphs(platform: Platform) -> Graphs:
    graphs = graphs_of(platform)
    if graphs is None:
        raise PlatformUnavailable(
            platform.name,
            "its facts name the capability graphs, but the platform at work has none",
            "Start with --disable-graphs, and report this to the plugin's authors",
            "graphs_missing",
        )
    return graphs
