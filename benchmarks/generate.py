"""Tokens a second of `generate`, paged and not: a GPT-2 124M shape of transformers with random weights, float32.

    python benchmarks/generate.py [--tokens 24] [--rounds 7] [--quick] [--json FILE]

The models live in this one process and take turns; the ratio is that of the medians over all rounds, the first left
out. First with a host budget above the parameters, where they stay in memory from token to token; then with half of it,
where each token reads what is missing.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import tiermem

QUICK = {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 1024}


def tokens_per_second(model: Any, prompt: torch.Tensor, count: int) -> float:
    """How fast ``count`` tokens come after the prompt."""
    start = time.perf_counter()
    model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, min_new_tokens=count,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return count / (time.perf_counter() - start)


def measure(
    net: Any, plain: Any, budget: int, prompt: torch.Tensor, count: int, rounds: int
) -> dict[str, Any]:
    """Both in turn, with ``budget`` bytes of host memory for the paged one; bytes read are those of a token."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="tiermem-generate-") as folder:
        policy = {"device": {"kind": "cpu"}, "host": {"budget": budget}, "disk": {"paths": [folder]}}
        with tiermem.TieredModule(net, policy) as model:
            contenders = {"unpaged": plain, "paged": model}
            speeds: dict[str, list[float]] = {name: [] for name in contenders}
            before = 0
            for turn in range(rounds + 1):
                for name in sorted(contenders, reverse=turn % 2 == 0):
                    speeds[name].append(tokens_per_second(contenders[name], prompt, count))
                if turn == 0:
                    before = model.stats()["nbytes_read_from_disk"]
            read = (model.stats()["nbytes_read_from_disk"] - before) / (rounds * count)
    found: dict[str, Any] = {name: statistics.median(speed[1:]) for name, speed in speeds.items()}
    return found | {"budget": budget, "ratio": found["paged"] / found["unpaged"], "read": read}


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a small model and few tokens: does it run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    count, rounds = (4, 2) if options.quick else (options.tokens, options.rounds)
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    shape = QUICK if options.quick else {}
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    net.eval().requires_grad_(False)
    plain = copy.deepcopy(net)
    prompt = torch.randint(1, 1000, (1, 16))
    nbytes = sum(parameter.nbytes for parameter in net.parameters())
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads; "
        f"{nbytes / 2**20:,.0f} MiB of parameters"
    )
    print("  budget   unpaged     paged   ratio  read a token")
    found = []
    for budget in (2 * nbytes, nbytes // 2):
        row = measure(net, plain, budget, prompt, count, rounds)
        found.append(row)
        print(
            f"{budget / 2**20:5.0f}Mi  {row['unpaged']:6.2f}/s  {row['paged']:6.2f}/s  {row['ratio']:6.3f}  "
            f"{row['read'] / 2**20:10.1f}Mi"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
