"""Faults of the kernels: reference ops in torch, and the native library of the CPU."""

from fault import Fault

_CONTRACTS = "tests/kernels/test_op_contracts.py"
_NATIVE = "tests/kernels/cpu/test_native_kernels.py"

FAULTS = (
    Fault(
        name="gate-is-the-second-half",
        file="kernels/srv_kernels/reference.py",
        text="gate, up = x.chunk(2, -1)\n    return F.silu(gate)",
        planted="up, gate = x.chunk(2, -1)\n    return F.silu(gate)",
        effect="On devices without their own kernel, every model generates nonsense.",
        tests=(_CONTRACTS,),
    ),
    Fault(
        name="long-sums-of-integers-are-cut",
        file="kernels/srv_kernels/reference.py",
        text="for start in range(_EXACT, weight.shape[1], _EXACT):",
        planted="for start in range(_EXACT, weight.shape[1] - _EXACT, _EXACT):",
        effect="int8 products skip the last inputs of wide layers.",
        tests=(_CONTRACTS,),
    ),
    Fault(
        name="one-scale-for-a-whole-batch",
        file="kernels/srv_kernels/reference.py",
        text="scale = wide.abs().amax(-1, keepdim=True) / 127",
        planted="scale = wide.abs().amax() / 127",
        effect="A request's tokens depend on the requests that it is batched with.",
        tests=(_CONTRACTS,),
    ),
    Fault(
        name="experts-take-each-others-tokens",
        file="kernels/srv_kernels/expert_reference.py",
        text="rows = order // max(1, top_k)",
        planted="rows = order % max(1, len(ids))",
        effect="Experts compute other tokens than those that were routed to them.",
        tests=(_CONTRACTS,),
    ),
    Fault(
        name="bias-of-the-choice-in-the-weights",
        file="kernels/srv_kernels/expert_reference.py",
        text="weights = scores.gather(1, ids)",
        planted="weights = choice.gather(1, ids)",
        effect="The bias that balances the load of experts changes what a model computes.",
        tests=(_CONTRACTS,),
    ),
    Fault(
        name="rotated-the-other-way",
        file="kernels/srv_kernels/cpu/native/pointwise.cpp",
        text="second * c + first * s",
        planted="second * c - first * s",
        effect="On the CPU, every model generates nonsense.",
        tests=(f"{_NATIVE}::test_ops_keep_their_contract",),
    ),
    Fault(
        name="parts-forget-the-ones-before",
        file="kernels/srv_kernels/cpu/native/latent_prefill.cpp",
        text="const bool first = keys.begin == 0, last",
        planted="const bool first = true, last",
        effect="On the CPU, DeepSeek forgets all but the last part of a long prompt.",
        tests=("tests/platforms/cpu/test_latent_prefill.py::test_parts_are_merged_wherever_they_end",),
    ),
    Fault(
        name="deterministic-inference-has-two-forms",
        file="platforms/cpu/srv_cpu/latent_forms.py",
        text="for name in (ABSORB_PREFILL, DETERMINISTIC):",
        planted="for name in (ABSORB_PREFILL,):",
        effect="DeepSeek's deterministic results depend on how a prompt is divided among steps.",
        tests=("tests/platforms/cpu/test_latent_prefill.py::test_deterministic_inference_absorbs_all_rows",),
    ),
    Fault(
        name="last-of-equals-is-taken",
        file="kernels/srv_kernels/cpu/native/sampling.cpp",
        text="other == value && where < at",
        planted="other == value && where > at",
        effect="Greedy tokens on the CPU differ from those of other devices where logits are equal.",
        tests=(f"{_NATIVE}::TestMostLikely::test_equals_are_taken_by_their_place",),
    ),
    Fault(
        name="query-sees-the-next-token",
        file="kernels/srv_kernels/cpu/native/attention.cpp",
        text="min_of(position + 1, ",
        planted="min_of(position + 2, ",
        effect="On the CPU, tokens of a prompt attend to the next token.",
        tests=(
            "tests/platforms/cpu/test_attention.py::test_any_batch_agrees_with_dense_attention_on_every_instruction_set",
        ),
    ),
)
