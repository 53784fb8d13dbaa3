"""Inert features: what is switched on and had no effect, although enough requests have ended to see one.

    Config, who set it ──► the features that are on ─┐
                                                     ├──► {name: sentence}: /health, /get_server_info, /metrics, the log
    Stats (counters that run anyway) ────────────────┘

Owns the list of features: what switches each on, which counter its effect raises, why that may be 0, and what to do. A
feature is watched if the user switched it on, or if it is on by default and takes memory. Must not know how anything is
counted. Imports no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from srv.args.config import Config
from srv.io.messages import Stats
from srv.planning.steps import draft_count, rows_to_capture, rows_to_compile, step_depth, tokens_to_capture

logger = logging.getLogger(__name__)

MIN_REQUESTS = 100  # requests that must have ended before a feature counts as inert


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature. `arguments`: the user has switched it on if one of them was set.

    takes_memory: it is also watched if a default switched it on. effects: the counter that it raises. why: the reason
    for having no effect, as far as the counters tell. remedy: what to do.
    """

    name: str
    arguments: tuple[str, ...]
    takes_memory: bool
    is_on: Callable[[Config], bool]
    effects: Callable[[Stats], int]
    why: Callable[[Config, Stats], str]
    remedy: str


def _single_tokens(stats: Stats) -> bool:
    """Whether requests generated one token each, or none: these come from the step of the prompt."""
    return stats.generated_tokens <= stats.finished


def _no_hit(config: Config, stats: Stats) -> str:
    page, average = config.memory.page_size, stats.prompt_tokens / stats.finished
    if average <= page:
        return f"prompts have {average:.0f} tokens on average, and only whole pages of {page} tokens are shared"
    return f"none of {stats.prompt_tokens} prompt tokens was found in it"


def _no_draft_accepted(config: Config, stats: Stats) -> str:
    if stats.drafts_proposed:
        return f"none of {stats.drafts_proposed} drafts was right"
    if _single_tokens(stats):
        return "requests generated one token or none, and the first one has no drafts"
    return "no draft was verified: by the measured times of steps none was expected to pay, or requests excluded them"


def _no_graph_replayed(config: Config, stats: Stats) -> str:
    if _single_tokens(stats):
        return "requests generated one token or none, and only decode steps are replayed"
    rows = rows_to_capture(config)
    sizes = f"up to {rows[-1]} rows"
    if config.graphs.disable_graph_padding:
        sizes = f"exactly {', '.join(map(str, rows))} rows" if len(rows) <= 4 else f"some sizes {sizes}"
    other = f"; {stats.compiled_steps} were compiled" if stats.compiled_steps else ""
    return f"graphs are for decode steps of {sizes}, and {stats.eager_steps} steps of other kinds ran eagerly{other}"


def _no_piece_replayed(config: Config, stats: Stats) -> str:
    most = tokens_to_capture(config)[-1]
    return f"no step had up to {most} tokens and was not served by another graph"


def _no_step_compiled(config: Config, stats: Stats) -> str:
    if _single_tokens(stats):
        return "requests generated one token or none, and only decode steps are compiled"
    return f"no decode step had up to {rows_to_compile(config)} tokens"


FEATURES = (
    Feature(
        "prefix_cache",
        ("disable_radix_cache",),
        takes_memory=True,
        is_on=lambda config: not config.memory.disable_radix_cache,
        effects=lambda stats: stats.cached_tokens,
        why=_no_hit,
        remedy="Let prompts begin with what they share, and send those that share it to the same server; or save the"
        " bookkeeping with --disable-radix-cache.",
    ),
    Feature(
        "longest_prefix_first",
        ("schedule_policy",),
        takes_memory=False,
        is_on=lambda config: config.schedule.schedule_policy == "lpm",
        effects=lambda stats: stats.cached_tokens,
        why=lambda config, stats: "no prompt had a prefix in the cache, so that requests ran in the order of arrival",
        remedy="Leave --schedule-policy out, which saves matching every waiting prompt with the cache.",
    ),
    Feature(
        "drafts",
        ("speculative_algorithm",),
        takes_memory=True,
        is_on=lambda config: draft_count(config) > 0,
        effects=lambda stats: stats.drafts_accepted,
        why=_no_draft_accepted,
        remedy="Leave --speculative-algorithm out for such requests: drafts pay where outputs repeat the prompt or"
        " themselves.",
    ),
    Feature(
        "captured_steps",
        ("disable_graphs", "graph_max_batch_size", "graph_batch_sizes"),
        takes_memory=True,
        is_on=lambda config: bool(rows_to_capture(config)),
        effects=lambda stats: stats.replayed_steps - stats.piecewise_steps,
        why=_no_graph_replayed,
        remedy="Capture the batch sizes that occur with --graph-batch-sizes or a larger --graph-max-batch-size; or save"
        " their memory and the time of capture with --disable-graphs.",
    ),
    Feature(
        "piecewise_graphs",
        ("enable_piecewise_graphs",),
        takes_memory=True,
        is_on=lambda config: bool(tokens_to_capture(config)),
        effects=lambda stats: stats.piecewise_steps,
        why=_no_piece_replayed,
        remedy="Raise --piecewise-graph-max-tokens, or leave --enable-piecewise-graphs out, which saves their memory.",
    ),
    Feature(
        "compiled_steps",
        ("enable_torch_compile",),
        takes_memory=True,
        is_on=lambda config: rows_to_compile(config) > 0,
        effects=lambda stats: stats.compiled_steps,
        why=_no_step_compiled,
        remedy="Raise --torch-compile-max-bs, or leave --enable-torch-compile out, which saves the time of compiling.",
    ),
    Feature(
        "overlap",
        ("disable_overlap_schedule",),
        takes_memory=False,
        is_on=lambda config: step_depth(config) > 1,
        effects=lambda stats: stats.overlapped_steps,
        why=lambda config, stats: "no step was planned while another one ran, because each request took one step",
        remedy="Send requests at the same time; or use --disable-overlap-schedule, which plans steps one by one.",
    ),
)


class InertFeatures:
    """Watches the features of one engine, and logs once each of those that turn out to be inert.

    user_set: the arguments that the user has set.
    """

    def __init__(self, config: Config, user_set: frozenset[str]) -> None:
        self._config = config
        self._watched = [
            (feature, by_user)
            for feature in FEATURES
            if ((by_user := not user_set.isdisjoint(feature.arguments)) or feature.takes_memory)
            and feature.is_on(config)
        ]
        self._logged: set[str] = set()

    def find(self, stats: Stats) -> dict[str, str]:
        """Why, and what to do, by the name of each feature that has had no effect since the start."""
        if stats.finished < MIN_REQUESTS:
            return {}
        found: dict[str, str] = {}
        for feature, by_user in self._watched:
            if feature.effects(stats):
                continue
            found[feature.name] = f"{feature.why(self._config, stats)}. {feature.remedy}"
            if feature.name not in self._logged:
                self._logged.add(feature.name)
                level = logging.WARNING if by_user else logging.INFO  # nobody asked for a default
                who = "which you switched on" if by_user else "which is on by default"
                text = "%s, %s, had no effect on %d requests: %s"
                logger.log(level, text, feature.name, who, stats.finished, found[feature.name])
        return found
