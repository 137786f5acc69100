"""Parameters that the budget doesn't hold whole: computed by tiles, and one parameter to everybody."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiermem
from tests.conftest import Wrap
from tests.models import Case
from tests.parity import adamw, assert_equal, assert_same, build, refused, same, snapshot, train
from tiermem.products import accumulate, rows_of, step_of
from tiermem.trainer import AdamW, paged

STEP = rows_of(torch.float32)
ROWS = 5 * STEP + 40
WIDTH = 40 * 192 // max(STEP, 192)  # the same bytes wherever it runs
BUDGET = "176KiB"  # the table alone takes 156, and its gradient as much
HOSTS = {
    False: BUDGET,
    True: "384KiB",
}  # below a device of its own, what has changed there needs room on its way


class Net(nn.Module):
    """Looks rows up in a large table, and ends in a product with a large table: another one, or the same."""

    def __init__(self, *, tied: bool = False, bias: bool = True, saving: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, padding_idx=3)
        self.mid = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, ROWS, bias=bias)
        self.saving = saving
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for each in self.mid:
            x = checkpoint(each, x, use_reentrant=False) if self.saving else each(x)
        return checkpoint(self.head, x, use_reentrant=False) if self.saving else self.head(x)


def batch() -> Sequence[Tensor]:
    """Tokens of the first and the last rows only, some of them twice, and the one that is padding."""
    tokens = torch.cat([torch.randint(0, 150, (2, 6)), torch.randint(ROWS - 150, ROWS, (2, 6))], 1)
    tokens[0, 0] = 3
    return tokens, torch.randint(0, ROWS, (2, 12))


def loss(model: nn.Module, given: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(given[0]).flatten(0, 1).float(), given[1].flatten())


def case(make: Callable[[], nn.Module] = Net) -> Case:
    return Case("tiles", make, batch, loss)


def exact() -> bool:
    """Is there a step by which this machine's products come out equal, tile by tile?"""
    return step_of(torch.float32) is not None


# -- the numbers ----------------------------------------------------------------------------------------------


@pytest.mark.compatible(
    "Parameters in tiles", "weights of Linear and Embedding, float32, where products can be made in steps", ""
)
@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
@pytest.mark.parametrize("kind", ["separate", "tied", "checkpoint", "frozen"])
def test_training_is_that_of_the_model_in_one_piece(kind: str, three: bool, wrap: Wrap) -> None:
    def make() -> nn.Module:
        net = Net(tied=kind == "tied", bias=kind != "tied", saving=kind == "checkpoint")
        net.head.weight.requires_grad_(kind != "frozen")
        return net

    plain = build(case(make))
    expected = train(plain, adamw(plain), case(make), steps=3)
    model = wrap(build(case(make)), host=HOSTS[three], device=BUDGET, three=three)
    found = train(model, adamw(model), case(make), steps=3)
    stats = model.stats()
    assert min(stats["tiles"].values()) > 1
    assert set(stats["tiles"]) == ({"table.weight"} if kind == "tied" else {"table.weight", "head.weight"})
    assert all(tier["peak"] <= tier["budget"] for name, tier in stats["tiers"].items() if name != "disk")
    if exact():
        assert_equal(expected, found)
    else:
        for a, b in zip(expected.losses, found.losses, strict=True):
            assert torch.allclose(a, b, rtol=1e-5)


def test_a_product_in_tiles_has_the_bits_of_the_product() -> None:
    left, right = torch.randn(37, 7 * STEP + 11), torch.randn(7 * STEP + 11, 48)
    total = None
    for low, high in ((0, 2 * STEP), (2 * STEP, 5 * STEP), (5 * STEP, len(right))):
        total = accumulate(total, left[:, low:high], right[low:high])
    assert total is not None
    whole = left @ right
    assert torch.equal(total, whole) if exact() else torch.allclose(total, whole, rtol=1e-5, atol=1e-4)


@pytest.mark.compatible(
    "Parameters in tiles", "the same in bfloat16, but for the gradient of a Linear's input", ""
)
@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
def test_half_precision_is_equal_but_for_the_input_s_gradient(three: bool, wrap: Wrap) -> None:
    plain = build(case(), torch.bfloat16)
    model = wrap(build(case(), torch.bfloat16), host="192KiB", device="96KiB", three=three)
    assert model.stats()["tiles"]
    given = batch()
    for each in (plain, model):
        loss(each, given).backward()
    assert same(plain(given[0]), model(given[0]))
    assert same(plain.head.weight.grad, model.head.weight.grad.clone())
    # Half-precision sums are rounded once in one piece, and once a tile here.
    a, b = plain.table.weight.grad.float(), model.table.weight.grad.clone().float()
    assert (a - b).abs().max() <= 2**-7 * a.abs().max()
    assert torch.equal(a.any(1), b.any(1))


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
def test_inference_and_autocast(three: bool, wrap: Wrap) -> None:
    plain, model = build(case()), wrap(build(case()), host=HOSTS[three], device=BUDGET, three=three)
    given = batch()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert same(plain(given[0]), model(given[0]))
            assert same(plain(given[0][:1, :1]), model(given[0][:1, :1]))
    ends = []
    for each in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(each, given)
        value.backward()
        ends.append((value.detach(), each.head.weight.grad.clone(), each.head.bias.grad.clone()))
    assert all(same(a, b) for a, b in zip(*ends, strict=True))


# -- by need ----------------------------------------------------------------------------------------------------


def faulted(model: tiermem.TieredModule, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the tiles whose parameters are asked for from here on."""
    asked: set[str] = set()
    pager = model._runtime.pager
    fault = pager.fault

    def spy(pages: Any, *args: Any, **kwargs: Any) -> None:
        pages = list(pages)
        asked.update(model.units[page.unit] for page in pages if page.kind.name == "PARAMETER")
        fault(pages, *args, **kwargs)

    monkeypatch.setattr(pager, "fault", spy)
    return asked


def test_an_embedding_fetches_the_rows_that_are_looked_up(
    wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrap(build(case()), host=BUDGET)
    tiles = [name for name in model.units if name.startswith("table.weight")]
    asked = faulted(model, monkeypatch)
    rows = model.table(torch.tensor([[0, 5, ROWS - 1]]))
    rows.sum().backward()
    assert {name for name in asked if name.startswith("table.weight")} == {tiles[0], tiles[-1]}
    # The others have gradients all the same, of zeros, and moments and weights that move as they do in one piece.
    before = model.state_dict()["table.weight"]
    adamw(model).step()
    assert not torch.equal(before[ROWS // 2], model.state_dict()["table.weight"][ROWS // 2])
    with pytest.raises(IndexError, match="out of range"):
        model.table(torch.tensor([ROWS]))


# -- one parameter to everybody ------------------------------------------------------------------------------------


def test_it_is_one_parameter(wrap: Wrap) -> None:
    net = build(case(lambda: Net(tied=True, bias=False)))
    values = net.table.weight.detach().clone()
    model = wrap(net, host=BUDGET)
    weight = model.table.weight
    assert weight is model.head.weight
    assert isinstance(weight, nn.Parameter)
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in Net(tied=True, bias=False).named_parameters()
    ]
    assert weight.shape == (ROWS, WIDTH)
    assert weight.stride() == (WIDTH, 1)
    assert weight.is_contiguous()
    assert torch.equal(weight, values)
    state = model.state_dict()
    assert state["table.weight"] is state["head.weight"]
    assert same(state["table.weight"], values)
    assert same(copy.deepcopy(weight).detach(), values)
    assert weight.grad is None
    with torch.no_grad():
        assert torch.equal(weight[5], values[5])
        assert float(weight.norm()) == float(values.norm())
        weight.mul_(2)
        assert torch.equal(weight, values * 2)
        weight.data.copy_(values)
        assert torch.equal(weight.data, values)
        nn.init.zeros_(weight)
        assert not weight.any()
    weight.data = values + 1
    assert torch.equal(weight, values + 1)
    model.load_state_dict({**state, "table.weight": values, "head.weight": values})
    assert same(model.state_dict()["head.weight"], values)
    model.head.weight = model.table.weight  # as transformers ties them


@pytest.mark.compatible("Parameters in tiles", "other functions of the weight, with autograd", "", "refused")
def test_what_would_be_lost_or_wrong_is_refused(wrap: Wrap) -> None:
    model = wrap(build(case()), host=BUDGET)
    weight = model.table.weight
    with (
        torch.no_grad(),
        pytest.raises(tiermem.PagingError, match=r"table\.weight is in tiles.*view of a copy"),
    ):
        weight[3].fill_(0)
    with torch.no_grad(), pytest.raises(tiermem.PagingError, match="view of a copy"):
        weight.t()[:, 3].mul_(2)
    with pytest.raises(tiermem.PagingError, match=r"table\.weight is in tiles.*autograd can follow it"):
        (weight * weight).sum()
    with pytest.raises(tiermem.PagingError, match="autograd can follow it"):
        torch.linalg.vector_norm(weight)
    with pytest.raises(tiermem.PagingError, match="autograd can follow it"):
        torch.randn(3, WIDTH) @ weight.t()
    with pytest.raises(tiermem.PagingError, match="max_norm or sparse"):
        F.embedding(torch.tensor([1]), weight, sparse=True)
    with pytest.raises(tiermem.PagingError, match="keeps its shape"):
        weight.data = torch.zeros(3)
    with pytest.raises(tiermem.PagingError, match="assigned a gradient"):
        weight.grad = torch.zeros(3)
    output = model(batch()[0]).sum()
    with torch.no_grad():
        model.head.weight.mul_(1.5)
    with pytest.raises(tiermem.PagingError, match="modified since forward"):
        output.backward()


def test_gradients(wrap: Wrap) -> None:
    plain, model = build(case()), wrap(build(case()), host=BUDGET)
    given = batch()
    for each in (plain, model):
        loss(each, given).backward()
    a, b = plain.head.weight, model.head.weight
    assert b.grad.shape == a.grad.shape
    assert torch.equal(a.grad, b.grad)
    for each in (plain, model):
        each.head.weight.grad.mul_(0.5)
        torch.nn.utils.clip_grad_norm_(each.parameters(), 1e-2)
    assert torch.equal(a.grad, b.grad)
    for each in (plain, model):
        each.head.weight.grad = torch.full((ROWS, WIDTH), 0.25)
        adamw(each).step()
    assert torch.equal(a, b)
    b.grad = None
    assert b.grad is None


@pytest.mark.compatible("Parameters in tiles", "F.linear and F.embedding with the weight, from anywhere", "")
def test_functions_from_anywhere(wrap: Wrap) -> None:
    class Outside(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            return F.linear(F.embedding(tokens, self.table.weight), self.head.weight, self.head.bias) * 2

    plain = build(case(Outside))
    model = wrap(build(case(Outside)), host=BUDGET)
    expected, found = (train(each, adamw(each), case(Outside), steps=2) for each in (plain, model))
    assert model.stats()["tiles"]
    if exact():
        assert_equal(expected, found)


@pytest.mark.compatible("Parameters in tiles", "model.compile() and torch.compile(model)", "")
@pytest.mark.parametrize("way", ["within units", "from outside"])
def test_compiled(way: str, wrap: Wrap) -> None:
    plain, net = (build(case(lambda: Net(tied=True, bias=False))) for _ in range(2))
    model = wrap(net, host=BUDGET)
    given = batch()
    if way == "within units":
        model.compile(backend="eager")
    compiled: Any = model if way == "within units" else torch.compile(model, backend="eager")
    assert same(compiled(given[0]), plain(given[0]))
    for each in (plain, compiled):
        loss(each, given).backward()
    if exact():
        assert torch.equal(model.table.weight.grad, plain.table.weight.grad)
    model.close()
    assert "forward" not in vars(net.head)


@pytest.mark.parametrize("trained", [False, True])
def test_close_gives_the_parameter_back(trained: bool, wrap: Wrap) -> None:
    plain, net = (build(case(lambda: Net(tied=True, bias=False))) for _ in range(2))
    model = wrap(net, host=BUDGET)
    given = batch()
    if trained:
        for each in (plain, model):
            loss(each, given).backward()
    model.close()
    assert type(net.table.weight) is nn.Parameter
    assert net.head.weight is net.table.weight
    assert torch.equal(net.table.weight, plain.table.weight)
    assert net.table.weight.is_contiguous()
    if trained and exact():
        assert torch.equal(net.table.weight.grad, plain.table.weight.grad)
    assert torch.equal(net(given[0]), plain(given[0]))
    again = wrap(net, host=BUDGET)
    assert torch.equal(again.state_dict()["table.weight"], plain.table.weight)


# -- optimizers and checkpoints ----------------------------------------------------------------------------------


def test_the_optimizer_s_state_is_that_of_one_parameter(wrap: Wrap) -> None:
    plain, model = build(case()), wrap(build(case()), host=BUDGET)
    ours, theirs = adamw(model), AdamW(plain.parameters(), lr=3e-3, weight_decay=0.1)
    given = batch()
    for each, optimizer in ((plain, theirs), (model, ours)):
        loss(each, given).backward()
        optimizer.step()
        optimizer.zero_grad()
    if exact():
        assert_same("state", snapshot(theirs), snapshot(ours))
    other = build(case())
    third = AdamW(other.parameters(), lr=1.0)
    third.load_state_dict(ours.state_dict())
    assert_same("loaded by a plain one", snapshot(ours), snapshot(third))
    second = wrap(build(case()), host=BUDGET)
    fourth = adamw(second)
    fourth.load_state_dict(third.state_dict())
    assert_same("loaded by a paged one", snapshot(third), snapshot(fourth))


def test_optimizers_of_other_classes(wrap: Wrap) -> None:
    plain, model = build(case()), wrap(build(case()), host=BUDGET)
    settings = {"lr": 0.1, "momentum": 0.9}
    expected = train(plain, torch.optim.SGD(plain.parameters(), **settings), case(), steps=2)
    found = train(model, paged(torch.optim.SGD, model.parameters(), **settings), case(), steps=2)
    if exact():
        assert_equal(expected, found)
    with pytest.raises(ValueError, match=r"a tile at a time, .*raise host\.budget"):
        paged(torch.optim.Adafactor, model.parameters())


def test_during_backward(wrap: Wrap) -> None:
    plain, model = build(case()), wrap(build(case()), host=BUDGET)
    expected = train(plain, adamw(plain), case(), steps=2, accumulation=1, clip=None)
    optimizer = adamw(model, during_backward=True)
    found = train(model, optimizer, case(), steps=2, accumulation=1, clip=None)
    if exact():
        assert_equal(expected, found)
    other = wrap(build(case()), host=BUDGET)
    with pytest.raises(ValueError, match=r"tiles, .*raise host\.budget so that it fits in one piece"):
        adamw(other, delayed=True)


@pytest.mark.compatible("Parameters in tiles", "checkpoints, to and from a model in one piece", "")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_checkpoints_between_pieces_and_tiles(dtype: torch.dtype, wrap: Wrap, tmp_path: Path) -> None:
    tiles = wrap(build(case(), dtype), host=BUDGET)
    assert tiles.stats()["tiles"]
    first = adamw(tiles)
    train(tiles, first, case(), steps=2)
    tiles.save(tmp_path / "tiles", first)
    whole = wrap(build(case(), dtype, seed=5), host="1GiB")
    second = adamw(whole)
    whole.load(tmp_path / "tiles", second)
    assert_same("state", tiles.state_dict(), whole.state_dict())
    assert_same("optimizer", snapshot(first), snapshot(second))
    whole.save(tmp_path / "whole", second)
    again = wrap(build(case(), dtype, seed=6), host=BUDGET)
    third = adamw(again)
    again.load(tmp_path / "whole", third)
    again.save(
        tmp_path / "again", third
    )  # none of the files of what was loaded is shared, since tiles write parts
    assert_same("state", tiles.state_dict(), again.state_dict())
    assert_same("optimizer", snapshot(first), snapshot(third))
    whole.load(tmp_path / "whole", second)
    assert_same("untouched", tiles.state_dict(), whole.state_dict())
    with pytest.raises(tiermem.CheckpointError, match=r"head\.weight is in tiles.*without compression"):
        tiles.save(tmp_path / "zstd", compression="zstd")


# -- born deferred, and refusals -----------------------------------------------------------------------------------


def test_deferred_and_pretrained(wrap: Wrap, disk: Path, tmp_path: Path) -> None:
    plain = build(case())
    config = {"disk": {"paths": [str(disk)]}, "host": {"budget": BUDGET}}
    torch.manual_seed(0)
    with tiermem.deferred_init(config):
        net = Net()
    model = wrap(net, host=BUDGET)
    assert model.stats()["tiles"]
    assert_same("state", plain.state_dict(), model.state_dict())
    from safetensors.torch import save_file

    save_file(dict(plain.state_dict()), tmp_path / "model.safetensors")
    with tiermem.from_pretrained(tmp_path, config, build=Net) as loaded:
        assert loaded.stats()["tiles"]
        assert_same("state", plain.state_dict(), loaded.state_dict())
        loaded.close(restore=False)


@pytest.mark.compatible("Parameters in tiles", "parameters of other modules; durable runs", "", "refused")
def test_what_can_t_be_tiled_is_refused_by_name(disk: Path) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(ROWS, WIDTH)
            self.scan = nn.Conv1d(WIDTH, 1000, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.scan(self.table(tokens).transpose(1, 2))

    net = Wide()
    values = net.table.weight.detach().clone()
    with pytest.raises(tiermem.BudgetError, match=r"in tiles, (backward|update) of scan needs") as caught:
        tiermem.TieredModule(net, {"disk": {"paths": [str(disk)]}, "host": {"budget": BUDGET}})
    assert caught.value.smallest is not None
    assert torch.equal(net.table.weight, values)
    for section in ({"durability": {"mode": "step"}},):
        with pytest.raises(tiermem.BudgetError):
            tiermem.TieredModule(
                Net(), {"disk": {"paths": [str(disk)]}, "host": {"budget": BUDGET}, **section}
            )
    assert refused(Net(), {"disk": {"paths": [str(disk)]}, "host": {}}, "host", False) > 256 << 10
    max_norm = nn.Sequential(nn.Embedding(ROWS, WIDTH, max_norm=1.0))
    with pytest.raises(tiermem.BudgetError, match="of 0 needs"):
        tiermem.TieredModule(max_norm, {"disk": {"paths": [str(disk)]}, "host": {"budget": BUDGET}})
