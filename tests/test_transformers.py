"""Models of transformers compute the same bits when they are paged: every way of theirs to train and to ask."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiermem
from tests.conftest import Wrap
from tests.models import Case
from tests.parity import Outcome, adamw, assert_equal, assert_same, same, train
from tests.zoo import FAMILIES

WRITERS = [name for name, family in FAMILIES.items() if family.prompt is not None]
TIERS = pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])


def compatible(column: str) -> pytest.MarkDecorator:
    """The row of docs/compatibility.md is the family, the column this."""
    return pytest.mark.compatible("Models of transformers", "{name}", column)


def case_of(name: str, change: Callable[[Any], Any] = lambda net: None, **sizes: Any) -> Case:
    """A family as the case of a parity test; ``change`` is what is done to the model before it is wrapped."""
    family = FAMILIES[name]

    def make() -> nn.Module:
        net = family.build(**sizes)
        change(net)
        return net

    return Case(name, make, family.batch, lambda model, batch: model(**batch).loss)  # type: ignore[arg-type]


def run(case: Case, wrap: Wrap | None = None, three: bool = False, steps: int = 2) -> Outcome:
    """Train the case's model, wrapped in the smallest budget if ``wrap`` is given."""
    net = case.build()
    model = net if wrap is None else wrap(net, host="smallest", device="smallest", three=three)
    return train(model, adamw(model), case, steps=steps)


@functools.cache
def reference(name: str, attention: str = "sdpa") -> Outcome:
    """Training without paging."""
    return run(case_of(name, attention=attention))


def tensors_of(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in an output of transformers, by their place in it."""
    if isinstance(tree, Tensor):
        yield path, tree.detach()
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from tensors_of(value, f"{path}.{key}")
    elif isinstance(tree, tuple | list):
        for index, value in enumerate(tree):
            yield from tensors_of(value, f"{path}[{index}]")
    elif type(tree).__name__.endswith("Cache"):
        for each in ("self_attention_cache", "cross_attention_cache"):
            yield from tensors_of(getattr(tree, each, None), f"{path}.{each}")
        for index, layer in enumerate(getattr(tree, "layers", ())):
            yield from tensors_of((layer.keys, layer.values), f"{path}.layers[{index}]")


# -- training ------------------------------------------------------------------------------------------------


@compatible("training")
@pytest.mark.parametrize(
    ("attention", "three"), [("sdpa", False), ("eager", True)], ids=["sdpa-cpu", "eager-three-tiers"]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_training(name: str, attention: str, three: bool, wrap: Wrap) -> None:
    assert_equal(reference(name, attention), run(case_of(name, attention=attention), wrap, three))


@compatible("gradient checkpointing")
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_checkpointing(name: str, reentrant: bool, wrap: Wrap) -> None:
    def change(net: Any) -> None:
        net.gradient_checkpointing_enable({"use_reentrant": reentrant})

    case = case_of(name, change)
    # The tiers alternate: each way of checkpointing meets both somewhere.
    three = reentrant != (list(FAMILIES).index(name) % 2 == 0)
    assert_equal(run(case, steps=1), run(case, wrap, three, steps=1))


@TIERS
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_tied_weights(name: str, tied: bool, three: bool, wrap: Wrap) -> None:
    case = case_of(name, tie_word_embeddings=tied)
    net = case.build()
    model = wrap(net, host="smallest", device="smallest", three=three)
    found = train(model, adamw(model), case, steps=2)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert_equal(run(case), found)


# -- asking --------------------------------------------------------------------------------------------------


@compatible("outputs, hidden states, attention")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_everything_that_a_forward_returns(name: str, attention: str, wrap: Wrap) -> None:
    torch.manual_seed(1)
    batch = FAMILIES[name].batch()
    asked = {"output_hidden_states": True, "output_attentions": attention == "eager"}
    answers = []
    for paged in (False, True):
        net = FAMILIES[name].build(attention=attention).eval()
        model = wrap(net, host="smallest", device="smallest", three=attention == "eager") if paged else net
        with torch.no_grad():
            found = dict(tensors_of(model(**batch, **asked), "no_grad"))
        with torch.inference_mode():
            found.update(
                (key, value.clone()) for key, value in tensors_of(model(**batch, **asked), "inference")
            )
        found.update(tensors_of(model(**batch, **asked), "grad"))
        answers.append(found)
    assert any("hidden_states" in key for key in answers[0])
    assert_same(name, *answers)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", WRITERS)
@compatible("generate, dynamic and static cache")
def test_generate(name: str, cache: str, wrap: Wrap) -> None:
    torch.manual_seed(1)
    prompt = FAMILIES[name].prompt()  # type: ignore[misc]
    how: dict[str, Any] = {
        "max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True,
        "cache_implementation": cache if cache == "static" else None,
    }  # fmt: skip
    answers = []
    for tiers in (None, False, True):
        routed = {"output_router_logits": False} if name == "Mixtral" else {}  # generate fails on them itself
        net: Any = FAMILIES[name].build(**routed).eval()
        model = net if tiers is None else wrap(net, host="smallest", device="smallest", three=tiers)
        found = {}
        for sample in (False, True):
            torch.manual_seed(2)
            found.update(tensors_of(model.generate(**prompt, **how, do_sample=sample), f"sampled {sample}"))
        answers.append(found)
        if tiers is not None:
            model._runtime.check()
    for each in answers[1:]:
        assert_same(name, answers[0], each)


@pytest.mark.parametrize("name", ["GPT-2", "T5"])
def test_beam_search(name: str, wrap: Wrap) -> None:
    torch.manual_seed(1)
    prompt = FAMILIES[name].prompt()  # type: ignore[misc]
    net: Any = FAMILIES[name].build().eval()
    expected = net.generate(**prompt, num_beams=3, max_new_tokens=5)
    model = wrap(net, host="smallest")
    assert same(expected, model.generate(**prompt, num_beams=3, max_new_tokens=5))


def test_training_after_generate_and_generate_between_steps(wrap: Wrap) -> None:
    torch.manual_seed(1)
    prompt = FAMILIES["Llama"].prompt()  # type: ignore[misc]
    case, ends, texts = case_of("Llama"), [], []
    for paged in (False, True):
        net = case.build()
        model: Any = wrap(net, host="smallest") if paged else net
        told: list[Tensor] = []

        def ask(step: int, model: Any = model, told: list[Tensor] = told) -> None:
            model.eval()
            told.append(model.generate(**prompt, max_new_tokens=4, do_sample=False))
            model.train()

        ends.append(train(model, adamw(model), case, steps=4, after=ask))
        texts.append(torch.cat(told))
    assert_equal(*ends)
    assert same(*texts)
    assert model.stats()["departures"] == 0  # questions have a schedule of their own


# -- saving, loading, changing -------------------------------------------------------------------------------


@compatible("save and load")
@pytest.mark.parametrize("name", FAMILIES)
def test_save_pretrained_and_from_pretrained(name: str, wrap: Wrap, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    case = case_of(name)
    files = []
    for paged in (False, True):
        net = case.build()
        model: Any = wrap(net, host="smallest") if paged else net
        train(model, adamw(model), case, steps=1)
        folder = tmp_path / str(paged)
        model.save_pretrained(folder)
        files.append({path.name: load_file(path) for path in folder.glob("*.safetensors")})
        assert files[-1]
    assert_same(name, *files)
    again = type(net).from_pretrained(folder).train()
    assert_same(name, net.state_dict(), again.state_dict())
    fresh = wrap(again, host="smallest", three=True)
    plain = type(net).from_pretrained(tmp_path / "False").train()
    assert_equal(*(train(each, adamw(each), case, steps=1) for each in (plain, fresh)))


@compatible("resized embeddings")
@pytest.mark.parametrize("name", [name for name in WRITERS if name != "Whisper"])
def test_resized_embeddings(name: str, wrap: Wrap) -> None:
    def change(net: Any) -> None:
        torch.manual_seed(5)
        net.resize_token_embeddings(110)

    case = case_of(name, change)
    assert_equal(run(case, steps=1), run(case, wrap, steps=1))


def test_embeddings_resized_while_paged(wrap: Wrap) -> None:
    case = case_of("Llama")
    ends = []
    for paged in (False, True):
        net: Any = case.build()
        model: Any = wrap(net, host="smallest") if paged else net
        train(model, adamw(model), case, steps=1)
        if paged:
            with pytest.raises(tiermem.PagingError, match=r"model\.embed_tokens\.weight.*close"):
                model.resize_token_embeddings(110)
            assert_same("state", net.state_dict(), dict(model.state_dict()))
            model.close()
        torch.manual_seed(5)
        net.resize_token_embeddings(110)
        model = wrap(net, host="smallest") if paged else net
        ends.append(train(model, adamw(model), case, steps=1))
    assert_equal(*ends)
