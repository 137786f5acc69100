"""Autograd's corners: whatever a model does with its weights, and whoever calls it, paging changes no bit."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tiermem
from tests.conftest import Wrap
from tests.models import BY_NAME, GPT, Block, Case
from tests.parity import adamw, assert_equal, assert_same, build, same, train

GPT_CASE = BY_NAME["gpt"]
TIERS = pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])


def compatible(what: str, result: str = "equal") -> pytest.MarkDecorator:
    """A row of docs/compatibility.md."""
    return pytest.mark.compatible("Autograd", what, "", result)


def both(case: Case, wrap: Wrap, three: bool, steps: int = 3) -> None:
    """Train the case twice, plain and in the smallest budget, and compare."""
    model = wrap(build(case), host="smallest", device="smallest", three=three)
    plain = build(case)
    assert_equal(train(plain, adamw(plain), case, steps=steps), train(model, adamw(model), case, steps=steps))


# -- functions that keep weights -----------------------------------------------------------------------------


class Kept(torch.autograd.Function):
    """A linear layer that keeps its weight as ``how`` says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: str) -> Tensor:
        ctx.how = how
        if how == "saved":
            ctx.save_for_backward(x, weight)
        elif how == "saved transposed":
            ctx.save_for_backward(x, weight.t())
        else:
            ctx.kept = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.kept if ctx.how == "attribute" else ctx.saved_tensors
        if ctx.how == "saved transposed":
            weight = weight.t()
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2), None


@compatible("custom autograd.Function that keeps weights, saved or as attributes of its own")
@TIERS
@pytest.mark.parametrize("how", ["saved", "saved transposed", "attribute"])
def test_a_function_that_keeps_its_weight(how: str, three: bool, wrap: Wrap) -> None:
    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Kept.apply(x, self.weight, how) + self.bias

    def make() -> nn.Module:
        net = GPT()
        for block in net.h:
            block.mlp[0] = Layer(48, 192)
            block.mlp[2] = Layer(192, 48)
        return net

    both(GPT_CASE._replace(build=make), wrap, three)


class Position(nn.Module):
    """Returns a view of its weight, as position embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 48))

    def forward(self, length: int) -> Tensor:
        return self.weight[:length]


class Stretched(nn.Module):
    """Reads views of weights long after the unit that owns them."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(67, 48)
        self.positions = nn.ModuleList(Position() for _ in range(2))
        self.h = nn.ModuleList(Block(48) for _ in range(3))
        self.head = nn.Linear(48, 67)

    def forward(self, tokens: Tensor) -> Tensor:
        views = [each(tokens.shape[1]) for each in self.positions]
        halves = [view.flatten().view_as(view) for view in views]
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.head(x + views[0] + halves[1])


@compatible("modules that return views of their weights")
@TIERS
def test_a_module_that_returns_a_view_of_its_weight(three: bool, wrap: Wrap) -> None:
    case = GPT_CASE._replace(build=Stretched)
    both(case, wrap, three)
    plain = build(case).eval()
    policy = {"units": ["wte", "positions.*", "h.*", "head"]}
    # Without gradients a view pins its page: those that are held must fit beside the largest unit.
    model = wrap(build(case).eval(), host="smallest", device=0.7, three=three, policy=policy)
    torch.manual_seed(2)
    tokens = case.batch()[0]
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert torch.equal(plain(tokens), model(tokens))
    model._runtime.check()


# -- derivatives of derivatives ------------------------------------------------------------------------------


@compatible("double backward")
@TIERS
def test_double_backward_through_attention_written_out(three: bool, wrap: Wrap) -> None:
    case = BY_NAME["nested"]
    ends = []
    for model in (build(case), wrap(build(case), host="smallest", device="smallest", three=three)):
        torch.manual_seed(0)
        for _ in range(2):
            seen: list[Tensor] = []
            handle = model.wte.register_forward_hook(lambda m, a, out, seen=seen: seen.append(out))
            loss = case.loss(model, case.batch())
            handle.remove()
            (slope,) = torch.autograd.grad(loss, seen[0], create_graph=True)
            (loss + slope.pow(2).sum()).backward()
        ends.append({n: p.grad.clone().as_subclass(Tensor) for n, p in model.named_parameters()})
        del loss, slope, seen
    assert_same("gradients", *ends)


# -- torch.func ----------------------------------------------------------------------------------------------


@compatible("torch.func.functional_call")
@TIERS
def test_functional_call_with_other_parameters(three: bool, wrap: Wrap) -> None:
    torch.manual_seed(3)
    tokens, targets = GPT_CASE.batch()
    other = {n: p.detach() * 0.5 for n, p in build(GPT_CASE).named_parameters() if n.startswith("h.1")}
    ends = []
    for model in (build(GPT_CASE), wrap(build(GPT_CASE), host="smallest", device="smallest", three=three)):
        given = {n: p.clone().requires_grad_() for n, p in other.items()}
        logits = torch.func.functional_call(model, given, (tokens,))
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        ends.append({"logits": logits.detach()} | {n: p.grad for n, p in given.items()})
        ends[-1] |= {
            f"own {n}": p.grad.clone().as_subclass(Tensor)
            for n, p in model.named_parameters()
            if n not in given
        }
        assert all(p.grad is None for n, p in model.named_parameters() if n in given)
        assert_same("restored", {**build(GPT_CASE).state_dict()}, {**model.state_dict()})
    assert_same("results", *ends)


@compatible("torch.func.grad and other transforms over a paged model", "refused")
def test_transforms_of_torch_func_are_refused(wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE), host="smallest")
    tokens = GPT_CASE.batch()[0]

    def loss(scale: Tensor) -> Tensor:
        result: Tensor = model(tokens).mean() * scale
        return result

    with pytest.raises(tiermem.PagingError, match=r"torch\.func.*backward"):
        torch.func.grad(loss)(torch.tensor(1.0))
    model._runtime.check()
    train(model, adamw(model), GPT_CASE, steps=1)


# -- structure -----------------------------------------------------------------------------------------------


class Lists(nn.Module):
    """Parameters in lists and dicts, one of them a unit, one of them the root's; one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(67, 48)
        self.mixers = nn.ParameterList(nn.Parameter(torch.randn(48, 48) / 7) for _ in range(3))
        self.scales = nn.ParameterDict({name: nn.Parameter(torch.rand(48)) for name in ("a", "b")})
        self.block = Block(48)
        self.again = self.block
        self.branches = nn.ModuleDict({"x": self.block, "y": Block(48)})
        self.head = nn.Linear(48, 67)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for mixer in self.mixers:
            x = x + torch.tanh(x @ mixer) * self.scales["a"]
        x = self.again(self.block(x)) + self.branches["x"](x) * self.scales["b"] + self.branches["y"](x)
        return self.head(x)


@compatible("ParameterList, ParameterDict, shared submodules, tied weights")
@TIERS
@pytest.mark.parametrize(
    "units", [[], ["mixers", "scales", "block", "again", "branches.*"]], ids=["found", "named"]
)
def test_parameters_in_lists_and_modules_under_two_names(units: list[str], three: bool, wrap: Wrap) -> None:
    case = GPT_CASE._replace(build=Lists)
    plain = build(case)
    policy = {"units": units} if units else {}
    model = wrap(build(case), host="smallest", device="smallest", three=three, policy=policy)
    assert_equal(train(plain, adamw(plain), case, steps=3), train(model, adamw(model), case, steps=3))


@compatible("buffers changed in place: batch norm, caches of keys and values")
@TIERS
def test_buffers_written_in_forward(three: bool, wrap: Wrap) -> None:
    class Remembering(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(4, 16, 48))
            self.register_buffer(
                "counts", torch.zeros(67 * 512, dtype=torch.int64)
            )  # large enough for a page
            self.norm = nn.BatchNorm1d(48)
            self.at = 0

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.norm(self.hidden(tokens).transpose(1, 2)).transpose(1, 2)
            with torch.no_grad():
                self.keys[self.at % 4, : x.shape[1]] = x[0]
                self.counts.view(67, 512)[:, self.at] += torch.bincount(tokens.flatten(), minlength=67)
            self.at += 1
            return self.head(x + self.keys.mean(0)) + self.counts.view(67, 512).sum(1) / 100

    case = GPT_CASE._replace(build=Remembering)
    both(case, wrap, three)


# -- precision, copies, several threads ----------------------------------------------------------------------


@compatible("torch.autocast")
@TIERS
def test_autocast_around_and_inside(three: bool, wrap: Wrap) -> None:
    class Inside(GPT):
        def hidden(self, tokens: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().hidden(tokens)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.hidden(tokens).float())

    both(GPT_CASE._replace(build=lambda: Inside(tied=True)), wrap, three)


@pytest.mark.parametrize(
    ("how", "act", "words"),
    [
        pytest.param(what, act, words, marks=compatible(f"{what} of a paged model", "refused"), id=what)
        for what, act, words in (
            ("copy.deepcopy", copy.deepcopy, "copied"),
            ("pickle", pickle.dumps, "pickled"),
            ("share_memory", lambda model: model.share_memory(), "shared"),
        )
    ],
)
def test_copies_are_refused(how: str, act: Callable[[Any], Any], words: str, wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE), host="smallest")
    for each in (model, model.module) if how != "share_memory" else (model,):
        with pytest.raises(tiermem.PagingError, match=words):
            act(each)
    train(model, adamw(model), GPT_CASE, steps=1)


@compatible("DataParallel and DistributedDataParallel", "refused")
def test_wrappers_that_copy_or_reduce_are_refused(wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE), host="smallest")
    with pytest.raises(tiermem.PagingError, match="DataParallel"):
        model._replicate_for_data_parallel()  # as nn.parallel.replicate does on every device
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with pytest.raises(tiermem.PagingError, match="DistributedDataParallel"):
            nn.parallel.DistributedDataParallel(model)
    finally:
        dist.destroy_process_group()
    train(model, adamw(model), GPT_CASE, steps=1)


@compatible("eval in several threads at once")
@TIERS
@pytest.mark.parametrize("host", ["smallest", "1GiB"])
def test_threads_that_evaluate_at_once(host: str, three: bool, wrap: Wrap) -> None:
    case = BY_NAME["gpt-tied"]
    plain = build(case).eval()
    model = wrap(build(case).eval(), host=host, device="smallest", three=three)
    torch.manual_seed(4)
    batches = [case.batch()[0] for _ in range(4)]
    with torch.no_grad():
        expected = [plain(tokens) for tokens in batches]
    start = threading.Barrier(len(batches))
    found: list[list[Tensor]] = [[] for _ in batches]
    errors: list[BaseException] = []

    def ask(number: int) -> None:
        try:
            start.wait(20)
            for _ in range(8):
                with torch.no_grad():
                    found[number].append(model(batches[number]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors
    for each, answers in zip(expected, found, strict=True):
        assert len(answers) == 8
        assert all(same(each, answer) for answer in answers)
    model._runtime.check()
    model.train()
    train(model, adamw(model), case, steps=1)


@compatible("units called in several threads at once, outside of the model's forward")
def test_threads_that_use_parts_of_the_model(wrap: Wrap) -> None:
    plain, model = build(GPT_CASE), wrap(build(GPT_CASE))
    x = torch.randn(2, 16, 48)
    expected = [block(x).detach() for block in plain.h]
    start = threading.Barrier(3)
    found: list[list[Tensor]] = [[] for _ in range(3)]

    def ask(number: int) -> None:
        start.wait(20)
        for turn in range(9):
            found[(number + turn) % 3].append(model.h[(number + turn) % 3](x).detach())

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for each, answers in zip(expected, found, strict=True):
        assert len(answers) == 9
        assert all(same(each, answer) for answer in answers)
    model._runtime.check()
