"""Faults of the Triton kernels for quantized weights and for sampling, which need TRITON_INTERPRET=1 or a GPU."""

from fault import Fault

_QUANTIZED = "tests/kernels/triton/test_triton_quantized.py"
_FP8 = "tests/kernels/triton/test_triton_fp8.py"
_SAMPLING = "tests/kernels/triton/test_triton_sampling.py"

FAULTS = (
    Fault(
        name="logits-rounded-on-gpus",
        file="kernels/srv_kernels/triton/dense_linear.py",
        text="return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)",
        planted="return x.new_empty(x.shape[0], weight.shape[0])",
        effect="On AMD and Intel GPUs the two best logits are often equal, and greedy output differs from the model's.",
        tests=("tests/kernels/triton/test_triton_dense.py::test_logits_keep_their_contract",),
    ),
    Fault(
        name="one-scale-for-the-rows-of-a-program",
        file="kernels/srv_kernels/triton/int8_linear.py",
        text="largest = tl.maximum(largest, tl.max(magnitudes, axis=1))",
        planted="largest = tl.maximum(largest, tl.max(tl.max(magnitudes, axis=1), axis=0))",
        effect="On GPUs, a request's tokens depend on the requests that it is batched with.",
        tests=(f"{_QUANTIZED}::test_a_w8a8_row_does_not_depend_on_the_others",),
    ),
    Fault(
        name="scales-of-the-next-group",
        file="kernels/srv_kernels/triton/fp8_products.py",
        text="x_scale + (start // group).to(tl.int64) * T + rows",
        planted="x_scale + (start // block_inputs).to(tl.int64) * T + rows",
        effect="Long prompts of FP8 checkpoints with blocks of 192 inputs give nonsense on GPUs that multiply FP8.",
        tests=(f"{_FP8}::test_many_rows_are_products_of_quantized_inputs",),
    ),
    Fault(
        name="fp8-products-of-weight-only-checkpoints",
        file="core/srv/quantization/formats/compressed_tensors.py",
        text='inputs=inputs.get("num_bits") == 8',
        planted="inputs=True",
        effect="GPUs round the activations of checkpoints that were made for exact ones.",
        tests=(
            "tests/platforms/test_fp8_products.py::test_checkpoints_that_were_made_for_it_have_quantized_activations",
        ),
    ),
    Fault(
        name="high-bits-of-the-other-scale",
        file="kernels/srv_kernels/triton/gguf_blocks.py",
        text="((first >> 2) & 48)",
        planted="((second >> 2) & 48)",
        effect="Models in Q4_K and Q5_K generate nonsense on GPUs.",
        tests=(f"{_QUANTIZED}::test_blocks_are_read_bit_by_bit_as_by_the_gguf_library",),
    ),
    Fault(
        name="planes-meet-the-wrong-inputs",
        file="kernels/srv_kernels/triton/gguf_blocks.py",
        text="return groups * (16 * PLANES) + plane * 16",
        planted="return groups * (16 * PLANES) + (PLANES - 1 - plane) * 16",
        effect="Models in Q4_0 to Q5_1 generate nonsense on GPUs.",
        tests=(f"{_QUANTIZED}::test_each_weight_meets_its_own_input",),
    ),
    Fault(
        name="top-p-of-the-whole-vocabulary",
        file="kernels/srv_kernels/triton/sampling.py",
        text="top_p.to(tl.float64) * kept.to(tl.float64)",
        planted="top_p.to(tl.float64) * total.to(tl.float64)",
        effect="With top-k and top-p, GPUs draw tokens that top-p excludes.",
        tests=(f"{_SAMPLING}::test_top_p_counts_within_top_k",),
    ),
    Fault(
        name="negative-logits-upside-down",
        file="kernels/srv_kernels/triton/sampling.py",
        text="tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)",
        planted="bits.to(tl.int64)",
        effect="On GPUs, filters keep the least likely of the tokens with negative logits.",
        tests=(f"{_SAMPLING}::test_noise_divides_into_one_interval_per_kept_token",),
    ),
    Fault(
        name="equal-in-a-later-block-wins",
        file="kernels/srv_kernels/triton/sampling.py",
        text="at = tl.where(best > largest, first, at)",
        planted="at = tl.where(best >= largest, first, at)",
        effect="Greedy tokens on GPUs differ from those of the CPU where logits are equal.",
        tests=(f"{_SAMPLING}::test_most_likely_tells_which_rows_are_finite",),
    ),
)
