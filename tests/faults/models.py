"""Faults of models: facts, configurations, layers, file formats and loaders."""

from fault import Fault

_LOADERS = "tests/core/models/checkpoints/test_loaders.py"
_SHARDING = "tests/core/models/test_sharding.py"
_DECODER = "tests/core/models/families/test_decoder.py"
_GEMMA3 = "tests/core/models/families/test_gemma3.py"
_GGUF_FILES = "tests/core/models/families/test_gguf_files.py"
_GGUF = "tests/core/models/config/test_gguf_config.py"
_HF = "tests/core/models/config/test_hf_config.py"
_LAYER_NORM = "tests/core/models/families/test_layer_norm.py"

_MOE = "tests/core/models/families/test_moe.py"

FAULTS = (
    Fault(
        name="shared-expert-without-its-gate",
        file="core/srv/models/modules/feed_forward.py",
        text="shared = shared * self.shared_gate.kernel(x).sigmoid()",
        planted="shared = shared * self.shared_gate.kernel(x)",
        effect="Qwen2-MoE generates nonsense.",
        tests=(_MOE,),
    ),
    Fault(
        name="experts-in-every-layer",
        file="core/srv/models/families/qwen2_moe.py",
        text="(index + 1) % step == 0",
        planted="(index + step) % step == 0",
        effect="Models with experts in some layers only cannot be loaded.",
        tests=(_MOE,),
    ),
    Fault(
        name="int8-experts-share-a-scale",
        file="core/srv/quantization/layers/int8.py",
        text="scales = self.gate_up_scale.unsqueeze(-1), self.down_scale.unsqueeze(-1)",
        planted="scales = self.gate_up_scale[:1].unsqueeze(-1).expand(len(self.gate_up), -1, -1), "
        "self.down_scale.unsqueeze(-1)",
        effect="All int8 experts have the scales of the last one.",
        tests=(_MOE,),
    ),
    Fault(
        name="ranks-share-the-slopes-of-the-first-one",
        file="core/srv/models/modules/attention.py",
        text="part.alibi[first:end]",
        planted="part.alibi[: end - first]",
        effect="With several ranks, models with ALiBi attend with the slopes of other heads.",
        tests=(_LAYER_NORM,),
    ),
    Fault(
        name="ranks-norm-their-own-heads",
        file="core/srv/models/modules/norms.py",
        text="means = self.communicator.all_reduce(means).div_(self.ranks)",
        planted="means = self.communicator.all_reduce(means.clone()).mul_(0).add_(means)",
        effect="With several ranks, norms over all heads (OLMo 2, MiniMax-M2) are those of a rank's heads.",
        tests=(_SHARDING,),
    ),
    Fault(
        name="rotary-pairs-are-exchanged",
        file="core/srv/models/checkpoints/row_orders.py",
        text="*first, *second, *range(end",
        planted="*second, *first, *range(end",
        effect="GPT-J rotates queries and keys backwards, and generates nonsense.",
        tests=(_LAYER_NORM,),
    ),
    Fault(
        name="stored-output-layer-is-ignored",
        file="core/srv/models/config/hf_config.py",
        text="if checkpoint is None or options.headers_only or TIED in options.overrides:",
        planted="if TIED not in options.overrides:",
        effect="A fine-tuned model computes its logits with the embedding instead of its output layer.",
        tests=("tests/core/models/checkpoints/test_output_layer.py",),
    ),
    Fault(
        name="rope-rows-stay-interleaved",
        file="core/srv/models/checkpoints/gguf_loader.py",
        text="ordered: _Rows = (begins[:, None] + period).ravel()",
        planted="ordered: _Rows = numpy.arange(outputs)",
        effect="Every Llama model from a GGUF file generates nonsense.",
        tests=(_LOADERS,),
    ),
    Fault(
        name="rank-reads-the-first-rows-of-a-gguf",
        file="core/srv/models/checkpoints/gguf_loader.py",
        text="return rows[part.begin : part.end], None",
        planted="return rows[: part.end - part.begin], None",
        effect="With several ranks and a GGUF file, all ranks hold the weights of the first one: nonsense.",
        tests=(_SHARDING,),
    ),
    Fault(
        name="tensors-of-all-gguf-files-read-from-the-first",
        file="core/srv/models/checkpoints/gguf_loader.py",
        text="mapped[tensor.file][tensor.offset",
        planted="mapped[0][tensor.offset",
        effect="A model in several GGUF files generates nonsense.",
        tests=(f"{_GGUF_FILES}::test_a_model_in_several_files",),
    ),
    Fault(
        name="gguf-axes-not-reversed",
        file="core/srv/models/checkpoints/gguf_header.py",
        text="for _ in range(axes))[::-1]",
        planted="for _ in range(axes))",
        effect="Matrices of GGUF files are refused, or read with rows and columns exchanged.",
        tests=(_GGUF,),
    ),
    Fault(
        name="gguf-data-not-aligned",
        file="core/srv/models/checkpoints/gguf_header.py",
        text="start = -(-self.position // alignment) * alignment",
        planted="start = self.position",
        effect="All weights of a GGUF file are read a few bytes too early.",
        tests=(_GGUF,),
    ),
    Fault(
        name="gate-and-up-exchanged",
        file="core/srv/models/families/builders/parts.py",
        text='first = ("gate_proj", "up_proj") if',
        planted='first = ("up_proj", "gate_proj") if',
        effect="Every model generates nonsense.",
        tests=(_DECODER,),
    ),
    Fault(
        name="llama3-blend-reversed",
        file="core/srv/models/layers/rope.py",
        text="blended = (1 - blend) * frequencies / factor + blend * frequencies",
        planted="blended = blend * frequencies / factor + (1 - blend) * frequencies",
        effect="The quality of Llama 3.1 degrades in long texts.",
        tests=(_DECODER,),
    ),
    Fault(
        name="sliding-window-begins-a-layer-late",
        file="core/srv/models/families/qwen2.py",
        text="if i >= first else",
        planted="if i > first else",
        effect="One layer of a Qwen2 model with sliding windows attends to too many tokens.",
        tests=(_DECODER,),
    ),
    Fault(
        name="unsupported-field-ignored",
        file="core/srv/models/families/builders/decoder_fields.py",
        text='    "attn_logit_softcapping": (),\n',
        planted="",
        effect="A model that caps its attention scores is served without the cap.",
        tests=(_DECODER,),
    ),
    Fault(
        name="tied-embeddings-counted-twice",
        file="core/srv/models/blueprint/__init__.py",
        text='if not (self.tied and each.name.endswith(".weight"))',
        planted="if True",
        effect="`srv plan` reports too much memory for models with tied embeddings.",
        tests=(_HF, _DECODER),
    ),
    Fault(
        name="generation-config-ignored",
        file="core/srv/models/config/hf_config.py",
        text='given = generation.get("eos_token_id")\n',
        planted="given = None\n",
        effect="A chat model does not stop at the end of its turn.",
        tests=(_HF,),
    ),
    Fault(
        name="unexpected-tensors-ignored",
        file="core/srv/models/checkpoints/filling.py",
        text="    if unexpected:\n",
        planted="    if unexpected and not shapes:\n",
        effect="A checkpoint with layers that the model does not have is served without them.",
        tests=(_LOADERS,),
    ),
    Fault(
        name="every-layer-rotated",
        file="core/srv/models/families/builders/parts.py",
        text="(rope or sizes.rope) if rotated else None",
        planted="rope or sizes.rope",
        effect="SmolLM3 applies rotary embeddings in layers that were trained without them.",
        tests=(_DECODER,),
    ),
    Fault(
        name="logits-multiplied",
        file="core/srv/models/modules/decoder.py",
        text="logits = logits / self.logits_divisor",
        planted="logits = logits * self.logits_divisor",
        effect="Granite samples from a far too sharp distribution.",
        tests=(_DECODER,),
    ),
    Fault(
        name="gguf-norms-keep-the-added-one",
        file="core/srv/models/checkpoints/gguf_loader.py",
        text="(lambda values: values.float() - offset)",
        planted="(lambda values: values.float())",
        effect="Gemma 3 from a GGUF file generates nonsense: its norms multiply by 2 + weight.",
        tests=(_GEMMA3,),
    ),
    Fault(
        name="norms-add-one-in-the-dtype-of-the-model",
        file="core/srv/models/layers/norm.py",
        text="torch.add(self.weight.float(), 1, out=self.scale)",
        planted="self.scale.copy_(self.weight + 1)",
        effect="In bfloat16, the weights of all norms of Gemma 3 are rounded to multiples of 1/128.",
        tests=(_GEMMA3,),
    ),
    Fault(
        name="windows-rotate-like-full-attention",
        file="core/srv/models/families/gemma3.py",
        text="rope = None if window is None else local",
        planted="rope = None",
        effect="Five of six layers of Gemma 3 see wrong positions.",
        tests=(_GEMMA3,),
    ),
    Fault(
        name="third-party-replaces-a-built-in-architecture",
        file="core/srv/platform/extensions.py",
        text='(["srv"] if taken and matches else [])',
        planted="[]",
        effect="A package silently changes how Llama models are computed.",
        tests=("tests/core/models/families/test_third_party.py",),
    ),
)
