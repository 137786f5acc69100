"""Models of transformers, random and small: how to build, feed and ask them.

transformers is imported when a family is first built, so that collecting the tests costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

VOCABULARY = 96
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**DECODER, "num_key_value_heads": 2}


class Family(NamedTuple):
    """One architecture: ``head`` is the class of the model, ``sizes`` are what its config is given.

    ``batch`` makes what training feeds it, ``prompt`` what ``generate`` is given (None where it doesn't generate).
    """

    name: str
    config: str
    head: str
    sizes: dict[str, Any]
    batch: Callable[[], dict[str, Tensor]]
    prompt: Callable[[], dict[str, Tensor]] | None

    def build(self, attention: str = "sdpa", **more: Any) -> nn.Module:
        """The model in training mode, the same at every call."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**{**self.sizes, **more})
        config._attn_implementation = attention
        model: nn.Module = getattr(transformers, self.head)(config)
        return model.train()


def _ids(length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, length))


def _text() -> dict[str, Tensor]:
    ids = _ids(12)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _prompt() -> dict[str, Tensor]:
    ids = _ids(7)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _pairs() -> dict[str, Tensor]:
    return {"input_ids": _ids(9), "labels": _ids(6)}


def _images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.randint(0, 5, (2,))}


def _sounds() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 32), "labels": _ids(6)}


def _sound() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 32)}


WHISPER = {
    "vocab_size": VOCABULARY,
    "num_mel_bins": 8,
    "d_model": 32,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
} | {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in
     {"layers": 2, "attention_heads": 2, "ffn_dim": 64}.items()}  # fmt: skip

FAMILIES = {
    family.name: family
    for family in (
        Family(
            "GPT-2",
            "GPT2Config",
            "GPT2LMHeadModel",
            {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, **TOKENS},
            _text,
            _prompt,
        ),
        Family("Llama", "LlamaConfig", "LlamaForCausalLM", {**GROUPED, **TOKENS}, _text, _prompt),
        Family("Qwen 2", "Qwen2Config", "Qwen2ForCausalLM", {**GROUPED, **TOKENS}, _text, _prompt),
        Family("Qwen 3", "Qwen3Config", "Qwen3ForCausalLM", {**GROUPED, "head_dim": 8, **TOKENS}, _text, _prompt),
        Family(
            "Mistral", "MistralConfig", "MistralForCausalLM",
            {**GROUPED, "sliding_window": 8, **TOKENS}, _text, _prompt,
        ),
        Family("Gemma", "GemmaConfig", "GemmaForCausalLM", {**GROUPED, "head_dim": 8, **TOKENS}, _text, _prompt),
        Family(
            "Mixtral", "MixtralConfig", "MixtralForCausalLM",
            {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, **TOKENS},
            _text, _prompt,
        ),
        Family("BERT", "BertConfig", "BertForMaskedLM", {**DECODER, "pad_token_id": 0}, _text, None),
        Family(
            "T5", "T5Config", "T5ForConditionalGeneration",
            {
                "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 80, "num_layers": 2, "num_heads": 4,
                "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2,
            },
            _pairs, _prompt,
        ),
        Family(
            "ViT", "ViTConfig", "ViTForImageClassification",
            {
                "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
                "image_size": 16, "patch_size": 4, "num_labels": 5,
            },
            _images, None,
        ),
        Family("Whisper", "WhisperConfig", "WhisperForConditionalGeneration", {**WHISPER, **TOKENS}, _sounds, _sound),
    )
}  # fmt: skip
