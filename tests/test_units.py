"""Which modules become units, and that any choice of them computes the same."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

import tiermem
from tests.conftest import Wrap
from tests.models import BY_NAME, CASES, GPT, Albert, Block, ConvNet
from tests.parity import adamw, assert_equal, build, reference, train
from tiermem.cutting import find_units
from tiermem.pageable import is_dense

ROOMY = 1 << 30


class Transformer(nn.Module):
    """Names and nesting as Hugging Face has them."""

    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(67, dim),
                "wpe": nn.Embedding(16, dim),
                "h": nn.ModuleList(Block(dim) for _ in range(4)),
                "ln_f": nn.LayerNorm(dim),
            }
        )
        self.lm_head = nn.Linear(dim, 67, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight


def test_blocks_embeddings_and_heads_are_units() -> None:
    assert list(find_units(GPT(vocabulary=500), (), ROOMY)) == ["wte", "wpe", "h.0", "h.1", "h.2", "head"]


def test_nesting_as_hugging_face_has_it() -> None:
    names = [f"transformer.{name}" for name in ("wte", "wpe", "h.0", "h.1", "h.2", "h.3")]
    assert list(find_units(Transformer(), (), ROOMY)) == [*names, "lm_head"]


def test_a_block_too_large_for_the_budget_is_looked_into() -> None:
    found = list(find_units(GPT(vocabulary=500), (), 40_000))
    assert "h.0" not in found
    assert {"h.0.attention.qkv", "h.0.mlp.0", "h.0.mlp.2"} <= set(found)


def test_layers_of_a_conv_net() -> None:
    assert set(find_units(ConvNet(), (), ROOMY)) >= {"body.3", "body.6"}


def test_a_module_that_is_used_twice_is_one_unit() -> None:
    net = Albert()
    net.again = net.block
    assert len([m for m in find_units(net, (), ROOMY).values() if m is net.block]) <= 1


@pytest.mark.parametrize("net", [nn.Linear(30, 40), nn.Sequential(nn.Linear(30, 40)), nn.LayerNorm(30)])
@pytest.mark.parametrize("host", ["smallest", "1GiB"])
def test_models_of_one_layer_work(net: nn.Module, host: str, wrap: Wrap) -> None:
    model = wrap(copy.deepcopy(net), host=host)
    optimizer = adamw(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(0)
    model(torch.randn(2, 30)).pow(3).sum().backward()
    optimizer.step()
    model._runtime.check()
    assert all(not torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_model_without_parameters_and_one_all_frozen(wrap: Wrap) -> None:
    assert wrap(nn.ReLU())(torch.ones(2)).sum() == 2
    net = build(BY_NAME["gpt"]).requires_grad_(False)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    expected = net(tokens)
    assert torch.equal(wrap(net, host="smallest")(tokens), expected)


def test_many_small_tensors_are_together_in_the_resident_unit(wrap: Wrap) -> None:
    net = nn.Sequential(*(nn.LayerNorm(8) for _ in range(40)))
    model = wrap(net)
    model(torch.ones(2, 8)).sum().backward()
    assert model.units[0] == "(resident)"
    adamw(model).step()
    model._runtime.check()


def test_patterns_name_levels() -> None:
    net = GPT()
    assert list(find_units(net, ("h.*",), ROOMY)) == ["h.0", "h.1", "h.2"]
    assert list(find_units(net, ("h.[01].mlp", "head"), ROOMY)) == ["h.0.mlp", "h.1.mlp", "head"]
    assert "h.0.mlp" not in find_units(net, ("*",), ROOMY)


def test_a_pattern_that_matches_nothing_is_refused(wrap: Wrap) -> None:
    with pytest.raises(tiermem.ConfigError, match=r"blocks\.\*.*match no module"):
        wrap(GPT(), policy={"units": ["h.*", "blocks.*"]})


NESTED = {
    "inner in outer": ["h.*", "h.*.mlp", "h.*.attention.qkv"],
    "three deep": ["h", "h.*", "h.*.mlp", "h.*.mlp.*", "head"],
    "everything": ["*", "*.*", "*.*.*", "*.*.*.*"],
    "only the head": ["head"],
}


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
@pytest.mark.parametrize("patterns", NESTED)
@pytest.mark.parametrize("name", ["gpt-tied", "gpt-dropout"])
def test_any_choice_of_units_computes_the_same(name: str, patterns: str, three: bool, wrap: Wrap) -> None:
    case = BY_NAME[name]
    policy = {"units": NESTED[patterns]}
    model = wrap(build(case), host="smallest", device="smallest", three=three, policy=policy)
    assert_equal(reference(name), train(model, adamw(model), case))


def test_a_unit_without_parameters_and_a_list_as_unit(wrap: Wrap) -> None:
    class Silent(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    net = nn.Sequential(nn.Linear(5, 5), Silent(), nn.Linear(5, 5))
    x = torch.ones(2, 5)
    expected = net(x)
    model = wrap(net, policy={"units": ["1", "2"]})
    assert torch.equal(model(x), expected)
    model(x).sum().backward()
    model._runtime.check()


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_the_smallest_budget_that_a_refusal_names_is_accepted(
    name: str, dtype: torch.dtype, three: bool, wrap: Wrap
) -> None:
    wrap(build(BY_NAME[name], dtype), host="smallest", device="smallest", three=three)


def test_dense_is_what_torch_calls_dense() -> None:
    for own in itertools.product(range(4), repeat=3):
        for order in itertools.permutations(range(3)):
            tensor = torch.empty([own[i] for i in order]).permute([order.index(i) for i in range(3)])
            for each in (
                tensor,
                tensor[..., ::2],
                tensor[:1],
                tensor[:, :, :1],
                tensor.unsqueeze(0).expand(2, -1, -1, -1),
            ):
                expected = torch.empty_like(each).stride() == each.stride()
                assert is_dense(each.shape, each.stride()) == expected, (each.shape, each.stride())
