"""Faults of quantized weights: scales, offsets, and the bytes of GGUF types."""

from fault import Fault

_INT8 = "tests/core/quantization/test_w8a8_int8.py"
_MODELSLIM = "tests/core/quantization/test_modelslim.py"
_GGUF = "tests/core/quantization/test_gguf_layers.py"
_NVFP4 = "tests/core/quantization/test_nvfp4.py"
_THIRD_PARTY = "tests/core/quantization/test_third_party.py"

FAULTS = (
    Fault(
        name="nibbles-in-the-other-order",
        file="core/srv/quantization/formats/nvfp4_storage.py",
        text="pairs = torch.stack((values[(codes & 15).int()], values[(codes >> 4).int()]), -1)",
        planted="pairs = torch.stack((values[(codes >> 4).int()], values[(codes & 15).int()]), -1)",
        effect="Neighbouring weights in NVFP4 change places, and replies are nonsense.",
        tests=(_NVFP4,),
    ),
    Fault(
        name="experts-of-another-part",
        file="core/srv/quantization/formats/nvfp4_storage.py",
        text="out += self._compute(x, places - begin, weights, gate_up, down, None, None, sizes.activation)",
        planted="out += self._compute(x, places, weights, gate_up, down, None, None, sizes.activation)",
        effect="Of experts in NVFP4 that are dequantized in parts, tokens get those of the first part for all.",
        tests=(_NVFP4,),
    ),
    Fault(
        name="one-scale-for-all-rows",
        file="core/srv/quantization/formats/online_storage.py",
        text="scale = wide.abs().amax(1, keepdim=True) / _INT8_MAX",
        planted="scale = wide.abs().amax().expand(wide.shape[0], 1) / _INT8_MAX",
        effect="Weights that are quantized at load lose far more precision than they need to.",
        tests=(_INT8,),
    ),
    Fault(
        name="scales-of-other-fused-layers",
        file="core/srv/quantization/layers/int8.py",
        text='views[f"{name}.input_offset"] = self._offsets[index : index + 1]',
        planted='views[f"{name}.input_offset"] = self._offsets[:1]',
        effect="Fused layers whose inputs are quantized differently are computed with the offset of only one of them.",
        tests=(_MODELSLIM,),
    ),
    Fault(
        name="asymmetric-weights-accepted",
        file="core/srv/quantization/layers/int8.py",
        text="nonzero = [name for name, offset in offsets.items() if bool(offset.any())]",
        planted="nonzero = [name for name, offset in offsets.items() if bool(offset.all())]",
        effect="A checkpoint with zero points is served as if it had none, and generates nonsense.",
        tests=(_MODELSLIM,),
    ),
    Fault(
        name="mixed-gguf-types-joined",
        file="core/srv/quantization/layers/blocks.py",
        text="if first <= row < first + matrix.outputs:",
        planted="if first < row <= first + matrix.outputs:",
        effect="GGUF files that mix types within one attention layer are refused or misread.",
        tests=(_GGUF,),
    ),
    Fault(
        name="bias-of-quantized-layer-dropped",
        file="core/srv/quantization/layers/blocks.py",
        text="return product if self.bias is None else product + self.bias",
        planted="return product",
        effect="The quality of quantized Qwen2 files is worse than it should be.",
        tests=(_GGUF,),
    ),
    Fault(
        name="unsupported-form-of-a-package-served",
        file="core/srv/quantization/third_party.py",
        text="if supported is True:",
        planted="if supported is not False:",
        effect="A checkpoint of 3 bits is read as one of 4 bits, because its method has only a reason against it.",
        tests=(_THIRD_PARTY,),
    ),
    Fault(
        name="third-party-replaces-a-built-in-method",
        file="core/srv/quantization/registry.py",
        text="taken=name in BUILT_IN",
        planted="taken=False",
        effect="A package silently changes how int8 checkpoints are computed.",
        tests=(_THIRD_PARTY,),
    ),
    Fault(
        name="operands-in-another-order",
        file="core/srv/quantization/layers/int8.py",
        text='names = ("weight", "input_scale", "input_offset", "quant_bias", "deq_scale")',
        planted='names = ("weight", "input_offset", "input_scale", "quant_bias", "deq_scale")',
        effect="A platform that passes the operands to its op computes nonsense.",
        tests=("tests/core/quantization/test_op_layers.py",),
    ),
    Fault(
        name="quantized-checkpoints-have-no-architecture",
        file="core/srv/models/families/builders/decoder_fields.py",
        text='"is_causal": (True,),',
        planted='"is_causal": (True,), "quantization_config": (),',
        effect="Quantized models that could be sharded are refused, and their method counts no linear layers.",
        tests=(_THIRD_PARTY,),
    ),
    Fault(
        name="last-block-of-scales-not-counted",
        file="core/srv/quantization/schemes.py",
        text="return -(-outputs // rows), -(-inputs // columns)",
        planted="return outputs // rows, inputs // columns",
        effect="FP8 models whose sizes are no multiple of a block have too few scales, and do not load.",
        tests=("tests/core/quantization/test_schemes.py",),
    ),
    Fault(
        name="prepared-blocks-take-no-more",
        file="core/srv/quantization/schemes.py",
        text="return resident + sum(prepared_bytes(",
        planted="return resident + 0 * sum(prepared_bytes(",
        effect="A plan leaves no memory for quantized weights once they are repacked, and the engine runs out of it.",
        tests=("tests/core/quantization/test_schemes.py",),
    ),
)
