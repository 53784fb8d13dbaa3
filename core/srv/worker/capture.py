"""Graph capture at engine start: which row counts are captured, and how much memory the graphs use.

`srv.worker.graphs` decides which steps replay a captured graph, `srv.worker.pieces` replays others in pieces.
"""

from __future__ import annotations

import gc
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from srv.args.config import Config
from srv.args.statement import amount_text
from srv.errors import PlatformUnavailable
from srv.models.base import CausalLM
from srv.planning.steps import rows_to_capture, tokens_to_capture
from srv.platform.interface import AttentionBackend, Graphs, Platform
from srv.platform.transfers import Transfers
from srv.worker.graphs import CapturedSteps, StaticBuffers
from srv.worker.pieces import PiecewiseSteps
from srv.worker.profiler import new_profile, write_trace
from srv.worker.states import RecurrentStates

logger = logging.getLogger(__name__)

_TABLE_ROWS = 10
StartReport = tuple[tuple[str, str], ...]  # (quantity, explanation), as in the breakdown of the memory budget


def capture_steps(
    config: Config,
    platform: Platform,
    model: CausalLM,
    decode: Sequence[AttentionBackend],
    *,
    pages: Sequence[int],
    vocab_size: int,
    transfers: Transfers,
    rank: int = 0,
    states: RecurrentStates | None = None,
) -> tuple[CapturedSteps | None, StartReport]:
    """Capture the configured row counts and report time and memory used; (None, ()) if capture is disabled.

    `decode`: the attention backend of decode-only steps of each cache group; `pages`: the maximum pages of a request
    there; `rank`: of this worker, for the name of the profile; `states`: of a model with recurrent layers. Raises
    PlatformUnavailable if the platform declares the capability graphs but does not implement it.
    """
    rows = rows_to_capture(config)
    if not rows:
        return None, ()
    before = platform.memory(transfers.device).free
    with torch.inference_mode():
        buffers = StaticBuffers(rows[-1], pages, vocab_size, transfers)
    captured = CapturedSteps(
        model,
        decode,
        _graphs(platform),
        buffers,
        rows,
        padding=not config.graphs.disable_graph_padding,
        states=states,
    )
    with _capturing(config, f"rank-{rank}-graph-capture"):
        seconds = captured.capture()
    what = f"graphs for {', '.join(map(str, rows))} rows"
    return captured, (("graphs", _explanation(what, seconds, before, platform, transfers.device)),)


def capture_pieces(
    config: Config,
    platform: Platform,
    model: CausalLM,
    attention: Sequence[AttentionBackend],
    *,
    transfers: Transfers,
    rank: int = 0,
) -> tuple[PiecewiseSteps | None, StartReport]:
    """Capture the forward pass in pieces for the configured token counts, and report as `capture_steps` does.

    (None, ()) if the configuration has none. `attention`: the backend of each cache group.
    """
    counts = tokens_to_capture(config)
    if not counts:
        return None, ()
    device = transfers.device
    before = platform.memory(device).free
    padding = not config.graphs.disable_graph_padding
    captured = PiecewiseSteps(model, attention, platform.graph_piece, counts, transfers, padding=padding)
    with _capturing(config, f"rank-{rank}-piecewise-graph-capture"):
        seconds = captured.capture()
    what = f"{captured.pieces} pieces for {', '.join(map(str, counts))} tokens"
    return captured, (("piecewise graphs", _explanation(what, seconds, before, platform, device)),)


@contextmanager
def _capturing(config: Config, name: str) -> Iterator[None]:
    """As the arguments say: with or without garbage collection, and profiled under this name or not."""
    graphs = config.graphs
    profiled = _profiled(name) if graphs.enable_graph_profiling else nullcontext()
    with garbage_collection(allowed=graphs.enable_graph_gc), profiled:
        yield


def _explanation(what: str, seconds: float, before: int, platform: Platform, device: torch.device) -> str:
    """before: the free memory, in bytes, before the capture."""
    used = amount_text(max(before - platform.memory(device).free, 0), "bytes")
    return f"{what} captured in {seconds:.1f} s; they use {used} of the reserved memory"


@contextmanager
def garbage_collection(*, allowed: bool) -> Iterator[None]:
    """Python's garbage collection runs inside, or it does not.

    A capture allocates so many objects that collections would start again and again, each over all objects of the
    process. Those that libraries start themselves, as some do for every capture, then skip what existed before.
    """
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    if allowed:
        gc.enable()
    else:
        gc.collect()
        gc.freeze()
        gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        else:
            gc.disable()
        if not frozen:  # else, what was frozen before would be thawed too
            gc.unfreeze()


@contextmanager
def _profiled(name: str) -> Iterator[None]:
    """Record what runs inside; log the path of the trace, and the operators that took longest."""
    profile = new_profile()
    profile.start()
    try:
        yield
    finally:
        profile.stop()
    file = write_trace(profile, Path(tempfile.gettempdir()), name)
    table = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=_TABLE_ROWS)
    logger.info("profile of the capture: %s\n%s", file, table)


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
