"""Arguments that say which model is served, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from srv.args.checks import at_least, between, not_empty
from srv.args.spec import Arg


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArgs:
    """Which model, in which type, from which files."""

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
        Arg("Type of weights and activations; auto takes the checkpoint's, where the platform can."),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"],
        Arg("Format of the weights; dummy makes random ones, for profiling."),
    ] = "auto"
    model_impl: Annotated[
        Literal["auto", "srv", "transformers"],
        Arg("Whose implementation of the model to run; auto takes srv's own where there is one."),
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
