"""Every check of the kit, in the order in which it runs. Torch-free; the functions are imported where they run.

`srv conformance list` prints this table, docs/conformance.md holds it. Levels 0 to 2 have modules of their own.
"""

from __future__ import annotations

from srv.testing.conformance.catalogue_device import GRAPHS, L1, L2
from srv.testing.conformance.catalogue_static import L0
from srv.testing.conformance.model import Check, Level

_ENGINE = ("engine.greedy",)
_WRONG_OUTPUT = (
    "Repeat it with `--only`; if L2 passes, look at what changes between steps: lengths, page tables, streams."
)


def _served(
    name: str, summary: str, remedy: str = _WRONG_OUTPUT, needs: str = "", after: tuple[str, ...] = _ENGINE
) -> Check:
    target = name.replace(".", ":")
    return Check(name, Level.L3, summary, target, remedy, needs=needs, after=after, seconds=300.0, fresh=True)


L3 = (
    _served("engine.greedy", "greedy output of a small model is the reference's, in a batch and alone", after=()),
    _served("engine.float32", "and so it is in float32", needs="float32"),
    _served("engine.bfloat16", "and so it is in bfloat16", needs="bfloat16"),
    _served("engine.float16", "and so it is in float16", needs="float16"),
    _served("engine.w8a8", "8-bit weights give the reference's output", needs="w8a8"),
    _served("engine.logprobs", "log-probabilities of prompt, output and alternatives are the reference's"),
    _served("engine.sampling", "drawn tokens: top-k 1 is greedy, a seed repeats itself, another seed does not"),
    _served("engine.penalised", "penalties, bias and minimum of tokens do to the output what they say"),
    _served("engine.stop", "a stop token ends a request"),
    _served(
        "engine.prefix_cache",
        "with the prefix cache on, a beginning that was seen is not computed again, and output is the same",
        needs="prefix_cache",
    ),
    _served("engine.no_prefix_cache", "with the prefix cache off, nothing is cached, and output is the same"),
    _served(
        "engine.chunked_prefill",
        "prompts that take several steps give the same output",
        needs="chunked_prefill",
    ),
    _served("engine.no_overlap", "with overlap off, output is the same"),
    _served("engine.graphs", "steps replayed from captured graphs give the same output", needs="graphs"),
    _served("engine.abort", "an aborted request gives its pages back and changes no other"),
    _served("engine.retraction", "requests that went back to the queue go on where they were"),
)

_SWEEP = ("server.serves",)


def _launched(name: str, summary: str, target: str, remedy: str, after: tuple[str, ...] = _SWEEP) -> Check:
    return Check(name, Level.L4, summary, f"arguments:{target}", remedy, after=after, seconds=1800.0, fresh=True)


L4 = (
    _launched(
        "server.serves",
        "`srv launch` serves a small model over HTTP, and its output is the reference's",
        "serves",
        "Run `srv launch --device NAME` yourself and look at its log; L3 passes in one process, a server has two.",
        (),
    ),
    _launched(
        "arguments.refused",
        "what is declared unsupported is refused with its code, before weights are read",
        "refuses",
        "Declare it with srv.platform.facts.Support or Constraint, so that resolution refuses it.",
    ),
    _launched(
        "arguments.supported",
        "what is accepted starts, serves over HTTP and reads back as it was set",
        "supported",
        "Refuse the value (Support, Constraint, or BackendSpec.check), or make it work.",
    ),
    _launched(
        "arguments.undeclared",
        "where support is declared argument by argument, nothing is accepted in silence",
        "undeclared",
        "Add a srv.platform.facts.Support for the argument.",
        ("server.serves", "arguments.supported"),
    ),
)

CHECKS = L0 + L1 + L2 + GRAPHS + L3 + L4


def markdown() -> str:
    """The catalogue as the tables of docs/conformance.md, one a level."""
    lines: list[str] = []
    for level, title in _TITLES.items():
        lines += [f"## {level.name}: {title}", "", "| check | what holds if it passes | if declared |", "|---|---|---|"]
        lines += [f"| `{each.name}` | {each.summary} | {each.needs} |" for each in CHECKS if each.level is level]
        lines.append("")
    return "\n".join(lines)


_TITLES = {
    Level.L0: "static, no device",
    Level.L1: "laws of any device",
    Level.L2: "ops, attention and captured steps against references",
    Level.L3: "the engine with a small model",
    Level.L4: "arguments, against a real server",
}
