"""L3: the real engine with a small model, each feature on and off, against the same model on the host in float32.

Every check is one engine in a process of its own, since a worker creates its platform once.
"""

from __future__ import annotations

from typing import Any

from srv.io.messages import Abort
from srv.quantization import modelslim
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.local import OUTPUT, POOL_TOKENS, Stand, model_for, prompt, request, stand, stretch
from srv.testing.conformance.model import Fault, NotApplicable
from srv.testing.conformance.reference import SLACK, penalties
from srv.testing.conformance.setups import declared_dtypes, resolved
from srv.testing.conformance.values import says
from srv.types import FinishReason, SamplingParams

_TIGHT_REQUESTS = 6


def greedy(kit: Kit) -> str:
    """A batch of prompts, and two of them again, each alone."""
    with stand(kit) as at:
        prompts = at.prompts()
        at.check(prompts, at.generate(prompts), "greedy output of a batch")
        at.engine.flush()
        for each in prompts[-2:]:
            at.check([each], at.generate([each]), "greedy output of one request")
        return f"{len(prompts)} prompts, {OUTPUT} tokens each, in {at.dtype}, pages of {at.page_size}"


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
        raise NotApplicable(f"{dtype} is the dtype of all other checks of the engine")
    with stand(kit, dtype) as at:
        return _typical(at, f"output in {dtype}")


def w8a8(kit: Kit) -> str:
    """A checkpoint with 8-bit weights, of layers that round their inputs by themselves and of layers that do not."""
    with stand(kit, stored=modelslim.NAME, disable_graphs=None) as at:
        return _typical(at, f"output of 8-bit weights in {at.dtype}")


def logprobs(kit: Kit) -> str:
    """Log-probabilities of prompt and output, and of the most likely alternatives."""
    with stand(kit) as at:
        prompts = at.prompts()[1:]
        results = at.generate(prompts, logprobs=3, prompt_logprobs=2)
        worst = 0.0
        for each, result in zip(prompts, results, strict=True):
            wanted = at.reference.logprobs([*each, *result.tokens])
            entries = [*result.prompt_logprobs, *result.logprobs]
            if len(entries) != len(each) - 1 + len(result.tokens):
                raise Fault(
                    f"{len(entries)} log-probabilities came for {len(each) - 1} prompt and {OUTPUT} output tokens"
                )
            for place, entry in enumerate(entries):
                for token, value in ((entry.token, entry.logprob), *entry.top):
                    worst = max(worst, abs(value - float(wanted[place, token])))
                    if abs(value - float(wanted[place, token])) > SLACK[at.dtype]:
                        raise Fault(
                            f"token {token} after position {place} has log-probability {value:.4f}, "
                            f"but {float(wanted[place, token]):.4f} is right"
                        )
        return f"{len(prompts)} requests, largest difference {worst:.2g} in {at.dtype}"


def sampling(kit: Kit) -> str:
    """Drawn tokens: top-k 1 is greedy, a seed repeats itself, another seed gives other tokens."""
    with stand(kit) as at:
        prompts = at.prompts()
        at.check(prompts, at.generate(prompts, temperature=1.5, top_k=1, seed=5), "sampled output with top-k 1")
        first, second, other = (
            [result.tokens for result in at.generate(prompts, temperature=2.0, top_p=0.95, min_p=0.001, seed=seed)]
            for seed in (7, 7, 8)
        )
        if at.dtype == "float32" and first != second:
            raise Fault("two runs with one seed give different tokens")
        if first == other:
            raise Fault("two seeds give the same tokens for every prompt")
        return f"{len(prompts)} prompts"


def penalised(kit: Kit) -> str:
    """Penalties, a bias and a minimum of tokens, each alone and together."""
    with stand(kit) as at:
        prompts = at.prompts()
        likely = at.generate([prompts[2]])[0].tokens
        cases: list[dict[str, Any]] = [
            {"repetition_penalty": 1.7},
            {"frequency_penalty": 1.5},
            {"presence_penalty": 1.9},
            {"logit_bias": ((likely[0], -20.0), (77, 4.0))},
            {"min_tokens": 5, "ignore_eos": False, "stop_token_ids": (likely[1],)},
            {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": ((40, 3.0),)},
        ]
        for case in cases:
            params = SamplingParams(max_tokens=OUTPUT, **case)
            change = penalties(params, at.end_tokens)
            for each, result in zip(prompts, at.generate(prompts, **case), strict=True):
                at.reference.check_greedy(each, result.tokens, at.dtype, f"output with {case}", change)
        return f"{len(cases)} sets of parameters for {len(prompts)} prompts"


def stop(kit: Kit) -> str:
    """A stop token ends a request with it, and is its last token."""
    with stand(kit) as at:
        each = at.prompts()[2]
        tokens = at.generate([each])[0].tokens
        end = tokens[OUTPUT // 2]
        wanted = tokens[: tokens.index(end) + 1]
        (result,) = at.generate([each], stop_token_ids=(end,))
        if result.finish is not FinishReason.STOP or result.stop_token != end or result.tokens[-1] != end:
            raise Fault(
                f"stop token {end} was to end it after {wanted}, but it ended as {result.finish}: {result.tokens}"
            )
        return f"it ended after {len(result.tokens)} of {OUTPUT} tokens"


def prefix_cache(kit: Kit) -> str:
    """A prompt that was seen is not computed again, and its output is the same; nor is a shared beginning."""
    with stand(kit) as at:
        size = at.stretch
        seen = prompt(3 * size + 2, 0)
        at.check([seen], at.generate([seen]), "the first output of a prompt")
        branches = [seen, [*seen[: 2 * size], *prompt(4, 9)], [*seen, 50, 51]]
        results = at.generate(branches)
        at.check(branches, results, "output over cached pages")
        for each, result in zip(branches, results, strict=True):
            if result.cached_tokens < size:
                raise Fault(
                    f"of a prompt of {len(each)} tokens that begins like one before, {result.cached_tokens} were cached"
                )
        return (
            f"{sum(result.cached_tokens for result in results)} of {sum(map(len, branches))} prompt tokens were cached"
        )


def no_prefix_cache(kit: Kit) -> str:
    """With the prefix cache off nothing is cached, and output is the same."""
    with stand(kit, disable_radix_cache=True) as at:
        prompts = at.prompts()
        for _ in range(2):
            results = at.generate(prompts)
            at.check(prompts, results, "output without a prefix cache")
            if any(result.cached_tokens for result in results):
                raise Fault("tokens were cached although the prefix cache is off")
        return f"{len(prompts)} prompts, twice"


def chunked_prefill(kit: Kit) -> str:
    """Prompts that take several steps, while others put out tokens."""
    with stand(kit, chunked_prefill_size=7) as at:
        prompts = at.prompts()
        before = at.engine.stats().steps
        results = at.generate(prompts)
        steps = at.engine.stats().steps - before
        at.check(prompts, results, "output of prompts computed 7 tokens at a time")
        least = sum(map(len, prompts)) // 7
        if steps < least:
            raise Fault(f"{sum(map(len, prompts))} prompt tokens, 7 a step, took {steps} steps")
        return f"{sum(map(len, prompts))} prompt tokens in {steps} steps"


def no_overlap(kit: Kit) -> str:
    """A step is planned only when the one before has ended."""
    with stand(kit, disable_overlap_schedule=True) as at:
        return _typical(at, "output without overlap")


def graphs(kit: Kit) -> str:
    """Steps of output that are replayed from captured graphs."""
    with stand(kit, disable_graphs=None) as at:
        told = _typical(at, "output from captured graphs")
        at.engine.flush()
        long = [prompt(at.stretch - 2, number) for number in range(5)]  # they cross a page while they are replayed
        at.check(long, at.generate(long, count=at.stretch + 6), "output from captured graphs, across a page")
        replayed = at.engine.stats().replayed_steps
        if not replayed:
            raise Fault("it declares graphs, and no step of output was replayed from one")
        return f"{told}; {replayed} steps were replayed"


def abort(kit: Kit) -> str:
    """An aborted request ends, gives its pages back, and the others go on as if it had never been."""
    with stand(kit) as at:
        prompts = at.prompts()
        for number, each in enumerate(prompts):
            at.engine.send(request(f"{number}", each, count=4 * OUTPUT))
        for _ in range(6):
            at.engine.step()
        gone = ["1", "4"]
        at.engine.send(Abort(gone))
        at.engine.run([f"{number}" for number in range(len(prompts))])
        results = [at.engine.results[f"{number}"] for number in range(len(prompts))]
        for number, (each, result) in enumerate(zip(prompts, results, strict=True)):
            wanted = FinishReason.ABORT if f"{number}" in gone else FinishReason.LENGTH
            if result.finish is not wanted:
                raise Fault(f"request {number} ended as {result.finish}, not as {wanted}")
            at.check([each], [result], "output beside requests that were aborted")
        return f"{len(gone)} of {len(prompts)} requests were aborted"


def retraction(kit: Kit) -> str:
    """A pool too small for all: requests go back to the queue, and go on later where they were."""
    size = stretch(_page_size(kit))
    pool = min(POOL_TOKENS, (_TIGHT_REQUESTS + 2) * size)
    with stand(kit, max_total_tokens=pool, schedule_conservativeness=0.01) as at:
        prompts = [prompt(size - 2, number) for number in range(_TIGHT_REQUESTS)]
        results = at.generate(prompts, count=size + 6)
        at.check(prompts, results, "output of requests that were retracted")
        retractions = at.engine.stats().retractions
        if not retractions:
            raise NotApplicable(f"a pool of {pool} tokens was large enough for all requests")
        return f"{retractions} retractions in a pool of {pool} tokens"


def _typical(at: Stand, what: str) -> str:
    prompts = at.prompts()
    at.check(prompts, at.generate(prompts), what)
    return f"{len(prompts)} prompts, {OUTPUT} tokens each, in {at.dtype}"


def _page_size(kit: Kit) -> int:
    """The page size that an engine gets here if nobody sets one."""
    dtype = declared_dtypes(kit)[0]
    size: int = resolved(kit, model_for(kit, dtype), says("dtype", dtype)).config.memory.page_size
    return size
