"""LoRA adapters alone, under the names that PEFT's ``adapter_model.safetensors`` has them under."""

from __future__ import annotations

import re

STEM = "adapter_model"


class Adapter:
    """Which tensors belong to the adapter called ``name``, and what they are called in its file."""

    def __init__(self, name: str = "default") -> None:
        # A module's or a parameter's name: "...lora_A.default.weight", "...lora_embedding_A.default"
        self._own = re.compile(rf"(\.lora_\w+)\.{re.escape(name)}(?=\.|$)")
        self._saved = re.compile(rf"\.modules_to_save\.{re.escape(name)}(?=\.)")

    def has(self, tensor: str) -> bool:
        """Is this tensor one of the adapter's?"""
        return bool(self._own.search(tensor) or self._saved.search(tensor))

    def rename(self, tensor: str) -> str:
        """Its name in the adapter's file: without that of the adapter."""
        return self._saved.sub("", self._own.sub(r"\1", tensor))
