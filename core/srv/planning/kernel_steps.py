"""The part of a kernel plan about steps: which are captured or compiled, and which launch their kernels one by one.

Torch-free. At run time, a step that no graph covers is counted by its reason (`srv.sched.plan.SlowReason`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from srv.args.statement import Layer, Resolved
from srv.planning.kernel import Kernel
from srv.planning.steps import rows_to_capture, rows_to_compile, tokens_to_capture

GRAPHS, PIECES, COMPILED, EAGER = "captured graphs", "piecewise graphs", "torch.compile", "eager"
DECODE_STEPS, PROMPT_STEPS = "steps decode", "steps prompt"


def step_kernels(resolved: Resolved) -> Iterator[Kernel]:
    """How decode steps run, and how steps with prompts do."""
    yield _decode(resolved)
    yield _prompts(resolved)


def _decode(resolved: Resolved) -> Kernel:
    config, disabled = resolved.config, resolved.provenance["disable_graphs"]
    compiled, captured = rows_to_compile(config), rows_to_capture(config)
    what, name = "decode steps", decode_name(compiled, captured)
    if captured:
        limit = "graph_batch_sizes" if config.graphs.graph_batch_sizes else "graph_max_batch_size"
        because = resolved.provenance[limit].reason
        return Kernel(
            "steps", what, DECODE_STEPS, name, because, ((EAGER, f"only for steps of more than {captured[-1]} rows"),)
        )
    why = f"disable_graphs is {'true' if disabled.value else 'false'}: {disabled.reason}"
    if compiled:
        return Kernel("steps", what, DECODE_STEPS, name, "enable_torch_compile is true", ((GRAPHS, why),))
    slower = why if "graphs" in resolved.capabilities and disabled.layer is not Layer.USER else ""
    return Kernel("steps", what, DECODE_STEPS, name, "no step is captured or compiled", ((GRAPHS, why),), slower)


def _prompts(resolved: Resolved) -> Kernel:
    tokens = tokens_to_capture(resolved.config)
    what, name = "steps with prompts", prompt_name(tokens)
    if tokens:
        because = "enable_piecewise_graphs is true"
        return Kernel("steps", what, PROMPT_STEPS, name, because, ((EAGER, f"only above {tokens[-1]} tokens"),))
    if "piecewise_graphs" not in resolved.capabilities:
        why = "the platform cannot capture a forward pass in pieces (capability piecewise_graphs)"
    else:
        why = f"enable_piecewise_graphs is false: {resolved.provenance['enable_piecewise_graphs'].reason}"
    return Kernel("steps", what, PROMPT_STEPS, name, "their shapes differ from step to step", ((PIECES, why),))


def decode_name(compiled: int, captured: Sequence[int]) -> str:
    """`compiled`: the most rows of a compiled step. `captured`: the row counts of the graphs, ascending."""
    parts = [f"{COMPILED} (up to {compiled} rows)"] if compiled else []
    parts += [f"{GRAPHS} ({_counts(captured, 'rows')})"] if captured else []
    return "; ".join(parts) or EAGER


def prompt_name(captured: Sequence[int]) -> str:
    """`captured`: the token counts of the piecewise graphs, ascending."""
    return f"{PIECES} ({_counts(captured, 'tokens')})" if captured else EAGER


def _counts(counts: Sequence[int], unit: str) -> str:
    """ "1, 2, 4 rows" or, of many, "1 to 256 rows, 35 sizes"."""
    if len(counts) <= 4:
        return f"{', '.join(map(str, counts))} {unit.removesuffix('s') if tuple(counts) == (1,) else unit}"
    return f"{counts[0]} to {counts[-1]} {unit}, {len(counts)} sizes"
