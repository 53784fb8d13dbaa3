"""Rules of speculative decoding: how much is guessed, by family of models, and what does not work together."""

from __future__ import annotations

from srv.args.rules.reserve import RESERVED_MEMORY
from srv.platform.facts import Constraint, Contribution, Default, Seen

_GIB = 2**30
_WITH_MODEL = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")  # those that guess with weights of their own
_CHAIN = (3, 1, 4)  # steps, branches, checked tokens: one guess at each depth
_TREE = (5, 4, 8)
_CHAIN_MODELS = frozenset({"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"})
_OWN_HEAD = frozenset({"DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"})


def _guesses(seen: Seen) -> tuple[int, int, int] | None:
    """Steps, branches and checked tokens that suit guesser, model and pages; None without a guesser.

    A tree is for pages of one token (`trees_by_token`).
    """
    algorithm = seen["speculative_algorithm"]
    if algorithm not in _WITH_MODEL:
        return None
    by_model = seen.model is not None and seen.model.architecture in _CHAIN_MODELS
    return _CHAIN if algorithm == "STANDALONE" or by_model or seen["page_size"] > 1 else _TREE


def _steps(seen: Seen) -> int | None:
    guesses = _guesses(seen)
    return guesses[0] if guesses else None


def _branches(seen: Seen) -> int | None:
    guesses = _guesses(seen)
    return guesses[1] if guesses else None


def _checked(seen: Seen) -> int | None:
    guesses = _guesses(seen)
    if guesses is None:
        return None
    return seen["speculative_num_steps"] + 1 if seen["speculative_eagle_topk"] == 1 else guesses[2]


def _own_head(seen: Seen) -> str | None:
    if seen["speculative_algorithm"] is None or seen.model is None or seen.model.architecture not in _OWN_HEAD:
        return None
    path: str | None = seen["model_path"]
    return path


def _chain_is_whole(seen: Seen) -> str | None:
    steps, branches = seen["speculative_num_steps"], seen["speculative_eagle_topk"]
    checked = seen["speculative_num_draft_tokens"]
    if branches != 1 or steps is None or checked is None or checked == steps + 1:
        return None
    return f"{steps} steps of one guess each, and the token before them, are {steps + 1} tokens to check"


def _parts_without_guesser(argument: str) -> Constraint:
    def check(seen: Seen) -> str | None:
        if seen[argument] is None or seen["speculative_algorithm"] is not None:
            return None
        return "nothing is guessed (speculative_algorithm is unset)"

    return Constraint(
        argument, "other_missing", check, "Set speculative_algorithm too.", reads=("speculative_algorithm",)
    )


def _no_overlap(seen: Seen) -> str | None:
    if seen["speculative_algorithm"] not in _WITH_MODEL or seen["disable_overlap_schedule"]:
        return None
    return "how far a guess goes is known only after the step (disable_overlap_schedule is false)"


def _no_divided_attention(seen: Seen) -> str | None:
    if seen["speculative_algorithm"] != "STANDALONE" or not seen["enable_dp_attention"]:
        return None
    return "a guessing model of its own cannot be combined with enable_dp_attention"


def _in_order(least: str, most: str) -> Constraint:
    def check(seen: Seen) -> str | None:
        return None if seen[least] <= seen[most] else f"{least} is {seen[least]}"

    return Constraint(most, "out_of_order", check, f"Give no less than {least}.", reads=(least,))


def trees_by_token(*but: str) -> Constraint:
    """A law for platforms: a tree of guesses is checked over pages of one token, but by the attention backends named.

    In longer pages the branches of a tree would share a page that only one of them may keep.
    """

    def check(seen: Seen) -> str | None:
        branches, page = seen["speculative_eagle_topk"], seen["page_size"]
        backend = seen["decode_attention_backend"] if but else "attention here"
        if branches in (None, 1) or page == 1 or backend in but:
            return None
        return f"{backend} checks a tree of guesses over pages of one token only (page_size is {page})"

    remedy = f"Follow one guess, or name {' or '.join(but)}." if but else "Follow one guess at each depth."
    reads = ("page_size", "decode_attention_backend") if but else ("page_size",)
    return Constraint("speculative_eagle_topk", "excluded", check, remedy, reads)


def _draft_bytes(seen: Seen) -> float:
    algorithm = seen["speculative_algorithm"]
    if algorithm is None or algorithm == "NGRAM":
        return 0.0
    return (6.0 if algorithm == "STANDALONE" else 2.0) * _GIB


MODEL_DEFAULTS: tuple[Default, ...] = (
    Default(
        "speculative_num_steps",
        _steps,
        "that many suit the guesser, the family of the model and the pages",
        reads=("speculative_algorithm", "page_size"),
    ),
    Default(
        "speculative_eagle_topk",
        _branches,
        "that many suit the guesser, the family of the model and the pages",
        reads=("speculative_algorithm", "page_size"),
    ),
    Default(
        "speculative_num_draft_tokens",
        _checked,
        "that many come of the steps and branches",
        reads=("speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "page_size"),
    ),
    Default(
        "speculative_draft_model_path",
        _own_head,
        "the model's own files hold the head that guesses",
        reads=("speculative_algorithm", "model_path"),
    ),
)

DEFAULTS: tuple[Default, ...] = (
    Default(
        "max_running_requests",
        lambda seen: 48 if seen["speculative_algorithm"] in _WITH_MODEL else None,
        "checking guesses makes each request a batch of its own",
        reads=("speculative_algorithm",),
    ),
    Default(
        "disable_overlap_schedule",
        lambda seen: True if seen["speculative_algorithm"] in _WITH_MODEL else None,
        "how far a guess goes is known only after the step",
        reads=("speculative_algorithm",),
    ),
)

CONTRIBUTIONS: tuple[Contribution, ...] = (
    Contribution(
        RESERVED_MEMORY,
        "guesser",
        _draft_bytes,
        "the guesser has weights, a pool and larger batches of its own",
        reads=("speculative_algorithm",),
    ),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "speculative_num_draft_tokens",
        "guesses_disagree",
        _chain_is_whole,
        "Leave it out, or follow more than one guess.",
        reads=("speculative_num_steps", "speculative_eagle_topk"),
    ),
    _parts_without_guesser("speculative_num_steps"),
    _parts_without_guesser("speculative_eagle_topk"),
    _parts_without_guesser("speculative_num_draft_tokens"),
    _parts_without_guesser("speculative_draft_model_path"),
    Constraint(
        "speculative_algorithm",
        "excluded",
        _no_overlap,
        "Leave disable_overlap_schedule out, or set it to true.",
        reads=("disable_overlap_schedule",),
    ),
    Constraint(
        "speculative_algorithm",
        "excluded",
        _no_divided_attention,
        "Leave one of the two out.",
        reads=("enable_dp_attention",),
    ),
    _in_order("speculative_ngram_min_match_window_size", "speculative_ngram_max_match_window_size"),
    _in_order("speculative_ngram_min_bfs_breadth", "speculative_ngram_max_bfs_breadth"),
)
