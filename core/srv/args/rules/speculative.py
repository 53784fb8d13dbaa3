"""Rules for speculative decoding: default draft sizes per model family, and combinations that are not supported.

Must not know any algorithm by name: what depends on it is in its description (`srv.speculative.registry`).
"""

from __future__ import annotations

from functools import partial

from srv.args.groups.speculative import SpeculativeArgs
from srv.args.rules.reserve import RESERVED_MEMORY, SAMPLING_BYTES_PER_LOGIT
from srv.args.spec import read_group
from srv.platform.facts import Constraint, Contribution, Default, ResolutionContext
from srv.speculative.algorithm import READABLE, VERIFIED_TOKENS, DraftSizes
from srv.speculative.planned import PLANNED, PlannedAlgorithm
from srv.speculative.registry import find

_CHAIN = (3, 1, 4)  # steps, top-k, verified tokens: one draft token at each depth
_TREE = (5, 4, 8)
_CHAIN_MODELS = frozenset({"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"})
_TOKEN_BYTES = 4  # of a history: int32
_MODELS_WITH_DRAFT_HEAD = frozenset({"DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"})


def _with_weights(context: ResolutionContext) -> PlannedAlgorithm | None:
    """The algorithm, if its drafter has weights of its own."""
    return PLANNED.get(context["speculative_algorithm"])


def _draft_shape(context: ResolutionContext) -> tuple[int, int, int] | None:
    """Steps, top-k and verified tokens that suit drafter, model and page size; None without a drafter.

    Trees need pages of one token (`draft_tree_constraint`).
    """
    algorithm = _with_weights(context)
    if algorithm is None:
        return None
    by_model = context.model is not None and context.model.architecture in _CHAIN_MODELS
    return _CHAIN if algorithm.model or by_model or context["page_size"] > 1 else _TREE


def _steps(context: ResolutionContext) -> int | None:
    shape = _draft_shape(context)
    return shape[0] if shape else None


def _topk(context: ResolutionContext) -> int | None:
    shape = _draft_shape(context)
    return shape[1] if shape else None


def _verified_tokens(context: ResolutionContext) -> int | None:
    shape = _draft_shape(context)
    if shape is None:
        return _default_of_algorithm(VERIFIED_TOKENS, context)
    return context["speculative_num_steps"] + 1 if context["speculative_eagle_topk"] == 1 else shape[2]


def _default_of_algorithm(argument: str, context: ResolutionContext) -> int | None:
    """The value that the description of the algorithm has for an argument. An invalid one is a fault of its owner."""
    algorithm = find(context["speculative_algorithm"])
    value = algorithm.defaults.get(argument) if algorithm else None
    if algorithm is None or value is None:
        return None
    declared = next(candidate for candidate in read_group("speculative", SpeculativeArgs) if candidate.name == argument)
    error = "must be an integer" if type(value) is not int else declared.validation_error(value)
    if error:
        from srv.speculative.third_party import fault

        raise fault(algorithm.name, "defaults", f"has {value!r} for {argument}, which {error}")
    return value


def _draft_head_path(context: ResolutionContext) -> str | None:
    architecture = context.model.architecture if context.model else None
    if context["speculative_algorithm"] is None or architecture not in _MODELS_WITH_DRAFT_HEAD:
        return None
    path: str | None = context["model_path"]
    return path


def _chain_is_verified(context: ResolutionContext) -> str | None:
    steps, topk = context["speculative_num_steps"], context["speculative_eagle_topk"]
    verified = context["speculative_num_draft_tokens"]
    if topk != 1 or steps is None or verified is None or verified == steps + 1:
        return None
    return f"{steps} steps of one draft token each, and the token before them, are {steps + 1} tokens to verify"


def _no_overlap(context: ResolutionContext) -> str | None:
    if _with_weights(context) is None or context["disable_overlap_schedule"]:
        return None
    return "the number of accepted tokens is known only after the step (disable_overlap_schedule is false)"


def _no_dp_attention(context: ResolutionContext) -> str | None:
    algorithm = _with_weights(context)
    if algorithm is None or not algorithm.model or not context["enable_dp_attention"]:
        return None
    return "a separate draft model cannot be combined with enable_dp_attention"


def _read_by_algorithm(argument: str) -> Constraint:
    default = getattr(SpeculativeArgs(), argument)

    def check(context: ResolutionContext) -> str | None:
        algorithm = find(context["speculative_algorithm"])
        if algorithm is None or argument in algorithm.reads or context[argument] == default:
            return None
        return f"the drafter {algorithm.name} does not read it"

    return Constraint(argument, "other_algorithm", check, "Leave it out.", reads=("speculative_algorithm",))


def _in_order(minimum: str, maximum: str) -> Constraint:
    def check(context: ResolutionContext) -> str | None:
        return None if context[minimum] <= context[maximum] else f"{minimum} is {context[minimum]}"

    return Constraint(maximum, "out_of_order", check, f"Set it to at least {minimum}.", reads=(minimum,))


def draft_tree_constraint(*exempt: str) -> Constraint:
    """A constraint for platforms: draft trees are verified over pages of one token, except by the `exempt` backends.

    In larger pages the branches of a tree would share a page of which only one branch may be kept.
    """

    def check(context: ResolutionContext) -> str | None:
        topk, page = context["speculative_eagle_topk"], context["page_size"]
        backend = context["decode_attention_backend"] if exempt else "the platform's attention"
        if topk in (None, 1) or page == 1 or backend in exempt:
            return None
        return f"{backend} verifies draft trees over pages of one token only (page_size is {page})"

    remedy = f"Set it to 1, or choose the backend {' or '.join(exempt)}." if exempt else "Set it to 1."
    reads = ("page_size", "decode_attention_backend") if exempt else ("page_size",)
    return Constraint("speculative_eagle_topk", "excluded", check, remedy, reads)


def _sizes(context: ResolutionContext) -> DraftSizes:
    """The sizes of a drafter; 0 for what depends on the model, if there is none."""
    model = context.model
    width = (context["context_length"] or model.context_length) if model else 0
    return DraftSizes(context["max_running_requests"], width, model.vocab_size if model else 0)


def _position_bytes(context: ResolutionContext, sizes: DraftSizes) -> float:
    """What sampling needs for the positions of drafts; `srv.args.rules.reserve` counts one position per request."""
    verified, chunk = context["speculative_num_draft_tokens"], context["chunked_prefill_size"]
    budget = chunk if chunk > 0 else context["max_prefill_tokens"]
    drafts = min(sizes.rows * ((verified or 1) - 1), budget // 2)
    return float(drafts * sizes.vocab_size * SAMPLING_BYTES_PER_LOGIT)


def _draft_bytes(context: ResolutionContext) -> float:
    planned, algorithm = _with_weights(context), find(context["speculative_algorithm"])
    if planned is not None:
        return planned.device_bytes
    if algorithm is None:
        return 0.0
    sizes = _sizes(context)
    histories = sizes.rows * sizes.width * _TOKEN_BYTES  # of all running requests (`srv.worker.histories`)
    drafter = algorithm.device_bytes(sizes) if context.model else 0
    return histories + _position_bytes(context, sizes) + drafter


MODEL_DEFAULTS: tuple[Default, ...] = (
    Default(
        "speculative_num_steps",
        _steps,
        "that number suits the drafter, the model family and the page size",
        reads=("speculative_algorithm", "page_size"),
    ),
    Default(
        "speculative_eagle_topk",
        _topk,
        "that number suits the drafter, the model family and the page size",
        reads=("speculative_algorithm", "page_size"),
    ),
    Default(
        "speculative_num_draft_tokens",
        _verified_tokens,
        "it follows from speculative_num_steps and speculative_eagle_topk, or suits the drafter",
        reads=("speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "page_size"),
    ),
    *(
        Default(name, partial(_default_of_algorithm, name), "it suits the drafter", reads=("speculative_algorithm",))
        for name in READABLE
    ),
    Default(
        "speculative_draft_model_path",
        _draft_head_path,
        "the model's own files contain a draft head",
        reads=("speculative_algorithm", "model_path"),
    ),
)

DEFAULTS: tuple[Default, ...] = (
    Default(
        "max_running_requests",
        lambda context: 48 if _with_weights(context) else None,
        "each request has several tokens to verify per step",
        reads=("speculative_algorithm",),
    ),
    Default(
        "disable_overlap_schedule",
        lambda context: True if _with_weights(context) else None,
        "the number of accepted tokens is known only after the step",
        reads=("speculative_algorithm",),
    ),
)

CONTRIBUTIONS: tuple[Contribution, ...] = (
    Contribution(
        RESERVED_MEMORY,
        "drafter",
        _draft_bytes,
        "the drafter has its own weights and KV pool, or the tokens of all requests, and batches are larger",
        reads=(
            "speculative_algorithm",
            "speculative_num_draft_tokens",
            "max_running_requests",
            "context_length",
            "chunked_prefill_size",
            "max_prefill_tokens",
        ),
    ),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "speculative_num_draft_tokens",
        "guesses_disagree",
        _chain_is_verified,
        "Leave it out, or set speculative_eagle_topk above 1.",
        reads=("speculative_num_steps", "speculative_eagle_topk"),
    ),
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
        _no_dp_attention,
        "Leave one of the two out.",
        reads=("enable_dp_attention",),
    ),
    _in_order("speculative_ngram_min_match_window_size", "speculative_ngram_max_match_window_size"),
)

# Constraints on values that a user sets.
USER_CONSTRAINTS: tuple[Constraint, ...] = tuple(map(_read_by_algorithm, READABLE))
