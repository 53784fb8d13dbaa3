"""Faults of reading weight files, and of weights in host memory."""

from fault import Fault

_DAMAGED = "tests/core/models/checkpoints/test_damaged.py"
_READING = "tests/core/models/checkpoints/test_reading.py"
_OFFLOAD = "tests/core/worker/test_offload.py"
_OFFLOADED = "tests/core/quantization/test_offloaded.py"

FAULTS = (
    Fault(
        name="layers-are-computed-before-their-weights-are-copied",
        file="core/srv/worker/offload.py",
        text="self._streams.compute.wait(copied)",
        planted="copied.synchronize",
        effect="On a device with streams, layers in host memory compute with the weights of others: nonsense.",
        tests=(_OFFLOAD,),
    ),
    Fault(
        name="weights-are-copied-over-those-in-use",
        file="core/srv/worker/offload.py",
        text="copies.wait(read)",
        planted="pass",
        effect="On a device with streams, the weights of a layer are overwritten while it computes: nonsense.",
        tests=(_OFFLOAD,),
    ),
    Fault(
        name="scales-of-layers-in-host-memory-stay-on-the-device",
        file="core/srv/quantization/layers/fp8.py",
        text="for tensor in (matrix.weight, matrix.scale))",
        planted="for tensor in (matrix.weight,))",
        effect="A launch with FP8 layers in host memory ends with an internal error: plans count their scales too.",
        tests=(_OFFLOADED,),
    ),
    Fault(
        name="quantized-layers-in-host-memory-count-as-unquantized",
        file="core/srv/planning/weights.py",
        text="if matrix.scheme is None:",
        planted="if held.scheme is None or True:",
        effect="A launch with quantized layers in host memory ends with an internal error: they are smaller.",
        tests=(_OFFLOADED,),
    ),
    Fault(
        name="a-ledger-expects-weights-that-are-in-host-memory",
        file="core/srv/planning/budget.py",
        text="return total - saved_bytes(config, model)",
        planted="return held",
        effect="With layers of a GGUF file in host memory, a launch warns that its weights are smaller than predicted.",
        tests=(_OFFLOADED,),
    ),
    Fault(
        name="overlapping-tensors-of-a-gguf-file",
        file="core/srv/models/checkpoints/gguf_header.py",
        text="if offset != end:",
        planted="if offset > self.size:",
        effect="A damaged GGUF file is served, with the weights of one layer in another.",
        tests=(_DAMAGED,),
    ),
    Fault(
        name="an-index-may-name-tensors-that-are-nowhere",
        file="core/srv/models/checkpoints/safetensors_header.py",
        text="        if name not in stored:",
        planted="        if not stored:",
        effect="A checkpoint of which a part was never uploaded is planned as if it were whole.",
        tests=(_DAMAGED,),
    ),
    Fault(
        name="parts-are-read-from-the-first-row",
        file="core/srv/models/checkpoints/safetensors_file.py",
        text="((stored.begin + begin * row, end - begin)",
        planted="((stored.begin, end - begin)",
        effect="With several ranks and --weight-loader-disable-mmap, ranks hold the rows of the first: nonsense.",
        tests=(_READING,),
    ),
    Fault(
        name="fused-queries-stay-by-head",
        file="core/srv/models/checkpoints/row_orders.py",
        text='self.mapping.permuted.get(fused) == "kv_heads"',
        planted="False",
        effect="Models whose checkpoints fuse queries, keys and values by head (GPT-NeoX, Falcon) answer nonsense.",
        tests=("tests/core/models/checkpoints/test_rules.py",),
    ),
    Fault(
        name="halves-are-not-swapped",
        file="core/srv/models/checkpoints/row_orders.py",
        text="return RowOrder((*range(half, outputs), *range(half)))",
        planted="return RowOrder((*range(half), *range(half, outputs)))",
        effect="Gate and up projection of checkpoints that store them in the other order are exchanged.",
        tests=("tests/core/models/checkpoints/test_rules.py",),
    ),
    Fault(
        name="fused-parts-in-any-order",
        file="core/srv/models/checkpoints/rules.py",
        text="tuple(names) == tuple(start + path for path in paths)",
        planted="set(names) == {start + path for path in paths}",
        effect="A plan sizes a matrix as fused that the layers do not hold as one.",
        tests=("tests/core/models/checkpoints/test_rules.py",),
    ),
    Fault(
        name="columns-of-experts-do-not-take-turns",
        file="core/srv/models/checkpoints/stacked_experts.py",
        text="tuple(rows[part::count] for part in range(count))",
        planted="rows.chunk(count)",
        effect="The experts of GPT-OSS have half of the gate and half of the up projection in each.",
        tests=("tests/core/models/checkpoints/test_rules.py",),
    ),
)
