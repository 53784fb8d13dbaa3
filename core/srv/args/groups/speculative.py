"""Arguments of speculative decoding: a cheap guess at several tokens, checked by the model in one step."""

from typing import Annotated, Literal, NamedTuple

from srv.args.checks import at_least, between, not_empty
from srv.args.spec import Arg

_LATER = "speculative decoding is not implemented yet"


class SpeculativeArgs(NamedTuple):
    """Who guesses, how much, and when a guess is taken."""

    speculative_algorithm: Annotated[
        Literal["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"] | None,
        Arg(
            "Who guesses: a head trained for it (EAGLE, EAGLE3, NEXTN), a smaller model (STANDALONE), or the text so "
            "far (NGRAM).",
            planned=_LATER,
        ),
    ] = None
    speculative_draft_model_path: Annotated[
        str | None,
        Arg(
            "Model or head that guesses.",
            not_empty(),
            planned=_LATER,
            metavar="PATH_OR_ID",
            aliases=("speculative_draft_model",),
        ),
    ] = None
    speculative_draft_model_revision: Annotated[
        str | None,
        Arg("Branch, tag or commit of a guessing model from a hub.", not_empty(), planned=_LATER, metavar="REVISION"),
    ] = None
    speculative_num_steps: Annotated[
        int | None, Arg("How many times the guesser runs a step.", at_least(1), planned=_LATER, unit="steps")
    ] = None
    speculative_eagle_topk: Annotated[
        int | None, Arg("Guesses that are followed at each depth.", at_least(1), planned=_LATER, metavar="BRANCHES")
    ] = None
    speculative_num_draft_tokens: Annotated[
        int | None, Arg("Guessed tokens that the model checks in a step.", at_least(1), planned=_LATER, unit="tokens")
    ] = None
    speculative_accept_threshold_single: Annotated[
        float,
        Arg(
            "A guess that the model finds likelier than this is taken at once.",
            between(0, 1),
            planned=_LATER,
            metavar="PROBABILITY",
        ),
    ] = 1.0
    speculative_accept_threshold_acc: Annotated[
        float,
        Arg(
            "Divisor of the model's probability of a guess (up to 1); less than 1 takes more guesses.",
            between(0, 1),
            planned=_LATER,
            metavar="PROBABILITY",
        ),
    ] = 1.0
    speculative_token_map: Annotated[
        str | None,
        Arg("The guesser's own, smaller vocabulary.", not_empty(), planned=_LATER, metavar="PATH_OR_ID"),
    ] = None
    speculative_attention_mode: Annotated[
        Literal["prefill", "decode"],
        Arg("Whether guesses are checked with the attention of prompts or with that of output.", planned=_LATER),
    ] = "prefill"
    speculative_moe_runner_backend: Annotated[
        str | None, Arg("Backend that runs the guesser's experts.", not_empty(), planned=_LATER, metavar="NAME")
    ] = None
    speculative_moe_a2a_backend: Annotated[
        str | None,
        Arg("Backend that carries tokens to the guesser's experts.", not_empty(), planned=_LATER, metavar="NAME"),
    ] = None
    speculative_ngram_min_match_window_size: Annotated[
        int,
        Arg("Fewest last tokens that are looked up in the text so far.", at_least(1), planned=_LATER, unit="tokens"),
    ] = 1
    speculative_ngram_max_match_window_size: Annotated[
        int, Arg("Most last tokens that are looked up in the text so far.", at_least(1), planned=_LATER, unit="tokens")
    ] = 12
    speculative_ngram_min_bfs_breadth: Annotated[
        int, Arg("Fewest continuations that are followed at each depth.", at_least(1), planned=_LATER, metavar="COUNT")
    ] = 1
    speculative_ngram_max_bfs_breadth: Annotated[
        int, Arg("Most continuations that are followed at each depth.", at_least(1), planned=_LATER, metavar="COUNT")
    ] = 10
    speculative_ngram_match_type: Annotated[
        Literal["BFS", "PROB"],
        Arg("Whether continuations are followed by their age or by how often they came.", planned=_LATER),
    ] = "BFS"
    speculative_ngram_branch_length: Annotated[
        int, Arg("Longest continuation that is kept.", at_least(1), planned=_LATER, unit="tokens")
    ] = 18
    speculative_ngram_capacity: Annotated[
        int, Arg("Most continuations that are kept.", at_least(1), planned=_LATER, metavar="ENTRIES")
    ] = 10_000_000
