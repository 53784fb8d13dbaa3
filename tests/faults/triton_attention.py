"""Faults of paged attention in Triton."""

from fault import Fault

_FILE = "kernels/srv_kernels/triton/attention_kernels.py"
_TESTS = "tests/kernels/triton/test_triton_attention.py"

FAULTS = (
    Fault(
        name="triton-prompt-reads-a-block-too-many-without-masks",
        file=_FILE,
        text="c = tl.maximum(b, (lowest + 1) // BLOCK_KEYS * BLOCK_KEYS)",
        planted="c = tl.maximum(b, (highest + 1) // BLOCK_KEYS * BLOCK_KEYS)",
        effect="On GPUs, tokens of a prompt attend to tokens after them.",
        tests=(f"{_TESTS}::test_long_prompts_read_whole_blocks_without_masks",),
    ),
    Fault(
        name="triton-window-of-a-row-is-that-of-its-last-draft",
        file=_FILE,
        text="low = first_visible(length - queries, window, chunk, HAS_WINDOW, HAS_CHUNK)",
        planted="low = first_visible(length - 1, window, chunk, HAS_WINDOW, HAS_CHUNK)",
        effect="On GPUs, drafts of models with sliding windows are verified with keys missing, and tokens change.",
        tests=(f"{_TESTS}::test_windows",),
    ),
    Fault(
        name="triton-splits-have-equal-weights",
        file=_FILE,
        text="seen = largest + tl.log2(tl.where(total == 0.0, 1.0, total))",
        planted="seen = largest",
        effect="On GPUs, long contexts generate other tokens than short ones would, by the number of splits.",
        tests=(f"{_TESTS}::test_results_do_not_depend_on_the_number_of_splits",),
    ),
    Fault(
        name="triton-padding-reads-page-zero",
        file=_FILE,
        text="exists = exists & (pages != 0)",
        planted="exists = exists & (pages >= 0)",
        effect="Padded rows of captured steps compute with what earlier steps left in page 0, NaN included.",
        tests=(f"{_TESTS}::test_rows_of_padding_are_zero_and_change_nothing",),
    ),
    Fault(
        name="triton-hidden-values-are-read",
        file=_FILE,
        text="value = _load(where, exists[:, None], value_dims[None, :] < VALUE_DIM, MASKED,",
        planted="value = _load(where, exists[:, None], value_dims[None, :] < VALUE_DIM, False,",
        effect="NaN that another request left in a page spreads to every request that gets the page.",
        tests=(f"{_TESTS}::test_windows",),
    ),
)
