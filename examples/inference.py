"""A model larger than its budget answers: forward under no_grad, page by page.

Parameters of 13 MB in 4 MB of memory. The text that it writes is noise, since nobody trained it: what counts is that
its answers equal those of the module that isn't paged. Run: python examples/inference.py
"""

import tempfile

import torch
from torch import Tensor, nn

import tiermem
from tiermem.trainer.gpt import GPT, GPTShape

SHAPE = GPTShape(sequence=64, layers=4, width=256, heads=4)


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, count: int) -> bytes:
    """The prompt with ``count`` likeliest bytes after it."""
    tokens = torch.tensor([list(prompt)])
    for _ in range(count):
        logits: Tensor = model(tokens[:, -SHAPE.sequence :])
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return bytes(tokens[0].tolist())


def main() -> None:
    """Answer with and without paging, and compare."""
    torch.manual_seed(0)
    net = GPT(SHAPE).eval()
    expected = generate(net, b"def main(", 16)
    with tempfile.TemporaryDirectory(dir=".", prefix=".inference-") as folder:
        # Frozen parameters get no pages for gradients and moments.
        net.requires_grad_(False)
        policy = {"device": {"kind": "cpu"}, "host": {"budget": "4MiB"}, "disk": {"paths": [folder]}}
        with tiermem.TieredModule(net, policy) as model:
            answer = generate(model, b"def main(", 16)
            stats = model.stats()
    print(f"answer: {answer!r}")
    print(f"the same as without paging: {answer == expected}")
    print(
        f"parameters {stats['state_nbytes']:,} B, at most {stats['tiers']['host']['peak']:,} B in memory; "
        f"{stats['nbytes_read_from_disk']:,} B read from disk"
    )


if __name__ == "__main__":
    main()
