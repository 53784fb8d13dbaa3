"""Values that cross module borders: sampling parameters, finish reasons, logprobs.

Plain data (msgspec structs, so that they travel between processes as they are); no behaviour beyond
reading themselves. Imports no torch.
"""

from __future__ import annotations

import enum

import msgspec


class FinishReason(str, enum.Enum):
    """Why a request ended. The values are what the OpenAI API prints."""

    STOP = "stop"  # end-of-sequence token, stop token id or stop string
    LENGTH = "length"  # max_tokens or the context length was reached
    ABORT = "abort"  # the client went away, /abort_request, or shutdown
    ERROR = "error"  # the engine failed on this request


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen. Checked at the API border, taken as true behind it.

    temperature: 0 is greedy. top_k: -1 keeps all. top_p in (0, 1]. min_p in [0, 1].
    repetition_penalty > 0 divides/multiplies logits of tokens in prompt or output (Keskar et al. 2019);
    frequency_penalty and presence_penalty in [-2, 2] subtract, counting output tokens only (OpenAI).
    logit_bias: (token id, bias) pairs, bias in [-100, 100].
    seed: noise of the token at position p depends on (seed, p) alone; the API process draws one
    for a request that brings none, so it is always set here. 0 <= seed < 2**63.
    stop_token_ids: end the request, beside the model's own end tokens; stop strings are matched by the
    API process, never here. ignore_eos: the model's own end tokens do not end the request.
    min_tokens: end tokens and stop token ids are masked until that many tokens are out.
    logprobs: None, or the number of top alternatives (0: only the chosen token).
    prompt_logprobs: None, or likewise for the prompt, from position `prompt_logprobs_start` on.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities under the model's own distribution (before penalties and temperature).

    `logprob` is of the token itself, `rank` its place (1 is the most likely), `top` the most likely
    (token id, logprob) pairs, best first, as many as were asked for.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
