"""Arguments that select the model, its tokenizer and the processing of its input."""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from srv.args.checks import at_least, between, json_object, not_empty
from srv.args.spec import Arg
from srv.limits import SMALLEST_REQUEST

_OTHER_FORMATS = "only weights in safetensors and GGUF files are supported so far"
_RECOGNISED = (
    "such checkpoints are recognised by their configuration and need no value; others are not quantized to its types"
)
_OTHER_SOURCES = "weights are read from files of this machine, or downloaded from a hub first, so far"
_MULTIMODAL = "multimodal models (images, audio, video) are not implemented yet"


class ModelArgs(NamedTuple):
    """Which model, in which dtype, with which tokenizer."""

    model_path: Annotated[
        str | None,
        Arg(
            "GGUF file, local Hugging Face folder, or hub id of the model; if not set, the demo model (if installed).",
            check=not_empty(),
            metavar="PATH",
            aliases=("model",),
        ),
    ] = None
    tokenizer_path: Annotated[
        str | None,
        Arg("File or folder of a tokenizer to use instead of the model's own.", check=not_empty(), metavar="PATH"),
    ] = None
    served_model_name: Annotated[
        str | None, Arg("Name of the model in the API; the model's own name if not set.", check=not_empty())
    ] = None
    revision: Annotated[str | None, Arg("Branch, tag or commit of a model from a hub.", check=not_empty())] = None
    context_length: Annotated[
        int | None,
        Arg(
            "Maximum length of a request, prompt and output; the model's context length if not set. Of models with "
            "LongRoPE it chooses the factors: the short ones up to the length of pre-training, else the long ones.",
            at_least(SMALLEST_REQUEST),
            unit="tokens",
        ),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Arg(
            "Dtype of weights and activations; auto uses that of the checkpoint if the platform supports it. If there "
            "are no weights and config.json states none, that is bfloat16, and float32 for encoders.",
            synonyms=(("half", "float16"), ("float", "float32")),
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"],
        Arg(
            "Format of the weights; dummy generates random weights, for profiling.",
            planned_values=(
                *((name, _OTHER_FORMATS) for name in ("pt", "npcache", "sharded_state", "layered")),
                ("bitsandbytes", _RECOGNISED),
                ("remote", _OTHER_SOURCES),
                *((name, _OTHER_FORMATS) for name in ("tensorizer", "mistral", "fastsafetensors")),
                *((name, _OTHER_SOURCES) for name in ("remote_instance", "runai_streamer", "runai_streamer_sharded")),
            ),
        ),
    ] = "auto"
    model_impl: Annotated[
        Literal["auto", "srv", "transformers"],
        Arg(
            "Implementation of the model; auto uses srv's own if there is one, else that of transformers.",
            synonyms=(("sglang", "srv"),),
        ),
    ] = "auto"
    chat_template: Annotated[Path | None, Arg("File with a Jinja chat template to use instead of the model's own.")] = (
        None
    )
    random_seed: Annotated[
        int | None,
        Arg(
            "Seed of dummy weights (0 if not set), and of the seeds for requests that have none (random if not set).",
            between(0, 2**63 - 1),
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        Arg(
            "Run Python code from the model's folder, for a model that neither srv nor transformers has layers for. "
            "The code can do whatever this user can: read it before.",
        ),
    ] = False
    is_embedding: Annotated[
        bool,
        Arg(
            "Serve what is computed from pooled hidden states, in addition to generated text: /v1/embeddings,"
            " /v1/rerank, /v1/score and /classify, as far as the model can. On for models that generate no text."
        ),
    ] = False
    pooling: Annotated[
        Literal["last", "mean", "cls", "max", "weightedmean", "mean_sqrt_len"],
        Arg(
            "Hidden states that become an embedding: that of the last or of the first token (cls), the mean or the"
            " largest value over all tokens, the mean weighted by position, or the sum divided by the square root of"
            " their number; if not set, what the model's files name.",
            only_with=("is_embedding",),
        ),
    ] = "last"
    json_model_override_args: Annotated[
        str,
        Arg(
            "JSON object whose members replace fields of the model's configuration, as config.json names them.",
            json_object(),
            metavar="JSON",
        ),
    ] = "{}"
    preferred_sampling_params: Annotated[
        str | None,
        Arg(
            "JSON object of sampling parameters, as /generate names them, for requests without them; they take"
            " precedence over --sampling-defaults.",
            json_object(),
            metavar="JSON",
        ),
    ] = None
    sampling_defaults: Annotated[
        Literal["openai", "model"],
        Arg(
            "Source of the temperature, top_p, top_k, min_p and repetition penalty that a request omits: the API's"
            " defaults, or the model's generation_config.json, if it has one.",
        ),
    ] = "model"
    completion_template: Annotated[
        str | None,
        Arg(
            "How prompts with suffix mark their parts: qwen_coder, star_coder, deepseek_coder, glm_coder, codestral, or"
            " a JSON file as SGLang reads it; by default the tokenizer's tokens decide.",
            not_empty(),
            metavar="NAME_OR_PATH",
        ),
    ] = None
    score_template: Annotated[
        str | None,
        Arg(
            "How a model that generates text is asked whether a document answers a query, for /v1/rerank and /v1/score:"
            " qwen3_reranker, or a JSON file with prefix, body, suffix, instruction, yes and no; turns --is-embedding"
            " on.",
            not_empty(),
            metavar="NAME_OR_PATH",
        ),
    ] = None
    tokenizer_mode: Annotated[
        Literal["auto", "slow"],
        Arg(
            "Whether to use the fast (compiled) tokenizer if there is one, or always the slow (Python) one.",
            planned="transformers 5 ignores use_fast and keeps no second implementation of a fast tokenizer; models"
            " that have a Python tokenizer alone are refused",
        ),
    ] = "auto"
    tokenizer_worker_num: Annotated[
        int,
        Arg(
            "Number of processes that encode the texts of requests with more than about 4,000 characters; if 1, threads"
            " of the API process do, which always encodes shorter texts and decodes outputs.",
            at_least(1),
            metavar="PROCESSES",
        ),
    ] = 1
    skip_tokenizer_init: Annotated[
        bool,
        Arg(
            "Load no tokenizer: prompts and outputs are token ids, and fields that need text are refused.",
        ),
    ] = False
    enable_tokenizer_batch_encode: Annotated[
        bool,
        Arg("Encode several texts of one request in one call of the tokenizer, which uses several threads."),
    ] = False
    enable_dynamic_batch_tokenizer: Annotated[
        bool,
        Arg("Encode the texts of concurrent requests in one call of the tokenizer, which uses several threads."),
    ] = False
    dynamic_batch_tokenizer_batch_size: Annotated[
        int,
        Arg(
            "Maximum number of texts of concurrent requests that are encoded in one call.",
            at_least(1),
            only_with=("enable_dynamic_batch_tokenizer",),
            metavar="TEXTS",
        ),
    ] = 32
    dynamic_batch_tokenizer_batch_timeout: Annotated[
        float,
        Arg(
            "Time to wait for the texts of more requests before encoding.",
            at_least(0),
            only_with=("enable_dynamic_batch_tokenizer",),
            unit="seconds",
        ),
    ] = 0.002
    enable_multimodal: Annotated[
        bool | None,
        Arg("Accept images, audio and video; if not set, this depends on the model.", planned=_MULTIMODAL),
    ] = None
    mm_process_config: Annotated[
        str,
        Arg(
            "JSON object of preprocessing settings per modality.",
            planned=_MULTIMODAL,
            metavar="JSON",
        ),
    ] = "{}"
    mm_attention_backend: Annotated[
        str | None,
        Arg("Attention backend of the vision encoder.", planned=_MULTIMODAL, metavar="NAME"),
    ] = None
    disable_fast_image_processor: Annotated[
        bool, Arg("Use the slow image processor instead of the fast one.", planned=_MULTIMODAL)
    ] = False
    keep_mm_feature_on_device: Annotated[
        bool, Arg("Keep preprocessed images in device memory after they are encoded.", planned=_MULTIMODAL)
    ] = False
