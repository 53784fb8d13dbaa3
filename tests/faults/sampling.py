"""Faults of sampling: noise, penalties, masks, log-probabilities, the CPU's sampling backend."""

from fault import Fault

_PROCESSORS = "tests/core/sample/test_processors.py"
_SAMPLER = "tests/core/sample/test_sampler.py"

FAULTS = (
    Fault(
        name="mean-forgets-earlier-chunks",
        file="core/srv/sample/pooling.py",
        text="            self._sums[row.slot] = total\n",
        planted="",
        effect="The embedding of a prompt that is computed in chunks is the mean of its last chunk only.",
        tests=("tests/core/sample/test_pooling.py",),
    ),
    Fault(
        name="sum-survives-its-request",
        file="core/srv/sample/pooling.py",
        text="        self._sums.pop(slot, None)\n",
        planted="",
        effect="An embedding contains hidden states of the last request in its slot.",
        tests=("tests/core/sample/test_pooling.py",),
    ),
    Fault(
        name="seed-of-the-wrong-position",
        file="core/srv/sample/noise.py",
        text="self._values[slots, positions % self._POSITIONS]",
        planted="self._values[slots, (positions - 1) % self._POSITIONS]",
        effect="The same seed yields other tokens than before, and a request's first token reuses noise.",
        tests=("tests/core/sample/test_noise.py",),
    ),
    Fault(
        name="penalty-forgets-new-tokens",
        file="core/srv/sample/sampler.py",
        text="        self.state.observe(metadata.slots, tokens)\n",
        planted="",
        effect="Penalties count the prompt and never the output.",
        tests=(_SAMPLER,),
    ),
    Fault(
        name="frequency-penalty-counts-once",
        file="core/srv/sample/processors.py",
        text="- prepared.frequency * counts -",
        planted="- prepared.frequency * output -",
        effect="frequency_penalty acts like presence_penalty.",
        tests=(_PROCESSORS,),
    ),
    Fault(
        name="penalty-of-the-last-request",
        file="core/srv/sample/processors.py",
        text="        row = self._storage.pop(slot, None)\n        if row is not None:\n"
        "            self._free.append(row)\n            self._forget()\n",
        planted="        return\n",
        effect="A request without penalties inherits those of the request that had its slot before.",
        tests=(_PROCESSORS,),
    ),
    Fault(
        name="min-tokens-off-by-one",
        file="core/srv/sample/processors.py",
        text="return row.position - row.drafts_in_flight < free and bool(tokens)",
        planted="return row.position - row.drafts_in_flight <= free and bool(tokens)",
        effect="A request cannot end at min_tokens, only one token later.",
        tests=(_PROCESSORS,),
    ),
    Fault(
        name="rejected-drafts-stay-in-the-recent-output",
        file="core/srv/sample/masks.py",
        text="(kept[positions] & used).sum(1, keepdim=True)",
        planted="used.sum(1, keepdim=True)",
        effect="With speculative decoding, bad words are masked in the wrong places.",
        tests=("tests/core/sample/test_masks.py",),
    ),
    Fault(
        name="logprobs-after-penalties",
        file="core/srv/sample/sampler.py",
        text="_with_host_copies(logits, tokens, finite, metadata)",
        planted="_with_host_copies(_processed(logits, active), tokens, finite, metadata)",
        effect="Log-probabilities change with penalties and bias instead of being those of the model.",
        tests=(_SAMPLER,),
    ),
    Fault(
        name="drafts-count-after-a-wrong-one",
        file="core/srv/sample/verify.py",
        text=".long().cumprod(1).sum(1)",
        planted=".long().sum(1)",
        effect="With speculative decoding, output contains tokens that were sampled after a rejected draft.",
        tests=("tests/core/sample/test_verify.py",),
    ),
    Fault(
        name="noise-of-a-rejected-draft",
        file="core/srv/sample/sampler.py",
        text="return self._device_noise.draw(slots, drafts.positions)",
        planted="return self._device_noise.draw(slots, torch.tensor([row.position for row in rows]))",
        effect="With speculative decoding and two steps in flight, a seed gives other tokens than without drafts.",
        tests=("tests/core/engine/test_drafts.py",),
    ),
)
