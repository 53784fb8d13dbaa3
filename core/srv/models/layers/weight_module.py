"""What modules have in common that hold weights beside those of the layers within them."""

from __future__ import annotations

from torch import Tensor, nn

from srv.models.checkpoints.slices import Slice


class WeightModule(nn.Module):
    """A module with weights of its own, or with values that derive from weights."""

    def weight_views(self) -> dict[str, Tensor]:
        """Views of its own weights for a loader to fill, by their names in the checkpoint."""
        return {}

    def weight_slices(self) -> dict[str, Slice]:
        """The slices of the checkpoint's tensors that the views hold; of those that are not whole."""
        return {}

    def prepare_loaded(self) -> None:
        """Compute what derives from the weights. Called once, after loading."""
