"""Values shared by many modules: requests, their parameters, finish reasons, log-probabilities.

Plain data without behaviour: msgspec structs, so that messages between processes can contain them. Imports no torch.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

MAX_TOKENS = 2**31 - 1  # the limits of the context and the KV pool are checked later


class FinishReason(str, enum.Enum):
    """Why a request ended. The values of STOP and LENGTH are the OpenAI API's `finish_reason`."""

    STOP = "stop"  # end-of-sequence token, stop token id or stop string
    LENGTH = "length"  # max_tokens or the context length was reached
    ABORT = "abort"  # the client disconnected or called /abort_request, or the server shut down
    ERROR = "error"  # the engine failed on this request


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters that reach the worker as the client sets them, each declared here and nowhere else.

    A field whose type has a `Meta` is a field of all request bodies that sample: the API server checks the bounds, and
    shows the description. Its name is that of OpenAI's API, or of vLLM's extensions; `extra` has the name in another
    protocol ("native": SGLang's). Fields without a `Meta` are requested differently in each protocol.

    temperature: 0 means greedy sampling. top_k: -1 keeps all tokens.
    repetition_penalty divides positive and multiplies negative logits of tokens in prompt or output (Keskar et al.
    2019); frequency_penalty and presence_penalty are subtracted and count output tokens only (OpenAI).
    logit_bias: (token id, bias) pairs, bias in [-100, 100].
    stop_token_ids: token ids that end the request, in addition to the model's end-of-sequence tokens. ignore_eos:
    end-of-sequence tokens do not end the request. min_tokens: end-of-sequence tokens and stop token ids are masked
    until the output has that many tokens.
    logprobs: number of top alternatives to report (0: only the chosen token), or None.
    prompt_logprobs: the same for the prompt, from position `prompt_logprobs_start` on.
    hidden_states: return the hidden state of every computed position (after the last norm).
    """

    min_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_TOKENS,
            description="Minimum number of tokens before an end token; stop strings still apply.",
            extra={"native": "min_new_tokens"},
        ),
    ] = 0
    temperature: Annotated[float, Meta(ge=0, le=100, description="0 is greedy sampling.")] = 1.0
    top_p: Annotated[
        float, Meta(gt=0, le=1, description="Keep the most likely tokens up to this total probability.")
    ] = 1.0
    top_k: Annotated[int, Meta(description="Keep this many of the most likely tokens; -1 keeps all.")] = -1
    min_p: Annotated[
        float, Meta(ge=0, le=1, description="Drop tokens below this fraction of the highest probability.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, Meta(ge=0.01, le=100, description="Above 1 discourages tokens that occurred; 1 has no effect.")
    ] = 1.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2, description="Subtracted per occurrence of a token.")] = 0.0
    presence_penalty: Annotated[
        float, Meta(ge=-2, le=2, description="Subtracted once for each token that occurred.")
    ] = 0.0
    logit_bias: Annotated[
        tuple[tuple[int, float], ...], Meta(description="Maps token ids (as strings) to biases from -100 to 100.")
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], Meta(description="Token ids that end the output.")] = ()
    ignore_eos: Annotated[bool, Meta(description="Continue after the model's end token.")] = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    hidden_states: bool = False


class SamplingParams(SamplingOptions, frozen=True, tag=True, kw_only=True):
    """How the tokens of one request are sampled. The API server validates the values; the engine relies on them.

    Both fields are always set: the API server sets `max_tokens` to what fits for requests without it, and draws a seed.
    seed: the sampling noise of the token at position p depends on (seed, p) only. 0 <= seed < 2**63. Stop strings are
    matched in the API process only.
    """

    max_tokens: int
    seed: int = 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


class Pooling(str, enum.Enum):
    """Which hidden states (after the last norm) become the embedding of a prompt."""

    LAST = "last"  # that of the last token
    MEAN = "mean"  # the mean over all tokens


class PoolingParams(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """How the embedding of one prompt is computed: pooled, cut to `dimensions`, then scaled to length 1.

    dimensions: the number of leading elements to keep (None: all), as models trained with Matryoshka representation
    learning allow (Kusupati et al. 2022, arXiv:2205.13147). normalize: whether the result is divided by its L2 norm.
    """

    pooling: Pooling
    dimensions: int | None = None
    normalize: bool = True


class RequestSpec(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One request to the engine. It travels unchanged from the API server to the scheduler and the worker.

    `id` is unique among live requests. `tokens` is the prompt. `params` say what is computed: generated tokens, or an
    embedding. The API server expands `n` into `n` requests. `namespace` separates entries of the prefix cache:
    requests in different namespaces share no pages even if their tokens are equal.
    """

    id: str
    tokens: tuple[int, ...]
    params: SamplingParams | PoolingParams
    namespace: str = ""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities under the model's own distribution (before penalties and temperature).

    `logprob` and `rank` (1: the most likely) are those of the token itself; `top` are the most likely
    (token id, logprob) pairs, best first, as many as were requested.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
