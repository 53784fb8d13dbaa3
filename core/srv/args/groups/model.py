"""Arguments that select the model, its tokenizer and the processing of its input."""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from srv.args.checks import at_least, between, json_object, not_empty
from srv.args.spec import Arg

_OTHER_FORMATS = "only weights in safetensors and GGUF files are supported so far"
_MULTIMODAL = "multimodal models (images, audio, video) are not implemented yet"
_BATCH_TOKENIZING = "tokenizing several texts in one call is not implemented yet"


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
            "Maximum length of a request, prompt and output; the model's context length if not set.",
            at_least(2),
            unit="tokens",
        ),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Arg(
            "Dtype of weights and activations; auto uses that of the checkpoint if the platform supports it.",
            synonyms=(("half", "float16"), ("float", "float32")),
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"],
        Arg(
            "Format of the weights; dummy generates random weights, for profiling.",
            planned_values=tuple(
                (name, _OTHER_FORMATS)
                for name in ("pt", "npcache", "sharded_state", "bitsandbytes", "layered", "remote")
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
            "Run Python code from the model's repository.",
            planned="running code from a model's repository is not implemented yet",
        ),
    ] = False
    is_embedding: Annotated[
        bool,
        Arg("Serve embeddings of prompts (POST /v1/embeddings), in addition to generated text."),
    ] = False
    pooling: Annotated[
        Literal["last", "mean"],
        Arg(
            "Hidden states that become an embedding: that of the last token, or the mean over all tokens; if not set, "
            "what the model's 1_Pooling/config.json names.",
            only_with=("is_embedding",),
        ),
    ] = "last"
    json_model_override_args: Annotated[
        str,
        Arg(
            "JSON object whose members override those of the model's configuration.",
            json_object(),
            planned="overriding a model's configuration is not implemented yet",
            metavar="JSON",
        ),
    ] = "{}"
    preferred_sampling_params: Annotated[
        str | None,
        Arg(
            "JSON object of sampling parameters that the server recommends for this model.",
            json_object(),
            planned="recommending sampling parameters to clients is not implemented yet",
            metavar="JSON",
        ),
    ] = None
    sampling_defaults: Annotated[
        Literal["openai", "model"],
        Arg(
            "Source of sampling parameters that a request omits: the API's defaults, or the model's files.",
            planned="choosing the source of sampling defaults is not implemented yet",
        ),
    ] = "model"
    completion_template: Annotated[
        str | None,
        Arg(
            "Name or file of a template for code completion requests.",
            not_empty(),
            planned="completion templates are not implemented yet",
            metavar="NAME_OR_PATH",
        ),
    ] = None
    tokenizer_mode: Annotated[
        Literal["auto", "slow"],
        Arg(
            "Whether to use the fast (compiled) tokenizer if there is one, or always the slow (Python) one.",
            planned="the fast tokenizer is always used; the slow one is not supported yet",
        ),
    ] = "auto"
    tokenizer_worker_num: Annotated[
        int,
        Arg(
            "Number of processes that tokenize and detokenize.",
            at_least(1),
            planned="only the API process tokenizes; further processes are not implemented yet",
            metavar="PROCESSES",
        ),
    ] = 1
    skip_tokenizer_init: Annotated[
        bool,
        Arg(
            "Load no tokenizer: requests and responses contain token ids.",
            planned="serving without a tokenizer is not implemented yet",
        ),
    ] = False
    enable_tokenizer_batch_encode: Annotated[
        bool, Arg("Tokenize the texts of one request together.", planned=_BATCH_TOKENIZING)
    ] = False
    enable_dynamic_batch_tokenizer: Annotated[
        bool, Arg("Tokenize the texts of several concurrent requests together.", planned=_BATCH_TOKENIZING)
    ] = False
    dynamic_batch_tokenizer_batch_size: Annotated[
        int,
        Arg(
            "Maximum number of texts that are tokenized together.",
            at_least(1),
            planned=_BATCH_TOKENIZING,
            metavar="TEXTS",
        ),
    ] = 32
    dynamic_batch_tokenizer_batch_timeout: Annotated[
        float,
        Arg("Time to wait for more texts to tokenize.", at_least(0), planned=_BATCH_TOKENIZING, unit="seconds"),
    ] = 0.002
    enable_multimodal: Annotated[
        bool | None,
        Arg("Accept images, audio and video; if not set, this depends on the model.", planned=_MULTIMODAL),
    ] = None
    mm_process_config: Annotated[
        str,
        Arg(
            "JSON object of preprocessing settings per modality.",
            json_object(),
            planned=_MULTIMODAL,
            metavar="JSON",
        ),
    ] = "{}"
    mm_attention_backend: Annotated[
        str | None,
        Arg("Attention backend of the vision encoder.", not_empty(), planned=_MULTIMODAL, metavar="NAME"),
    ] = None
    disable_fast_image_processor: Annotated[
        bool, Arg("Use the slow image processor instead of the fast one.", planned=_MULTIMODAL)
    ] = False
    keep_mm_feature_on_device: Annotated[
        bool, Arg("Keep preprocessed images in device memory after they are encoded.", planned=_MULTIMODAL)
    ] = False
