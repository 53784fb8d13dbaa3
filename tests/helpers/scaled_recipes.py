"""Command lines that a vendor publishes, scaled down to what a test serves on simulated devices.

The numbers of ranks are divided by one factor until at most `RANKS` remain, graph sizes and limits alike; drafts and
separate prefill and decode are left out, and every other flag stays as it is printed.
"""

from __future__ import annotations

import shlex

from srv.args.dialects import translate
from srv_matrix.recipes import Recipe, Recipes, without_later

RANKS = 4
_DIVIDED = (
    *("--tp-size", "--dp-size", "--ep-size", "--attn-cp-size", "--cuda-graph-bs", "--cuda-graph-max-bs"),
    *("--max-running-requests", "--chunked-prefill-size", "--max-prefill-tokens"),
)


def ranks_of(recipe: Recipe) -> int:
    return int(dict(_flags(recipe))["--tp-size"][0])


def scaled(recipes: Recipes, recipe: Recipe) -> list[str]:
    """The command line in the flags of srv; RuntimeError for one that cannot be translated."""
    factor = -(-ranks_of(recipe) // RANKS)
    words: list[str] = []
    for flag, values in _flags(recipe._replace(flags=without_later(recipe.flags))):
        words += [flag, *(_divided(value, factor) if flag in _DIVIDED else value for value in values)]
    translation = translate(recipes.dialect, words)
    if translation.rejections:
        raise RuntimeError(f"{recipe.name}: {translation.rejections[0].reason}")
    return translation.words


def _flags(recipe: Recipe) -> list[tuple[str, list[str]]]:
    groups: list[tuple[str, list[str]]] = []
    for word in shlex.split(recipe.flags):
        if word.startswith("--"):
            groups.append((word, []))
        else:
            groups[-1][1].append(word)
    return groups


def _divided(value: str, factor: int) -> str:
    """At least 1; -1, which means no limit, stays."""
    number = int(value)
    return value if number < 0 else str(max(1, number // factor))
