"""Arguments that shape the steps: how many requests, how many tokens, in which order."""

from typing import Annotated, Literal, NamedTuple

from srv.args.checks import above, at_least, at_least_or, between
from srv.args.spec import Arg

_PRIORITY = "priorities of requests are not implemented yet"
_OTHER_POLICIES = "only first come first served and longest prefix first are implemented yet"
_TWO_BATCHES = "overlapping the halves of a batch is not implemented yet"
_SCORING = "scoring several items in one prompt is not implemented yet"


class ScheduleArgs(NamedTuple):
    """What the scheduler may put into one step."""

    max_running_requests: Annotated[int, Arg("Most requests that run at once.", at_least(1), unit="requests")] = 256
    max_queued_requests: Annotated[
        int, Arg("Most requests that wait; one more is refused with status 503.", at_least(1), unit="requests")
    ] = 4096
    chunked_prefill_size: Annotated[
        int,
        Arg(
            "Most prompt tokens in one step; a longer prompt takes several steps.",
            at_least_or(1, -1, "never cut a prompt"),
            unit="tokens",
        ),
    ] = 2048
    max_prefill_tokens: Annotated[
        int,
        Arg(
            "Most prompt tokens in one step while prompts are not cut; a longer prompt runs alone.",
            at_least(1),
            unit="tokens",
        ),
    ] = 16384
    prefill_max_requests: Annotated[
        int | None,
        Arg(
            "Most requests whose prompts share a step.",
            at_least(1),
            planned="a step's prompts are limited by their tokens; limiting their number is not implemented yet",
            unit="requests",
        ),
    ] = None
    schedule_policy: Annotated[
        Literal["fcfs", "lpm"],
        Arg(
            "Order of waiting requests: first come first served, longest cached prefix first, at random, by subtree of "
            "the prefix cache, or longest output first.",
            planned_values=tuple((name, _OTHER_POLICIES) for name in ("random", "dfs-weight", "lof")),
        ),
    ] = "fcfs"
    schedule_conservativeness: Annotated[
        float,
        Arg(
            "Factor on the output that is expected of running requests; more means fewer retractions.",
            above(0),
            metavar="FACTOR",
        ),
    ] = 1.0
    enable_priority_scheduling: Annotated[
        bool, Arg("Serve requests of a higher priority first.", planned=_PRIORITY)
    ] = False
    schedule_low_priority_values_first: Annotated[
        bool, Arg("Let the lower number be the higher priority.", planned=_PRIORITY)
    ] = False
    priority_scheduling_preemption_threshold: Annotated[
        int,
        Arg(
            "By how much a waiting request's priority must exceed a running one's to take its place.",
            at_least(0),
            planned=_PRIORITY,
            metavar="DIFFERENCE",
        ),
    ] = 10
    disable_overlap_schedule: Annotated[bool, Arg("Plan a step only when the one before has ended.")] = False
    enable_mixed_chunk: Annotated[
        bool,
        Arg(
            "Put prompts and output into one step.",
            planned="steps always hold prompts and output together; keeping them apart is not implemented yet",
        ),
    ] = True
    num_continuous_decode_steps: Annotated[
        int,
        Arg(
            "Steps of output that are planned at once.",
            at_least(1),
            planned="every step is planned on its own; planning several at once is not implemented yet",
            unit="steps",
        ),
    ] = 1
    scheduler_recv_interval: Annotated[
        int,
        Arg(
            "Steps between two looks at what has arrived.",
            at_least(1),
            planned="the engine looks at every step; looking less often is not implemented yet",
            unit="steps",
        ),
    ] = 1
    sleep_on_idle: Annotated[
        bool,
        Arg(
            "Let the engine sleep while there is nothing to do.",
            planned="the engine always sleeps while there is nothing to do; polling instead is not implemented yet",
        ),
    ] = True
    stream_interval: Annotated[
        int,
        Arg(
            "Output tokens between two parts of a stream.",
            at_least(1),
            planned="every step's tokens are sent at once; gathering more is not implemented yet",
            unit="tokens",
        ),
    ] = 1
    stream_output: Annotated[
        bool,
        Arg(
            "Let each part of a stream hold only what is new.",
            planned="parts in the native protocol hold all text so far; sending less is not implemented yet",
        ),
    ] = False
    allow_auto_truncate: Annotated[
        bool,
        Arg(
            "Cut prompts that are too long instead of refusing them.",
            planned="a prompt is used whole or refused; cutting it is not implemented yet",
        ),
    ] = False
    enable_two_batch_overlap: Annotated[
        bool, Arg("Compute on one half of a batch while the other half communicates.", planned=_TWO_BATCHES)
    ] = False
    enable_single_batch_overlap: Annotated[
        bool, Arg("Let parts of one batch compute while others communicate.", planned=_TWO_BATCHES)
    ] = False
    tbo_token_distribution_threshold: Annotated[
        float,
        Arg(
            "Smallest share of tokens in the smaller half at which whole requests are divided; below it one prompt "
            "is cut, unless this is 0.",
            between(0, 0.5),
            planned=_TWO_BATCHES,
            metavar="SHARE",
        ),
    ] = 0.48
    enable_deterministic_inference: Annotated[
        bool,
        Arg(
            "Give the same output for a request whatever else is in its batch.",
            planned="sampling already depends on no batch, but kernels whose sums do not are not implemented yet",
        ),
    ] = False
    multi_item_scoring_delimiter: Annotated[
        int | None,
        Arg("Token that separates the items of one prompt.", at_least(0), planned=_SCORING, metavar="TOKEN_ID"),
    ] = None
