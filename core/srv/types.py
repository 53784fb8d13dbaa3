"""Values shared by many modules: requests, their parameters, finish reasons, log-probabilities.

Plain data without behaviour: msgspec structs, so that messages between processes can contain them. Imports no torch.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from srv.limits import MAX_TOKENS


class FinishReason(str, enum.Enum):
    """Why a request ended. The values of STOP and LENGTH are the OpenAI API's `finish_reason`."""

    STOP = "stop"  # end-of-sequence token, stop token id or stop string
    LENGTH = "length"  # max_tokens or the context length was reached
    ABORT = "abort"  # the client disconnected or called /abort_request, or the server shut down
    ERROR = "error"  # the engine failed on this request


TokenSequence = tuple[int, ...]


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """After `tokens` tokens of reasoning, only the tokens `end` may follow, in order.

    `inside`: the output starts with reasoning. It begins behind one of the texts `begins`, at the start of the output
    or, if `anywhere`, later as well; it ends with one of the texts `ends`, which the model may write by itself, in
    whatever tokens.
    """

    tokens: int
    end: TokenSequence
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    inside: bool
    anywhere: bool = False


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
    allowed_token_ids: only these tokens are sampled; empty: all. banned: no output contains one of these sequences of
    token ids, because its last token is masked where the output ends with the others.
    logprobs: number of top alternatives to report (0: only the chosen token), or None.
    prompt_logprobs: the same for the prompt, from position `prompt_logprobs_start` on.
    logprob_token_ids: tokens whose log-probabilities are reported at each of these positions.
    hidden_states: return the hidden state of every computed position (after the last norm).
    thinking: how long the model may reason; None: as long as it wants.
    custom_processor: the name of a logit processor of another distribution, "" for none; custom_params: its parameters,
    a JSON object.
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
    allowed_token_ids: Annotated[tuple[int, ...], Meta(description="Sample only these token ids.")] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    ignore_eos: Annotated[bool, Meta(description="Continue after the model's end token.")] = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    hidden_states: bool = False
    thinking: ThinkingBudget | None = None
    custom_processor: str = ""
    custom_params: str = ""


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
    CLS = "cls"  # that of the first token
    MAX = "max"  # the largest value of each element
    WEIGHTED_MEAN = "weightedmean"  # the mean, in which the token at position p counts p + 1 times
    MEAN_SQRT_LEN = "mean_sqrt_len"  # the sum, divided by the square root of the number of tokens

    @property
    def one_token(self) -> bool:
        """Whether the hidden state of a single token is all that is needed."""
        return self in (Pooling.LAST, Pooling.CLS)


class PooledOutput(str, enum.Enum):
    """What is computed from a pooled hidden state."""

    EMBEDDING = "embedding"
    LABELS = "labels"  # the logits of the classification head
    TOKENS = "tokens"  # the logits of some tokens of the vocabulary


class PoolingParams(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What is computed from the pooled hidden states of one prompt.

    An embedding passes the checkpoint's dense layers, is cut to `dimensions`, then scaled to length 1. Logits are
    returned as they are: those of the labels, or those of `tokens`, in their order. `types_from`: the position from
    which tokens have type 1, those of the second text of a pair; None: all have type 0.

    dimensions: the number of leading elements to keep (None: all), as models trained with Matryoshka representation
    learning allow (Kusupati et al. 2022, arXiv:2205.13147). normalize: whether the result is divided by its L2 norm.
    """

    pooling: Pooling
    dimensions: int | None = None
    normalize: bool = True
    output: PooledOutput = PooledOutput.EMBEDDING
    tokens: tuple[int, ...] = ()
    types_from: int | None = None


class DenseLayer(msgspec.Struct, frozen=True):
    """A dense layer between pooling and the embedding. `folder`: with its weights, in that of the checkpoint.

    `activation`: "identity", "tanh", "gelu", "relu" or "sigmoid".
    """

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str


class PooledHead(msgspec.Struct, frozen=True):
    """What a checkpoint's files say about the use of its pooled hidden states.

    `normalize`: embeddings are scaled to length 1 unless a request says otherwise. `dense`: the layers before that.
    `dimensions`: the sizes that embeddings may be cut to; () for any. `prompts`: (name, text) of texts that precede
    inputs, and `default_prompt`: the name of the one that inputs get by themselves. `prompt_pooled`: the tokens of
    these texts are pooled with the input's. `labels`: the names of the classification head's outputs. `activation`:
    what turns their logits into scores ("sigmoid", "softmax" or "identity"). `yes_no`: the tokens whose logits at the
    last position say whether a document answers a query; () if the checkpoint names none. `lower_case`: texts are
    embedded in lower case. `unsupported`: a clause that says which of the checkpoint's modules srv does not compute;
    "" if it computes all. `missing`: the file of one of them that is not there.
    """

    normalize: bool = True
    dense: tuple[DenseLayer, ...] = ()
    dimensions: tuple[int, ...] = ()
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    prompt_pooled: bool = True
    labels: tuple[str, ...] = ()
    activation: str = "sigmoid"
    yes_no: tuple[int, ...] = ()
    lower_case: bool = False
    unsupported: str = ""
    missing: str = ""

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense layers, which are computed in float32."""
        return sum(4 * layer.outputs * (layer.inputs + layer.bias) for layer in self.dense)


class Grammar(msgspec.Struct, frozen=True):
    """What the output of a request must follow, checked and translated.

    `text`: in the language of the engine's grammar backend. `begins_after`: the grammar begins after the first
    occurrence of this text in the output ("": at once). `slow`: whether its masks may take long from the first one on.
    """

    text: str
    begins_after: str = ""
    slow: bool = False


class Vocabulary(msgspec.Struct, frozen=True, tag=True):
    """The bytes of all tokens, concatenated in the order of ids, and the length of each.

    `special`: the ids of special tokens, which no grammar takes for text.
    """

    data: bytes
    lengths: list[int]
    special: list[int]


class RequestSpec(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One request to the engine. It travels unchanged from the API server to the scheduler and the worker.

    `id` is unique among live requests. `tokens` is the prompt. `params` say what is computed: generated tokens, or an
    embedding. The API server expands `n` into `n` requests. `namespace` separates entries of the prefix cache:
    requests in different namespaces share no pages even if their tokens are equal.
    `group` names the client request that the sequence belongs to ("": it is the only one), and `owner` whoever sent it
    ("": not known): the scheduler shares slots and steps fairly among owners, and among the groups of each.
    `grammar`: what the generated tokens must follow.
    """

    id: str
    tokens: tuple[int, ...]
    params: SamplingParams | PoolingParams
    namespace: str = ""
    group: str = ""
    owner: str = ""
    grammar: Grammar | None = None


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities under the model's own distribution (before penalties and temperature).

    `logprob` and `rank` (1: the most likely) are those of the token itself; `top` are the most likely
    (token id, logprob) pairs, best first, as many as were requested. `listed`: the log-probabilities of
    `SamplingOptions.logprob_token_ids`, in their order.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    listed: tuple[float, ...] = ()
