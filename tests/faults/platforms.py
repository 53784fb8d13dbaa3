"""Faults of platforms and plugins: what they declare, their attention, their sampling, their captured steps."""

from fault import Fault

_CPU_ATTENTION = "tests/platforms/cpu/test_attention.py"
_CPU_SAMPLING = "tests/platforms/cpu/test_sampling.py"
_PROBES = "tests/platforms/test_builtin_probes.py"
_NPU = "tests/platforms/npu/test_simulated.py"
_TOY = "plugins/toy_device/tests"

FAULTS = (
    Fault(
        name="window-one-token-too-long",
        file="platforms/cpu/srv_cpu/reach.py",
        text="hidden | (keys <= queries - self.window)",
        planted="hidden | (keys < queries - self.window)",
        effect="On the CPU, models with a sliding window attend to one token too many.",
        tests=(f"{_CPU_ATTENTION}::test_any_batch_agrees_with_dense_attention",),
    ),
    Fault(
        name="nucleus-without-its-last-token",
        file="platforms/cpu/srv_cpu/sampling.py",
        text="in_nucleus = 1 + (cumulative",
        planted="in_nucleus = (cumulative",
        effect="top_p never samples the token that completes the nucleus.",
        tests=(f"{_CPU_SAMPLING}::test_draws_follow_the_filtered_distribution",),
    ),
    Fault(
        name="container-limit-ignored",
        file="platforms/cpu/srv_cpu/probe.py",
        text="range(len(parts), -1, -1)",
        planted="range(len(parts), 0, -1)",
        effect="In a container, the KV pool is sized by the host's memory and the server is killed.",
        tests=(_PROBES,),
    ),
    Fault(
        name="a3-taken-for-a2",
        file="platforms/npu/srv_npu/soc.py",
        text='(220, 225, "A2',
        planted='(220, 255, "A2',
        effect="An Ascend A3 is served with the limits of an A2.",
        tests=("tests/platforms/npu/test_sdk.py",),
    ),
    Fault(
        name="npu-window-of-one-more-key",
        file="platforms/npu/srv_npu/step_rows.py",
        text="first_keys = np.maximum(lengths - window, 0)",
        planted="first_keys = np.maximum(lengths - window - 1, 0)",
        effect="On NPUs, each generated token attends to a key behind its sliding window.",
        tests=(f"{_NPU}::test_windows_and_attention_to_later_tokens",),
    ),
    Fault(
        name="npu-replay-with-one-list-of-lengths",
        file="platforms/npu/srv_npu/graphs.py",
        text="alike = all(length is self.lengths[0] for length in self.lengths)",
        planted="alike = True",
        effect="On NPUs, replayed layers with a sliding window take the lengths of the layers without one.",
        tests=(f"{_NPU}::test_windows_and_attention_to_later_tokens",),
    ),
    Fault(
        name="experts-split-by-any-number",
        file="platforms/cuda/srv_cuda/rules.py",
        text='context["ep_size"] in (1, context["tp_size"])',
        planted='context["ep_size"] <= context["tp_size"]',
        effect="An expert-parallel size is accepted for which the kernels have no layout.",
        tests=("tests/platforms/cuda/test_rules.py",),
    ),
    Fault(
        name="replay-with-stale-lengths",
        file="plugins/toy_device/srv_toy_device/graphs.py",
        text="        graph.update(lengths=metadata[0].lengths)\n",
        planted="",
        effect="Replayed steps attend with the lengths of the step that was captured.",
        tests=(f"{_TOY}/test_toy_graphs.py",),
    ),
    Fault(
        name="toy-attention-sees-the-future",
        file="plugins/toy_device/srv_toy_device/attention.py",
        text="visible = distance >= 0",
        planted="visible = distance >= -1",
        effect="On the example device, each token attends to the next token.",
        tests=(f"{_TOY}/test_toy_limits.py",),
    ),
)
