"""Every check of the kit, in the order in which it runs. Torch-free; the functions are imported where they run.

`srv conformance list` prints this table, and docs/conformance.md contains it. Levels 0 to 2 are in separate modules.
"""

from __future__ import annotations

from srv.testing.conformance.catalogue_device import L1
from srv.testing.conformance.catalogue_reference import GRAPHS, L2
from srv.testing.conformance.catalogue_static import L0
from srv.testing.conformance.model import Check, Level

_ENGINE = ("engine.greedy",)
_WRONG_OUTPUT = (
    "Repeat it with `--only`; if L2 passes, check what changes between steps (lengths, page tables, streams) and what "
    "layers pass: more tokens than at L2, and views of wider tensors, whose strides count."
)


def _engine_check(
    name: str, summary: str, remedy: str = _WRONG_OUTPUT, needs: str = "", after: tuple[str, ...] = _ENGINE
) -> Check:
    target = name.replace(".", ":")
    return Check(name, Level.L3, summary, target, remedy, needs=needs, after=after, seconds=300.0, fresh=True)


L3 = (
    _engine_check(
        "engine.greedy", "greedy output of a small model is that of the reference, in a batch and alone", after=()
    ),
    _engine_check("engine.float32", "output in float32 is that of the reference", needs="float32"),
    _engine_check("engine.bfloat16", "output in bfloat16 is that of the reference", needs="bfloat16"),
    _engine_check("engine.float16", "output in float16 is that of the reference", needs="float16"),
    _engine_check("engine.w8a8", "output with 8-bit weights is that of the reference", needs="w8a8"),
    Check(
        "engine.experts",
        Level.L3,
        "greedy output of a small mixture of experts is that of the reference",
        "experts:served",
        "If op.experts passes, check what a captured step reads on the host (`BackendSpec.graphs` of the family moe).",
        after=_ENGINE,
        seconds=300.0,
        fresh=True,
    ),
    _engine_check("engine.embeddings", "embeddings of the last token and of the mean are those of the reference"),
    _engine_check("engine.logprobs", "log-probabilities of prompt, output and alternatives are those of the reference"),
    _engine_check(
        "engine.sampling", "sampling: top-k 1 is greedy, the same seed repeats tokens, another seed does not"
    ),
    _engine_check("engine.penalised", "penalties, logit bias, masks and min_tokens have their effect"),
    _engine_check("engine.stop", "a stop token ends a request"),
    _engine_check(
        "engine.prefix_cache",
        "with the prefix cache on, a known prefix is not computed again, and output is the same",
        needs="prefix_cache",
    ),
    _engine_check("engine.no_prefix_cache", "with the prefix cache off, nothing is cached, and output is the same"),
    _engine_check(
        "engine.chunked_prefill",
        "prompts computed in several steps give the same output",
        needs="chunked_prefill",
    ),
    _engine_check("engine.no_overlap", "with overlap off, output is the same"),
    _engine_check("engine.drafts", "with drafts from n-grams, output is the same"),
    _engine_check(
        "engine.late_inputs", "masks that depend on the token of the step before are applied, with overlap on"
    ),
    _engine_check("engine.graphs", "steps replayed from captured graphs give the same output", needs="graphs"),
    _engine_check(
        "engine.pieces",
        "steps with prompts that replay pieces give the same output, in chunks and with a cached prefix",
        needs="piecewise_graphs",
    ),
    _engine_check(
        "engine.compiled",
        "decode steps compiled by torch.compile give the same output",
        "Hide kernels that cannot be traced behind registered operators, or run torch operators in their place.",
        needs="torch_compile",
    ),
    Check(
        "engine.ranks",
        Level.L3,
        "greedy output of two ranks is that of the reference, and each rank holds its share of weights and KV pool",
        "ranks:engine",
        "Allocate what `kv_buffers` is given, which is one rank's share; if output is wrong, compare sums.",
        needs="communicator",
        after=_ENGINE,
        seconds=300.0,
        fresh=True,
    ),
    Check(
        "engine.memory",
        Level.L3,
        "weights, KV pool and the buffers of captured steps take the bytes that `srv plan` predicts, to 5 %",
        "memory:engine",
        "Return tensors of the layout's size from `kv_buffers`; if other lines differ, report it: they are core's.",
        after=_ENGINE,
        seconds=300.0,
        fresh=True,
    ),
    _engine_check("engine.abort", "an aborted request frees its pages and does not change the others"),
    _engine_check("engine.retraction", "retracted requests continue with the same output"),
)

_AFTER_SERVES = ("server.serves",)


def _server_check(name: str, summary: str, target: str, remedy: str, after: tuple[str, ...] = _AFTER_SERVES) -> Check:
    return Check(name, Level.L4, summary, f"arguments:{target}", remedy, after=after, seconds=1800.0, fresh=True)


L4 = (
    _server_check(
        "server.serves",
        "`srv launch` serves a small model over HTTP, and its output is that of the reference",
        "serves",
        "Run `srv launch --device NAME` and read its log; a server has two processes, the engine of L3 has one.",
        (),
    ),
    _server_check(
        "arguments.refused",
        "a value that is declared unsupported is refused with its code, before weights are read",
        "refuses",
        "Declare it with srv.platform.facts.Support or Constraint, so that resolution refuses it.",
    ),
    _server_check(
        "arguments.supported",
        "with every accepted value a server starts, answers, and reports it as it was set",
        "supported",
        "Refuse the value (Support, Constraint, or BackendSpec.check), or make it work.",
    ),
    _server_check(
        "arguments.undeclared",
        "a plugin that declares support of single arguments accepts no others that concern a device",
        "undeclared",
        "Add a srv.platform.facts.Support for the argument.",
        ("server.serves", "arguments.supported"),
    ),
)

CHECKS = L0 + L1 + L2 + GRAPHS + L3 + L4


def markdown() -> str:
    """The catalogue as the tables of docs/conformance.md, one per level."""
    lines: list[str] = []
    for level, title in _TITLES.items():
        lines += [
            f"## {level.name}: {title}",
            "",
            "| check | what is true if it passes | if declared |",
            "|---|---|---|",
        ]
        lines += [f"| `{check.name}` | {check.summary} | {check.needs} |" for check in CHECKS if check.level is level]
        lines.append("")
    return "\n".join(lines)


_TITLES = {
    Level.L0: "static, no device",
    Level.L1: "rules for every device",
    Level.L2: "ops, attention and captured steps, compared with references",
    Level.L3: "the engine with a small model",
    Level.L4: "arguments, on a real server",
}
