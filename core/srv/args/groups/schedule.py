"""Arguments of the scheduler: how many requests and tokens a step has, and in which order requests run."""

from typing import Annotated, Literal, NamedTuple

from srv.args.checks import above, at_least, at_least_or
from srv.args.spec import Arg

_PRIORITY = "request priorities are not implemented yet"
_OTHER_POLICIES = "only fcfs and lpm are implemented so far"
_TWO_BATCHES = "overlapping computation and communication within a batch is not implemented yet"
_SCORING = "multi-item scoring is not implemented yet"


class ScheduleArgs(NamedTuple):
    """What the scheduler may put into one step."""

    max_running_requests: Annotated[
        int, Arg("Maximum number of requests that run concurrently.", at_least(1), unit="requests")
    ] = 256
    max_queued_requests: Annotated[
        int,
        Arg(
            "Maximum number of waiting requests, as clients sent them, of which nothing runs yet; further ones are "
            "refused with status 503.",
            at_least(1),
            unit="requests",
        ),
    ] = 4096
    chunked_prefill_size: Annotated[
        int,
        Arg(
            "Maximum number of prompt tokens in one step; a longer prompt is split over several steps.",
            at_least_or(1, -1, "never split a prompt"),
            unit="tokens",
        ),
    ] = 2048
    max_prefill_tokens: Annotated[
        int,
        Arg(
            "Maximum number of prompt tokens in one step if prompts are not split; a longer prompt runs alone.",
            at_least(1),
            unit="tokens",
        ),
    ] = 16384
    prefill_max_requests: Annotated[
        int | None,
        Arg(
            "Maximum number of requests whose prompts share a step.",
            planned="only the tokens of a step are limited; a limit on its prompts is not implemented yet",
            unit="requests",
        ),
    ] = None
    schedule_policy: Annotated[
        Literal["fcfs", "lpm"],
        Arg(
            "Order of waiting requests that hold equally many slots (whoever holds fewer goes first): first come first "
            "served, longest prefix match, random, depth-first through the prefix cache, or longest output first.",
            planned_values=tuple((name, _OTHER_POLICIES) for name in ("random", "dfs-weight", "lof")),
        ),
    ] = "fcfs"
    schedule_conservativeness: Annotated[
        float,
        Arg(
            "Factor on the expected output length of running requests; a higher value causes fewer retractions.",
            above(0),
            metavar="FACTOR",
        ),
    ] = 1.0
    enable_priority_scheduling: Annotated[
        bool, Arg("Serve requests with a higher priority first.", planned=_PRIORITY)
    ] = False
    schedule_low_priority_values_first: Annotated[
        bool, Arg("Treat lower values as higher priorities.", planned=_PRIORITY)
    ] = False
    priority_scheduling_preemption_threshold: Annotated[
        int,
        Arg(
            "Minimum priority difference at which a waiting request preempts a running one.",
            planned=_PRIORITY,
            metavar="DIFFERENCE",
        ),
    ] = 10
    disable_overlap_schedule: Annotated[bool, Arg("Plan a step only after the previous one has ended.")] = False
    enable_mixed_chunk: Annotated[
        bool,
        Arg(
            "Mix prefill and decode in one step.",
            planned="steps always mix prefill and decode; separating them is not implemented yet",
        ),
    ] = True
    num_continuous_decode_steps: Annotated[
        int,
        Arg(
            "Number of decode steps that are planned at once.",
            planned="each step is planned separately; planning several at once is not implemented yet",
            unit="steps",
        ),
    ] = 1
    scheduler_recv_interval: Annotated[
        int,
        Arg(
            "Steps between two polls for new requests.",
            planned="the engine polls in every step; polling less often is not implemented yet",
            unit="steps",
        ),
    ] = 1
    sleep_on_idle: Annotated[
        bool,
        Arg(
            "Let the engine sleep while it is idle.",
            planned="the engine always sleeps while it is idle; polling instead is not implemented yet",
        ),
    ] = True
    stream_interval: Annotated[
        int,
        Arg(
            "Output tokens per chunk of a stream; the first token and the last chunk do not wait for more.",
            at_least(1),
            unit="tokens",
        ),
    ] = 1
    stream_output: Annotated[
        bool,
        Arg("Send only what is new in each chunk of a stream of /generate, instead of the whole output so far."),
    ] = False
    allow_auto_truncate: Annotated[
        bool,
        Arg(
            "Truncate prompts that are too long instead of refusing them.",
            planned="prompts that are too long are refused; truncating them is not implemented yet",
        ),
    ] = False
    enable_two_batch_overlap: Annotated[
        bool, Arg("Compute one half of a batch while the other half communicates.", planned=_TWO_BATCHES)
    ] = False
    enable_single_batch_overlap: Annotated[
        bool, Arg("Overlap computation and communication within one batch.", planned=_TWO_BATCHES)
    ] = False
    tbo_token_distribution_threshold: Annotated[
        float,
        Arg(
            "Minimum share of tokens in the smaller half for a split between requests; below it one prompt "
            "is split, unless this is 0.",
            planned=_TWO_BATCHES,
            metavar="SHARE",
        ),
    ] = 0.48
    enable_deterministic_inference: Annotated[
        bool,
        Arg(
            "Give a request the same output, to the last bit, whatever other requests are served at the same time.",
            needs="batch_invariant",
        ),
    ] = False
    multi_item_scoring_delimiter: Annotated[
        int | None,
        Arg("Token id that separates the items of one prompt.", planned=_SCORING, metavar="TOKEN_ID"),
    ] = None
