"""What a weight loader of another distribution implements: where the tensors of a model come from, instead of files.

Must not know loaders, nor how layers hold weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from srv.specs import ModelFacts


class WeightSource:
    """The weights of one model, by the names that its Hugging Face checkpoint has.

    There is one per rank, made with the facts of the model, and closed when the weights are loaded.
    """

    def __init__(self, model: ModelFacts) -> None:
        self.model = model

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors that there are, with the shapes of the whole model, whatever part a rank holds.

        Several loaders of one server share the tensors among them. A tensor that no layer needs is refused.
        """
        raise NotImplementedError

    def read(self, name: str) -> Tensor:
        """One of the tensors, of its shape and of any dtype of floats, on any device.

        Each is asked for once, in no order that is promised. It may be a view of memory that the source keeps until the
        next call. A rank that holds a part of the tensor takes it out of the whole.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Let go of files and connections. It is called once, also if a tensor could not be read."""
