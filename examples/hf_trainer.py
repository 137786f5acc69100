"""The Trainer of transformers fine-tunes LoRA adapters on a paged base: one class and one argument more.

The base's parameters are read from disk and never written back; the adapters are saved alone.
Needs: pip install "tiermem[hf]". Run: python examples/hf_trainer.py
"""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from tiermem.integrations.transformers import PagedTrainer


def main() -> None:
    """Train, and print the loss and what is saved."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4
        )
    )
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))
    rows = [torch.tensor(list(__doc__.encode()[start : start + 64])) for start in range(0, 200, 8)]
    with tempfile.TemporaryDirectory(dir=".", prefix=".hf-trainer-") as folder:
        arguments = TrainingArguments(
            f"{folder}/out", max_steps=12, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        policy = {"device": {"kind": "cpu"}, "host": {"budget": "2MiB"}, "disk": {"paths": [folder]}}
        dataset = [{"input_ids": row, "labels": row} for row in rows]
        with PagedTrainer(model=model, args=arguments, train_dataset=dataset, policy=policy) as trainer:
            before = trainer.evaluate(dataset[:4])["eval_loss"]
            trainer.train()
            after = trainer.evaluate(dataset[:4])["eval_loss"]
            trainer.save_model(f"{folder}/adapter")
        saved = (Path(folder) / "adapter" / "adapter_model.safetensors").stat().st_size
    whole = sum(parameter.nbytes for parameter in model.parameters())
    print(f"loss {before:.3f} before, {after:.3f} after")
    print(f"adapters of {saved:,} B saved, of a model of {whole:,} B, paged in 2 MiB")


if __name__ == "__main__":
    main()
