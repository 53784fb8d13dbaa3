"""Which linear layers of a checkpoint are quantized, and how. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from srv.errors import ModelError

UNQUANTIZED = "FLOAT"


class QuantDescription:
    """The quantization types of a checkpoint's linear layers. `quant_types`: by the name of the weight tensor."""

    def __init__(self, path: str, quant_types: Mapping[str, str]) -> None:
        self._path, self._quant_types = path, quant_types

    def by_names(self, stored_names: Mapping[str, str]) -> QuantDescription:
        """The same by the names that layers have; `stored_names`: of `StoredModel`."""
        types = self._quant_types
        own = {name: types[stored] for name, stored in stored_names.items() if stored in types}
        return QuantDescription(self._path, {**types, **own})

    def __bool__(self) -> bool:
        """Whether any layer is quantized."""
        return any(quant_type != UNQUANTIZED for quant_type in self._quant_types.values())

    def quant_type(self, names: Iterable[str]) -> str:
        """The type of layers that are fused into one; UNQUANTIZED for those not described.

        Raises ModelError (unsupported_quantization) if the layers differ.
        """
        found = {name: self.of_weight(f"{name}.weight") for name in names}
        if len(set(found.values())) > 1:
            differences = ", ".join(f"{name} is {quant_type}" for name, quant_type in found.items())
            raise ModelError(
                "unsupported_quantization",
                self._path,
                f"layers that share one input are quantized differently ({differences})",
                "Quantize them alike: in the list of layers that stay FLOAT, name all of them or none",
            )
        return next(iter(found.values()))

    def of_weight(self, name: str) -> str:
        """The type of one weight tensor."""
        return self._quant_types.get(name, UNQUANTIZED)
