"""L3: the real engine with a small model, each feature on and off, compared with the model on the host in float32.

Every check runs one engine in its own process, because a worker creates its platform once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import normalize

from srv.errors import Refusal
from srv.io.messages import Abort
from srv.quantization.formats import modelslim
from srv.sched.late import LateInputMaker, LateInputs, LateRow
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.local import (
    MAX_RUNNING,
    OUTPUT_TOKENS,
    POOL_TOKENS,
    EngineUnderTest,
    accepted_model,
    engine_under_test,
    page_span,
    prompt,
    request,
)
from srv.testing.conformance.model import Fault, NotApplicable
from srv.testing.conformance.reference import EMBEDDING_TOLERANCE, LOGIT_TOLERANCE, penalties
from srv.testing.conformance.setups import declared_dtypes, resolve_for
from srv.testing.conformance.values import user_statement
from srv.testing.engine import CheckedEngine, GenerationResult
from srv.testing.pooled import pooled_reference
from srv.types import FinishReason, Pooling, PoolingParams, RequestSpec, SamplingParams

_RETRACTION_REQUESTS = 6
_FORCED = 7  # the token of output that a bias forces


def greedy(kit: Kit) -> str:
    """A batch of prompts, and two of them again one at a time."""
    with engine_under_test(kit) as tested:
        prompts = tested.prompts()
        tested.check(prompts, tested.generate(prompts), "greedy output of a batch")
        tested.engine.flush()
        for prompt_tokens in prompts[-2:]:
            tested.check([prompt_tokens], tested.generate([prompt_tokens]), "greedy output of one request")
        return f"{len(prompts)} prompts, {OUTPUT_TOKENS} tokens each, in {tested.dtype}, pages of {tested.page_size}"


def float32(kit: Kit) -> str:
    """The same in float32."""
    return _in_dtype(kit, "float32")


def bfloat16(kit: Kit) -> str:
    """The same in bfloat16."""
    return _in_dtype(kit, "bfloat16")


def float16(kit: Kit) -> str:
    """The same in float16."""
    return _in_dtype(kit, "float16")


def _in_dtype(kit: Kit, dtype: str) -> str:
    if dtype == declared_dtypes(kit)[0]:
        raise NotApplicable(f"all other checks of the engine use {dtype}")
    with engine_under_test(kit, dtype) as tested:
        return _check_typical(tested, f"output in {dtype}")


def w8a8(kit: Kit) -> str:
    """A checkpoint with 8-bit weights, with dynamically and statically quantized layers."""
    with engine_under_test(kit, quantization=modelslim.NAME, disable_graphs=None) as tested:
        return _check_typical(tested, f"output with 8-bit weights in {tested.dtype}")


def embeddings(kit: Kit) -> str:
    """Embeddings in one batch with generating requests, then again when their prompts are cached."""
    with engine_under_test(kit) as tested:
        prompts = tested.prompts()
        requests = [
            RequestSpec(id=f"{pooling.value} {number}", tokens=tuple(tokens), params=PoolingParams(pooling=pooling))
            for number, tokens in enumerate(prompts)
            for pooling in Pooling
        ]
        generating = [request(f"generating {number}", tokens) for number, tokens in enumerate(prompts)]
        mixed = tested.engine.generate([*requests, *generating])
        tested.check(prompts, mixed[len(requests) :], "greedy output of a batch with embeddings")
        worst = 0.0
        for results in (mixed[: len(requests)], tested.engine.generate(requests)):
            worst = max(worst, *(_embedding_error(tested, *pair) for pair in zip(requests, results, strict=True)))
        return f"{len(requests)} embeddings, off by at most {worst:.2g} (length 1)"


def _embedding_error(tested: EngineUnderTest, spec: RequestSpec, result: GenerationResult) -> float:
    """The distance of an embedding from the reference. Fault if it exceeds the tolerance."""
    if result.error is not None:
        raise Fault(f"a request failed: {result.error[1]} [{result.error[0]}]")
    states = tested.reference.hidden_states(spec.tokens)
    assert isinstance(spec.params, PoolingParams)
    pooled = pooled_reference(states, spec.params.pooling)
    vector = torch.frombuffer(bytearray(result.vectors), dtype=torch.float32)
    error, tolerance = float((vector - normalize(pooled, dim=0)).norm()), EMBEDDING_TOLERANCE[tested.dtype]
    if not error <= tolerance:
        raise Fault(
            f"the embedding ({spec.params.pooling.value}) of {len(spec.tokens)} tokens is off by {error:.3g} in "
            f"{tested.dtype} (tolerance {tolerance}); {result.cached_tokens} of them were cached"
        )
    return error


def logprobs(kit: Kit) -> str:
    """Log-probabilities of prompt and output, and of the most likely alternatives."""
    with engine_under_test(kit) as tested:
        prompts = tested.prompts()[1:]
        results = tested.generate(prompts, logprobs=3, prompt_logprobs=2)
        worst = 0.0
        for prompt_tokens, result in zip(prompts, results, strict=True):
            expected = tested.reference.logprobs([*prompt_tokens, *result.tokens])
            entries = [*result.prompt_logprobs, *result.logprobs]
            if len(entries) != len(prompt_tokens) - 1 + len(result.tokens):
                raise Fault(
                    f"got {len(entries)} log-probabilities for {len(prompt_tokens) - 1} prompt and "
                    f"{len(result.tokens)} output tokens"
                )
            for position, entry in enumerate(entries):
                for token, value in ((entry.token, entry.logprob), *entry.top):
                    worst = max(worst, abs(value - float(expected[position, token])))
                    if abs(value - float(expected[position, token])) > LOGIT_TOLERANCE[tested.dtype]:
                        raise Fault(
                            f"token {token} after position {position} has log-probability {value:.4f}, "
                            f"but {float(expected[position, token]):.4f} is expected"
                        )
        return f"{len(prompts)} requests, largest difference {worst:.2g} in {tested.dtype}"


def sampling(kit: Kit) -> str:
    """Sampled tokens: top-k 1 is greedy, the same seed repeats tokens, another seed gives others."""
    with engine_under_test(kit) as tested:
        prompts = tested.prompts()
        tested.check(prompts, tested.generate(prompts, temperature=1.5, top_k=1, seed=5), "sampled output with top-k 1")
        first, second, other = (
            [result.tokens for result in tested.generate(prompts, temperature=2.0, top_p=0.95, min_p=0.001, seed=seed)]
            for seed in (7, 7, 8)
        )
        if tested.dtype == "float32" and first != second:
            raise Fault("two runs with the same seed give different tokens")
        if first == other:
            raise Fault("two seeds give the same tokens for every prompt")
        return f"{len(prompts)} prompts"


def penalised(kit: Kit) -> str:
    """Penalties, logit bias, masks and min_tokens, one at a time and together."""
    with engine_under_test(kit) as tested:
        prompts = tested.prompts()
        likely = tested.generate([prompts[2]])[0].tokens
        cases: list[dict[str, Any]] = [
            {"repetition_penalty": 1.7},
            {"frequency_penalty": 1.5},
            {"presence_penalty": 1.9},
            {"logit_bias": ((likely[0], -20.0), (77, 4.0))},
            {"min_tokens": 5, "ignore_eos": False, "stop_token_ids": (likely[1],)},
            {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": ((40, 3.0),)},
            {"allowed_token_ids": (likely[1], 40, 77), "banned": ((likely[0],), (likely[1], likely[1]))},
        ]
        for case in cases:
            params = SamplingParams(max_tokens=OUTPUT_TOKENS, **case)
            adjust = penalties(params, tested.end_tokens)
            for prompt_tokens, result in zip(prompts, tested.generate(prompts, **case), strict=True):
                tested.reference.check_greedy(prompt_tokens, result.tokens, tested.dtype, f"output with {case}", adjust)
        return f"{len(cases)} sets of parameters for {len(prompts)} prompts"


def stop(kit: Kit) -> str:
    """A stop token ends a request and is its last token."""
    with engine_under_test(kit) as tested:
        prompt_tokens = tested.prompts()[2]
        tokens = tested.generate([prompt_tokens])[0].tokens
        end = tokens[OUTPUT_TOKENS // 2]
        expected = tokens[: tokens.index(end) + 1]
        (result,) = tested.generate([prompt_tokens], stop_token_ids=(end,))
        if result.finish is not FinishReason.STOP or result.stop_token != end or result.tokens[-1] != end:
            raise Fault(
                f"stop token {end} should end it after {expected}, but it ended as {result.finish}: {result.tokens}"
            )
        return f"it ended after {len(result.tokens)} of {OUTPUT_TOKENS} tokens"


def prefix_cache(kit: Kit) -> str:
    """A repeated prompt or prefix is not computed again, and output is the same."""
    with engine_under_test(kit) as tested:
        size = tested.page_span
        base = prompt(3 * size + 2, 0)
        tested.check([base], tested.generate([base]), "the first output of a prompt")
        branches = [base, [*base[: 2 * size], *prompt(4, 9)], [*base, 50, 51]]
        results = tested.generate(branches)
        tested.check(branches, results, "output over cached pages")
        for prompt_tokens, result in zip(branches, results, strict=True):
            if result.cached_tokens < size:
                raise Fault(
                    f"of {len(prompt_tokens)} prompt tokens with a known prefix, {result.cached_tokens} were cached"
                )
        return (
            f"{sum(result.cached_tokens for result in results)} of {sum(map(len, branches))} prompt tokens were cached"
        )


def no_prefix_cache(kit: Kit) -> str:
    """With the prefix cache off, nothing is cached, and output is the same."""
    with engine_under_test(kit, disable_radix_cache=True) as tested:
        prompts = tested.prompts()
        for _ in range(2):
            results = tested.generate(prompts)
            tested.check(prompts, results, "output without a prefix cache")
            if any(result.cached_tokens for result in results):
                raise Fault("tokens were cached although the prefix cache is off")
        return f"{len(prompts)} prompts, twice"


def chunked_prefill(kit: Kit) -> str:
    """Prompts that take several steps while other requests generate tokens."""
    with engine_under_test(kit, chunked_prefill_size=7) as tested:
        prompts = tested.prompts()
        before = tested.engine.stats().steps
        results = tested.generate(prompts)
        steps = tested.engine.stats().steps - before
        tested.check(prompts, results, "output of prompts computed 7 tokens at a time")
        min_steps = sum(map(len, prompts)) // 7
        if steps < min_steps:
            raise Fault(f"{sum(map(len, prompts))} prompt tokens, 7 per step, took {steps} steps")
        return f"{sum(map(len, prompts))} prompt tokens in {steps} steps"


def no_overlap(kit: Kit) -> str:
    """A step is planned only after the previous one has ended."""
    with engine_under_test(kit, disable_overlap_schedule=True) as tested:
        return _check_typical(tested, "output without overlap")


def drafts(kit: Kit) -> str:
    """Free output, whose drafts are mostly wrong, and output that a bias makes one token, whose drafts are right."""
    try:
        with engine_under_test(kit, disable_graphs=None, speculative_algorithm="NGRAM") as tested:
            prompts = [text * 2 for text in tested.prompts()]
            tested.check(prompts, tested.generate(prompts), "output with drafts")
            forced = tested.generate(prompts, logit_bias=((_FORCED, 100.0),))
            stats = tested.engine.stats()
    except Refusal as refusal:
        raise NotApplicable(f"drafts are refused: {refusal.rejections[0].reason}") from refusal
    if any(set(result.tokens) != {_FORCED} for result in forced):
        raise Fault(f"with drafts, a bias of 100 for token {_FORCED} gives {[result.tokens for result in forced]}")
    if not 0 < stats.drafts_accepted < stats.drafts_proposed:
        raise Fault(f"{stats.drafts_accepted} of {stats.drafts_proposed} drafts were accepted; expected some of them")
    return f"{stats.drafts_accepted} of {stats.drafts_proposed} drafts were accepted"


class _Counting(CheckedEngine):
    """In requests of the namespace "count", the only token that may follow another one is the next higher."""

    def late_inputs(self) -> LateInputMaker:
        return self

    def concerns(self, request: RequestSpec) -> bool:
        return request.namespace == "count"

    def make(self, rows: Sequence[LateRow]) -> LateInputs:
        size = -(-self.context.model.vocab_size // 8)
        last = [(row.slot, (row.output or row.request.tokens)[-1]) for row in rows]
        return LateInputs(tuple((slot, (1 << (token + 1)).to_bytes(size, "little")) for slot, token in last))


def late_inputs(kit: Kit) -> str:
    """A logits processor that allows one token, by the token of the step before, next to free requests."""
    with engine_under_test(kit, kind=_Counting) as tested:
        prompts = tested.prompts()
        free = [request(f"free {number}", tokens) for number, tokens in enumerate(prompts)]
        counted = [
            RequestSpec(id=f"count {one.id}", tokens=one.tokens, params=one.params, namespace="count") for one in free
        ]
        results = tested.engine.generate([*free, *counted])
        tested.check(prompts, results[: len(free)], "output next to masked requests")
        for tokens, result in zip(prompts, results[len(free) :], strict=True):
            expected = list(range(tokens[-1] + 1, tokens[-1] + 1 + OUTPUT_TOKENS))
            if result.tokens != expected:
                raise Fault(f"masks allow only {expected} after token {tokens[-1]}, but {result.tokens} were sampled")
        return f"{len(counted)} masked requests next to {len(free)} others, {OUTPUT_TOKENS} tokens each"


def graphs(kit: Kit) -> str:
    """Decode steps that are replayed from captured graphs."""
    with engine_under_test(kit, disable_graphs=None) as tested:
        summary = _check_typical(tested, "output from captured graphs")
        tested.engine.flush()
        long = [
            prompt(tested.page_span - 2, number) for number in range(5)
        ]  # they cross a page boundary in replayed steps
        tested.check(
            long, tested.generate(long, count=tested.page_span + 6), "output from captured graphs, across a page"
        )
        replayed = tested.engine.stats().replayed_steps
        if not replayed:
            raise Fault("it declares graphs, but no step was replayed")
        return f"{summary}; {replayed} steps were replayed"


def pieces(kit: Kit) -> str:
    """Steps with prompts that replay pieces: whole prompts, chunks of other sizes, and after a cached prefix."""
    chunks = "chunked_prefill" in kit.capabilities
    with engine_under_test(
        kit,
        disable_graphs=None,
        enable_piecewise_graphs=True,
        piecewise_graph_tokens="[3, 16, 32]" if chunks else None,
        chunked_prefill_size=32 - MAX_RUNNING if chunks else None,
    ) as tested:
        summary = _check_typical(tested, "output of steps in pieces")
        long = [prompt(tested.page_span + 3, number) for number in range(2)]
        for _ in range(2):
            tested.check(long, tested.generate(long), "output of steps in pieces, of prompts longer than a page")
        stats = tested.engine.stats()
        if stats.eager_steps:
            raise Fault(f"{stats.eager_steps} steps ran eagerly, and {stats.replayed_steps} were replayed")
        return f"{summary}; {stats.replayed_steps} steps were replayed"


def compiled(kit: Kit) -> str:
    """Decode steps that torch.compile has compiled while the engine started."""
    with engine_under_test(kit, disable_graphs=None, enable_torch_compile=True) as tested:
        summary = _check_typical(tested, "output of compiled steps")
        report = dict(tested.engine.ready.budget).get("compiled")
        if report is None:
            raise Fault("it declares torch_compile, but the engine reports no compiled steps")
        return f"{summary}; {report}"


def abort(kit: Kit) -> str:
    """An aborted request ends and frees its pages, and the others continue unchanged."""
    with engine_under_test(kit) as tested:
        prompts = tested.prompts()
        for number, prompt_tokens in enumerate(prompts):
            tested.engine.send(request(f"{number}", prompt_tokens, count=4 * OUTPUT_TOKENS))
        for _ in range(6):
            tested.engine.step()
        aborted = ["1", "4"]
        tested.engine.send(Abort(aborted))
        tested.engine.run([f"{number}" for number in range(len(prompts))])
        results = [tested.engine.results[f"{number}"] for number in range(len(prompts))]
        for number, (prompt_tokens, result) in enumerate(zip(prompts, results, strict=True)):
            expected = FinishReason.ABORT if f"{number}" in aborted else FinishReason.LENGTH
            if result.finish is not expected:
                raise Fault(f"request {number} ended as {result.finish}, not as {expected}")
            tested.check([prompt_tokens], [result], "output next to aborted requests")
        return f"{len(aborted)} of {len(prompts)} requests were aborted"


def retraction(kit: Kit) -> str:
    """A pool too small for all requests: some return to the queue and continue later."""
    size = page_span(_page_size(kit))
    pool = min(POOL_TOKENS, (_RETRACTION_REQUESTS + 2) * size)
    with engine_under_test(kit, max_total_tokens=pool, schedule_conservativeness=0.01) as tested:
        prompts = [prompt(size - 2, number) for number in range(_RETRACTION_REQUESTS)]
        results = tested.generate(prompts, count=size + 6)
        tested.check(prompts, results, "output of requests that were retracted")
        retractions = tested.engine.stats().retractions
        if not retractions:
            raise NotApplicable(f"a pool of {pool} tokens was large enough for all requests")
        return f"{retractions} retractions in a pool of {pool} tokens"


def _check_typical(tested: EngineUnderTest, what: str) -> str:
    prompts = tested.prompts()
    tested.check(prompts, tested.generate(prompts), what)
    return f"{len(prompts)} prompts, {OUTPUT_TOKENS} tokens each, in {tested.dtype}"


def _page_size(kit: Kit) -> int:
    """The default page size of an engine on this device."""
    dtype = declared_dtypes(kit)[0]
    size: int = resolve_for(kit, accepted_model(kit, dtype), user_statement("dtype", dtype)).config.memory.page_size
    return size
