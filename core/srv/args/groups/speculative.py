"""Arguments of speculative decoding: cheap drafts of several tokens, verified by the model in one step."""

from typing import Annotated, Literal, NamedTuple

from srv.args.checks import at_least, between, not_empty
from srv.args.spec import Arg
from srv.speculative.planned import PLANNED
from srv.speculative.registry import BUILT_IN, further_names

_LATER = "only drafts from n-grams are implemented (speculative_algorithm NGRAM)"
_TREES = "drafts are chains; draft trees are not implemented yet"
_OWN_TEXT = "drafts are matched in the text of their own request; nothing is stored"
_WITH_DRAFTS = ("speculative_algorithm",)


class SpeculativeArgs(NamedTuple):
    """How drafts are generated, how long they are, and when they are accepted."""

    speculative_algorithm: Annotated[
        str | None,
        Arg(
            "Drafter: a head trained for it (EAGLE, EAGLE3, NEXTN), a smaller model (STANDALONE), or n-grams of the "
            "text so far (NGRAM).",
            choices=tuple(BUILT_IN),
            further_choices=further_names,
            planned_values=tuple((name, _LATER) for name in PLANNED),
        ),
    ] = None
    speculative_draft_model_path: Annotated[
        str | None,
        Arg(
            "Draft model or draft head.",
            not_empty(),
            only_with=_WITH_DRAFTS,
            planned=_LATER,
            metavar="PATH_OR_ID",
            aliases=("speculative_draft_model",),
        ),
    ] = None
    speculative_draft_model_revision: Annotated[
        str | None,
        Arg(
            "Branch, tag or commit of a draft model from a hub.",
            not_empty(),
            only_with=_WITH_DRAFTS,
            planned=_LATER,
            metavar="REVISION",
        ),
    ] = None
    speculative_draft_model_quantization: Annotated[
        str | None,
        Arg(
            "Quantization of the weights of the draft model; unquant if they are not quantized.",
            not_empty(),
            only_with=_WITH_DRAFTS,
            planned=_LATER,
            metavar="METHOD",
        ),
    ] = None
    speculative_num_steps: Annotated[
        int | None,
        Arg(
            "Number of steps that the drafter runs per draft.",
            at_least(1),
            only_with=_WITH_DRAFTS,
            planned=_LATER,
            unit="steps",
        ),
    ] = None
    speculative_eagle_topk: Annotated[
        int | None,
        Arg(
            "Number of draft tokens that are followed at each depth of the draft tree.",
            at_least(1),
            only_with=_WITH_DRAFTS,
            planned=_LATER,
            metavar="TOPK",
        ),
    ] = None
    speculative_num_draft_tokens: Annotated[
        int | None,
        Arg(
            "Number of tokens that the model verifies in one step: the last token of a request, and its drafts.",
            between(2, 32),
            only_with=_WITH_DRAFTS,
            unit="tokens",
        ),
    ] = None
    speculative_accept_threshold_single: Annotated[
        float,
        Arg(
            "A draft token with a higher probability than this is accepted immediately.",
            between(0, 1),
            only_with=_WITH_DRAFTS,
            planned=_LATER,
            metavar="PROBABILITY",
        ),
    ] = 1.0
    speculative_accept_threshold_acc: Annotated[
        float,
        Arg(
            "Divisor of the model's probability of a draft token (up to 1); less than 1 accepts more tokens.",
            between(0, 1),
            only_with=_WITH_DRAFTS,
            planned=_LATER,
            metavar="PROBABILITY",
        ),
    ] = 1.0
    speculative_token_map: Annotated[
        str | None,
        Arg(
            "Reduced vocabulary of the drafter.",
            not_empty(),
            only_with=_WITH_DRAFTS,
            planned=_LATER,
            metavar="PATH_OR_ID",
        ),
    ] = None
    speculative_attention_mode: Annotated[
        Literal["prefill", "decode"],
        Arg(
            "Whether drafts are verified with prefill attention or with decode attention.",
            only_with=_WITH_DRAFTS,
            planned=_LATER,
        ),
    ] = "prefill"
    speculative_moe_runner_backend: Annotated[
        str | None,
        Arg(
            "Backend that computes the experts of the drafter.",
            not_empty(),
            only_with=_WITH_DRAFTS,
            planned=_LATER,
            metavar="NAME",
        ),
    ] = None
    speculative_moe_a2a_backend: Annotated[
        str | None,
        Arg(
            "All-to-all backend that dispatches tokens to the experts of the drafter.",
            not_empty(),
            only_with=_WITH_DRAFTS,
            planned=_LATER,
            metavar="NAME",
        ),
    ] = None
    speculative_ngram_min_match_window_size: Annotated[
        int,
        Arg(
            "Minimum number of trailing tokens that are matched in the text so far.",
            at_least(1),
            only_with=_WITH_DRAFTS,
            unit="tokens",
        ),
    ] = 1
    speculative_ngram_max_match_window_size: Annotated[
        int,
        Arg(
            "Maximum number of trailing tokens that are matched in the text so far.",
            at_least(1),
            only_with=_WITH_DRAFTS,
            unit="tokens",
        ),
    ] = 12
    speculative_ngram_min_bfs_breadth: Annotated[
        int,
        Arg(
            "Minimum number of continuations that are followed at each depth.",
            planned=_TREES,
            metavar="COUNT",
        ),
    ] = 1
    speculative_ngram_max_bfs_breadth: Annotated[
        int,
        Arg(
            "Maximum number of continuations that are followed at each depth.",
            planned=_TREES,
            metavar="COUNT",
        ),
    ] = 10
    speculative_ngram_match_type: Annotated[
        Literal["BFS", "PROB"],
        Arg("Whether continuations are selected by recency or by frequency.", planned=_TREES),
    ] = "BFS"
    speculative_ngram_branch_length: Annotated[
        int,
        Arg(
            "Maximum number of tokens that are copied from one match.",
            at_least(1),
            only_with=_WITH_DRAFTS,
            unit="tokens",
        ),
    ] = 18
    speculative_ngram_capacity: Annotated[
        int,
        Arg(
            "Maximum number of stored continuations.",
            planned=_OWN_TEXT,
            metavar="ENTRIES",
        ),
    ] = 10_000_000
