"""Graph capture at engine start: which row counts are captured, and how much memory the graphs use.

`srv.worker.graphs` decides which steps replay a captured graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from srv.args.config import Config
from srv.args.statement import amount_text
from srv.errors import PlatformUnavailable
from srv.models.base import CausalLM, torch_dtype
from srv.planning.steps import rows_to_capture
from srv.platform.interface import AttentionBackend, Graphs, Platform
from srv.worker.graphs import CapturedSteps, StaticBuffers

CaptureReport = tuple[tuple[str, str], ...]  # (quantity, explanation), as in the breakdown of the memory budget


def capture_steps(
    config: Config,
    platform: Platform,
    model: CausalLM,
    decode: Sequence[AttentionBackend],
    *,
    pages: Sequence[int],
    vocab_size: int,
    device: torch.device,
) -> tuple[CapturedSteps | None, CaptureReport]:
    """Capture the configured row counts and report time and memory used; (None, ()) if capture is disabled.

    `decode`: the attention backend of decode-only steps of each cache group; `pages`: the maximum pages of a request
    there. Raises PlatformUnavailable if the platform declares the capability graphs but does not implement it.
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
    used = amount_text(max(before - platform.memory(device).free, 0), "bytes")
    counts = ", ".join(map(str, rows))
    explanation = f"graphs for {counts} rows captured in {seconds:.1f} s; they use {used} of the reserved memory"
    return captured, (("graphs", explanation),)


def _graphs(platform: Platform) -> Graphs:
    graphs = platform.graphs
    if graphs is None:
        raise PlatformUnavailable(
            platform.name,
            "its facts declare the capability graphs, but the platform object implements none",
            "Start with --disable-graphs, and report this to the plugin's authors",
            "graphs_missing",
        )
    return graphs
