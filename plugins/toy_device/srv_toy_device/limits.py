"""How much memory the toy backends take at once, besides the KV pool. The facts reserve it, so no torch is imported.

A larger step is split into tiles of these sizes; what cannot be split (the context of one row, the vocabulary
of one row) may exceed them.
"""

from __future__ import annotations

from srv.specs import ModelFacts, attention_specs

TRAITS = ("window", "soft_cap")  # of layers, which attention computes
# Tokens whose keys and values are gathered from the pool at once, over the rows of a tile.
GATHERED_TOKENS = 1 << 14
# Scores of one head that exist at once: rows * queries * keys.
SCORES_PER_HEAD = 1 << 18
# Logits that are sorted at once: rows * vocabulary.
SORTED_LOGITS = 1 << 19

_FLOAT32 = 4
# Keys and values are gathered in the pool's dtype, then converted to float32. Scores exist scaled, masked and as
# probabilities, and there is the mask.
_GATHERED_COPIES = 2
_SCORE_COPIES = 4
# Scaled and sorted logits, token order, weights, cumulative weights, and three copies for the filters: all in 8 bytes.
_SORTED_COPIES = 8
_SORTED_BYTES = 8


def attention_bytes(model: ModelFacts) -> int:
    """Bytes that `toy_paged` takes for one layer of a model, besides its input and output."""
    longest = max(GATHERED_TOKENS, model.context_length)
    groups = attention_specs(model.cache_groups)
    kv_elements = max((group.kv_heads * (group.key_dim + group.value_dim) for group in groups), default=0)
    scores = max(SCORES_PER_HEAD, model.context_length) * model.heads
    return _FLOAT32 * (longest * kv_elements * _GATHERED_COPIES + scores * _SCORE_COPIES)


def sampling_bytes(model: ModelFacts) -> int:
    """Bytes that `toy_sampling` takes, besides the logits."""
    return max(SORTED_LOGITS, model.vocab_size) * _SORTED_COPIES * _SORTED_BYTES
