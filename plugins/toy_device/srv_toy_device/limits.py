"""How much memory the toy backends take at once, beside the KV pool. Torch-free: the facts reserve it.

A longer step is cut into pieces of these sizes; what cannot be cut (one row's context, one row's
vocabulary) may exceed them.
"""

from __future__ import annotations

from srv.specs import ModelFacts

# Tokens whose keys and values are gathered from the pool at once, over the rows of a piece.
GATHERED_TOKENS = 1 << 14
# Scores of one head that exist at once: rows * queries * keys.
SCORES_PER_HEAD = 1 << 18
# Logits that are sorted at once: rows * vocabulary.
SORTED_LOGITS = 1 << 19

_FLOAT32 = 4
# Gathered in the pool's dtype, then float32: keys and values. Scores: scaled, masked, softmax, and the mask.
_GATHERED_COPIES = 2
_SCORE_COPIES = 4
# float64 or int64 each: scaled, sorted, order, weights, cumulative, and three for the filters.
_SORTED_COPIES = 8
_SORTED_BYTES = 8


def attention_bytes(model: ModelFacts) -> int:
    """Bytes that `toy_paged` takes for one layer of a model, beside its input and output."""
    longest = max(GATHERED_TOKENS, model.context_length)
    kept = max((group.kv_heads * (group.key_dim + group.value_dim) for group in model.cache_groups), default=0)
    scores = max(SCORES_PER_HEAD, model.context_length) * model.heads
    return _FLOAT32 * (longest * kept * _GATHERED_COPIES + scores * _SCORE_COPIES)


def sampling_bytes(model: ModelFacts) -> int:
    """Bytes that `toy_sampling` takes, beside the logits."""
    return max(SORTED_LOGITS, model.vocab_size) * _SORTED_COPIES * _SORTED_BYTES
