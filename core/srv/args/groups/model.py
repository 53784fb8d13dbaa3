"""Arguments that say which model is served, and how its tokens and messages are made."""

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from srv.args.checks import at_least, between, json_object, not_empty
from srv.args.spec import Arg

_OTHER_FORMATS = "weights are read from safetensors and GGUF files only, so far"
_MULTIMODAL = "models that read images, sound or video are not implemented yet"
_BATCH_TOKENIZING = "tokenizing several texts in one call is not implemented yet"


class ModelArgs(NamedTuple):
    """Which model, in which type, with which tokenizer."""

    model_path: Annotated[
        str | None,
        Arg(
            "GGUF file, local Hugging Face folder, or hub id of the model; without it the demo model, if installed.",
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
    revision: Annotated[
        str | None, Arg("Branch, tag or commit of a model that comes from a hub.", check=not_empty())
    ] = None
    context_length: Annotated[
        int | None,
        Arg("Most tokens of one request, prompt and output; the model's own if not set.", at_least(2), unit="tokens"),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Arg(
            "Type of weights and activations; auto takes the checkpoint's, where the platform can.",
            synonyms=(("half", "float16"), ("float", "float32")),
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"],
        Arg(
            "Format of the weights; dummy makes random ones, for profiling.",
            planned_values=tuple(
                (name, _OTHER_FORMATS)
                for name in ("pt", "npcache", "sharded_state", "bitsandbytes", "layered", "remote")
            ),
        ),
    ] = "auto"
    model_impl: Annotated[
        Literal["auto", "srv", "transformers"],
        Arg(
            "Whose implementation of the model to run; auto takes srv's own where there is one.",
            synonyms=(("sglang", "srv"),),
        ),
    ] = "auto"
    chat_template: Annotated[Path | None, Arg("File with a Jinja chat template to use instead of the model's own.")] = (
        None
    )
    random_seed: Annotated[
        int | None,
        Arg(
            "Seed of dummy weights (0 if not set), and of the seeds drawn for requests that bring none (drawn anew if "
            "not set).",
            between(0, 2**63 - 1),
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, Arg("Run Python code that comes with a model.", planned="code that comes with a model is never run yet")
    ] = False
    is_embedding: Annotated[
        bool,
        Arg(
            "Serve the model's embeddings instead of its text.",
            planned="embedding models and their endpoint are not implemented yet",
        ),
    ] = False
    json_model_override_args: Annotated[
        str,
        Arg(
            "JSON object whose members replace those of the model's own configuration.",
            json_object(),
            planned="a model's configuration is used as it is; replacing parts of it is not implemented yet",
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
            "Where sampling parameters come from that a request leaves out: the API's document, or the model's files.",
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
            "Whether to take the tokenizer's compiled implementation where there is one, or always the Python one.",
            planned="tokenizers always run in their compiled implementation; the Python one is not offered yet",
        ),
    ] = "auto"
    tokenizer_worker_num: Annotated[
        int,
        Arg(
            "Processes that tokenize and detokenize.",
            at_least(1),
            planned="the API process is the only one that tokenizes; more of them are not implemented yet",
            metavar="PROCESSES",
        ),
    ] = 1
    skip_tokenizer_init: Annotated[
        bool,
        Arg(
            "Load no tokenizer: requests bring token ids and get token ids.",
            planned="serving without a tokenizer is not implemented yet",
        ),
    ] = False
    enable_tokenizer_batch_encode: Annotated[
        bool, Arg("Tokenize the texts of one request together.", planned=_BATCH_TOKENIZING)
    ] = False
    enable_dynamic_batch_tokenizer: Annotated[
        bool, Arg("Tokenize together what several requests bring at about the same time.", planned=_BATCH_TOKENIZING)
    ] = False
    dynamic_batch_tokenizer_batch_size: Annotated[
        int, Arg("Most texts that are tokenized together.", at_least(1), planned=_BATCH_TOKENIZING, metavar="TEXTS")
    ] = 32
    dynamic_batch_tokenizer_batch_timeout: Annotated[
        float,
        Arg("Time to wait for more texts to tokenize.", at_least(0), planned=_BATCH_TOKENIZING, unit="seconds"),
    ] = 0.002
    enable_multimodal: Annotated[
        bool | None,
        Arg("Take images, sound and video where the model can; the model decides if not set.", planned=_MULTIMODAL),
    ] = None
    mm_process_config: Annotated[
        str,
        Arg(
            "JSON object of preprocessing settings by kind of input.",
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
        bool, Arg("Prepare images with the slower, plain image processor.", planned=_MULTIMODAL)
    ] = False
    keep_mm_feature_on_device: Annotated[
        bool, Arg("Leave prepared images in device memory after the encoder has read them.", planned=_MULTIMODAL)
    ] = False
