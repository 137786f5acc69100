"""TieredModule as its users meet it: closing, errors in mid-step, state, parameters touched from outside."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiermem
from tests.conftest import Wrap
from tests.models import BY_NAME, GPT, ConvNet
from tests.parity import adamw, assert_equal, assert_same, build, reference, same, snapshot, train, wrap_in
from tiermem.trainer import AdamW

GPT_CASE = BY_NAME["gpt"]


def moved(model: tiermem.TieredModule) -> tuple[dict[str, Any], int]:
    """Bytes that every link has carried, and how many faults there were."""
    stats = model.stats()
    return stats["links"], stats["faults"]


def hooks_of(net: nn.Module) -> list[str]:
    """All hooks that any module or parameter has."""
    names = [
        "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
        "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
        "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
    ]  # fmt: skip
    found = [f"{path}.{name}" for path, m in net.named_modules() for name in names if getattr(m, name, None)]
    return found + [
        n for n, p in net.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks
    ]


# -- closing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
@pytest.mark.parametrize("name", ["gpt-tied", "conv-channels-last", "views", "odd-mlp"])
def test_close_gives_an_ordinary_module_back(name: str, three: bool, wrap: Wrap) -> None:
    case = BY_NAME[name]
    net = build(case)
    before = dict(net.named_parameters())
    kinds = [(p.shape, p.stride(), p.dtype, p.requires_grad) for p in net.parameters()]
    model = wrap(net, host="smallest", device="smallest", three=three)
    found = train(model, adamw(model), case)
    model.close()
    assert_equal(reference(name), found)
    assert_same("state", reference(name).state, net.state_dict())
    assert hooks_of(net) == []
    after = dict(net.named_parameters())
    assert list(after) == list(before)
    assert all(after[key] is before[key] for key in before)
    assert {type(p) for p in net.parameters()} == {nn.Parameter}
    assert [(p.shape, p.stride(), p.dtype, p.requires_grad) for p in net.parameters()] == kinds
    # and it trains on as if nothing had been
    reference_net = build(case)
    train(reference_net, adamw(reference_net), case)
    a, b = (train(each, adamw(each), case, steps=2) for each in (reference_net, net))
    assert_equal(a, b)


def test_close_gives_gradients_back(wrap: Wrap) -> None:
    plain, net = build(GPT_CASE), build(GPT_CASE)
    model = wrap(net, host="smallest")
    for each in (plain, model):
        torch.manual_seed(3)
        GPT_CASE.loss(each, GPT_CASE.batch()).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    model.clip_grad_norm_(0.1)
    model.close()
    assert_same("gradients", *({n: p.grad for n, p in each.named_parameters()} for each in (plain, net)))


def test_close_twice_with_and_use_after(disk: Path) -> None:
    net = build(GPT_CASE)
    with wrap_in(net, disk, "smallest") as model:
        model(torch.zeros(1, 4, dtype=torch.long))
    model.close()
    model.close(restore=False)
    assert same(net.wte.weight.data, build(GPT_CASE).wte.weight.data)
    assert list(disk.iterdir()) == []
    with pytest.raises(tiermem.errors.PagingError, match="closed"):
        model(torch.zeros(1, 4, dtype=torch.long))
    assert_same("state", build(GPT_CASE).state_dict(), model.state_dict())
    model.zero_grad()
    again = wrap_in(net, disk, "smallest")
    again(torch.zeros(1, 4, dtype=torch.long))
    again.close()
    assert hooks_of(net) == []


def test_a_model_that_nobody_closed_leaves_nothing_on_disk(disk: Path) -> None:
    model = wrap_in(build(GPT_CASE), disk, "smallest")
    model(torch.zeros(1, 4, dtype=torch.long))
    assert list(disk.iterdir()) != []
    del model
    gc.collect()
    assert list(disk.iterdir()) == []


AFTER_CLOSE = """
import sys
from pathlib import Path
import torch
from tests.models import BY_NAME
from tests.parity import build, wrap_in

case = BY_NAME["gpt"]
net = build(case)
model = wrap_in(net, Path(sys.argv[1]), "smallest")
view, values = model.head.weight.t(), model.head.weight.detach().clone()
loss = case.loss(model, case.batch())
if sys.argv[2] == "gradient":
    case.loss(model, case.batch()).backward()
    view = model.head.weight.grad
model.close()
assert torch.equal(net.head.weight, values)
try:
    print(view.sum().item())
    loss.backward()
except RuntimeError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("what", ["view", "gradient"])
def test_what_somebody_still_holds_at_close_is_no_way_to_freed_memory(what: str, disk: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AFTER_CLOSE, str(disk), what],
        capture_output=True, text=True, check=False, timeout=60, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "refused:" in done.stdout  # backward needs pages that are gone: anything but wrong gradients


# -- errors in mid-step -----------------------------------------------------------------------------------


class Bomb(nn.Module):
    """Passes its input on; explodes when told to, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_error: BaseException | None = None
        self.backward_error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.forward_error is not None:
            raise self.forward_error
        if self.backward_error is not None:
            error = self.backward_error
            y = x.clone()

            def explode(gradient: Tensor) -> None:
                raise error

            y.register_hook(explode)
            return y
        return x


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_after_an_error_training_goes_on(error: BaseException, where: str, three: bool, wrap: Wrap) -> None:
    net = build(GPT_CASE)
    bomb = Bomb()
    block = net.h[1]
    block.mlp.insert(1, bomb)
    model = wrap(net, host="smallest", device="smallest", three=three)
    optimizer = adamw(model)

    def explode(step: int) -> None:
        setattr(bomb, f"{where}_error", error)
        state = torch.get_rng_state()
        with pytest.raises(type(error)):
            GPT_CASE.loss(model, GPT_CASE.batch()).backward()
        torch.set_rng_state(state)
        setattr(bomb, f"{where}_error", None)
        model.zero_grad()
        model._runtime.check()

    expected = reference("gpt")
    found = train(model, optimizer, GPT_CASE, after=explode)
    assert all(same(a, b) for a, b in zip(expected.losses, found.losses, strict=True))
    assert next(iter(expected.state.values())).equal(next(iter(found.state.values())))
    assert_same("optimizer", expected.optimizer, found.optimizer)
    gc.collect()
    leaks = [page for page in model._runtime.table if page.pins and page.unit]
    assert leaks == []


def test_an_error_that_the_model_itself_catches(wrap: Wrap) -> None:
    class Tolerant(GPT):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.wte(tokens)
            for block in self.h:
                try:
                    x = block(x)
                except ArithmeticError:  # noqa: PERF203
                    x = x * 2
            return self.head(x)

    def make() -> nn.Module:
        torch.manual_seed(0)
        net = Tolerant()
        bomb = Bomb()
        bomb.forward_error = ArithmeticError()
        net.h[1].mlp.append(bomb)
        return net

    case = GPT_CASE._replace(build=make)
    plain = make()
    model = wrap(make(), host="smallest")
    assert_equal(train(plain, adamw(plain), case), train(model, adamw(model), case))
    assert model.stats()["departures"] == 0


# -- state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_state_goes_over_to_a_plain_run_and_back(dtype: torch.dtype, three: bool, wrap: Wrap) -> None:
    nets = {"plain": build(GPT_CASE, dtype)}
    first = wrap(build(GPT_CASE, dtype), host="smallest", device="smallest", three=three)
    optimizers = {"plain": adamw(nets["plain"]), "first": adamw(first)}
    train(nets["plain"], optimizers["plain"], GPT_CASE, steps=2)
    train(first, optimizers["first"], GPT_CASE, steps=2)
    state, moments = first.state_dict(), optimizers["first"].state_dict()
    assert_same("state", nets["plain"].state_dict(), state)
    assert {type(value) for value in state.values()} == {Tensor}
    second = build(GPT_CASE, dtype, seed=9)
    third = wrap(build(GPT_CASE, dtype, seed=8), host="smallest", device="smallest", three=three)
    ends = [train(nets["plain"], optimizers["plain"], GPT_CASE, steps=2, seed=5)]
    for model in (second, third):
        optimizer = adamw(model)
        train(model, optimizer, GPT_CASE, steps=1)
        model.load_state_dict(state)
        optimizer.load_state_dict(copy.deepcopy(moments))
        ends.append(train(model, optimizer, GPT_CASE, steps=2, seed=5))
    # the model that gave the state away goes on, and hasn't changed it
    ends.append(train(first, optimizers["first"], GPT_CASE, steps=2, seed=5))
    for end in ends[1:]:
        assert_equal(ends[0], end)
    assert not same(state["head.weight"], first.state_dict()["head.weight"])


def test_loading_in_mid_training_is_what_it_is_unwrapped(wrap: Wrap) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        other = build(GPT_CASE, dtype, seed=4).state_dict()
        ends = []
        for model in (build(GPT_CASE, dtype), wrap(build(GPT_CASE, dtype), host="smallest")):
            optimizer = adamw(model)
            train(model, optimizer, GPT_CASE, steps=2)
            model.load_state_dict(other)
            ends.append(train(model, optimizer, GPT_CASE, steps=2))
        assert_equal(*ends)


def test_loading_reports_what_does_not_fit(wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE), host="smallest")
    state = model.state_dict()
    del state["head.weight"]
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False).missing_keys == ["head.weight"]
    state["head.weight"] = torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(state)
    with pytest.raises(tiermem.errors.PagingError, match="assign"):
        model.load_state_dict(state, assign=True)
    model._runtime.check()


def test_state_of_the_wrapped_module_is_a_copy_too(wrap: Wrap) -> None:
    net = build(GPT_CASE)
    model = wrap(net, host="smallest")
    before = build(GPT_CASE).state_dict()
    for state in (net.state_dict(), model.state_dict(), net.h.state_dict(prefix="h.")):
        assert_same("state", {k: v for k, v in before.items() if k in state}, dict(state))
        for value in state.values():
            value.zero_()
    assert_same("state", before, model.state_dict())
    model.close()
    assert_same("state", before, net.state_dict())


# -- gradients --------------------------------------------------------------------------------------------


def test_gradients_can_be_read_and_torch_clips_them(wrap: Wrap) -> None:
    plain, model = build(GPT_CASE), wrap(build(GPT_CASE), host="smallest")
    for each in (plain, model):
        torch.manual_seed(3)
        GPT_CASE.loss(each, GPT_CASE.batch()).backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert q.grad is not None
        assert q.grad.shape == p.grad.shape
        assert torch.equal(p.grad, q.grad), name
        assert q.grad.abs().sum().item() == p.grad.abs().sum().item()
    with pytest.raises(tiermem.errors.BudgetError, match="let go"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # it holds them all at one time
    model._runtime.check()
    roomy = wrap(build(GPT_CASE))
    torch.manual_seed(3)
    GPT_CASE.loss(roomy, GPT_CASE.batch()).backward()
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (plain, roomy)]
    assert torch.equal(*norms)
    for p, q in zip(plain.parameters(), roomy.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def _edit(model: nn.Module, step: int) -> None:
    """What people do to gradients between backward and step."""
    for index, p in enumerate(model.parameters()):
        if p.grad is None:
            continue
        if index % 5 == 0:
            p.grad = None
        elif index % 5 == 1:
            p.grad.mul_(0.5)
        elif index % 5 == 2:
            p.grad = torch.full_like(p.grad, 0.01 * step) if step % 2 else p.grad * 2
        elif index % 5 == 3:
            p.grad.data.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
@pytest.mark.parametrize("clip", [False, True])
def test_gradients_can_be_written(clip: bool, three: bool, wrap: Wrap) -> None:
    ends = []
    for model in (build(GPT_CASE), wrap(build(GPT_CASE), host="smallest", device="smallest", three=three)):
        optimizer = adamw(model)
        torch.manual_seed(0)
        for step in range(4):
            GPT_CASE.loss(model, GPT_CASE.batch()).backward()
            if clip and isinstance(model, tiermem.TieredModule):
                model.clip_grad_norm_(0.1)
            elif clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            _edit(model, step)
            optimizer.step()
            optimizer.zero_grad()
        ends.append((dict(model.state_dict()), snapshot(optimizer)))
    assert_same("state", ends[0][0], ends[1][0])
    assert_same("moments", ends[0][1], ends[1][1])


@pytest.mark.parametrize("how", ["model", "optimizer", "zeros", "optimizer zeros", "none", "never"])
def test_ways_to_forget_gradients(how: str, wrap: Wrap) -> None:
    def forget(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if how == "model":
            model.zero_grad()
        elif how == "optimizer":
            optimizer.zero_grad()
        elif how == "zeros":
            model.zero_grad(set_to_none=False)
        elif how == "optimizer zeros":
            optimizer.zero_grad(set_to_none=False)
        elif how == "none":
            for p in model.parameters():
                p.grad = None

    ends = []
    host = "1GiB" if how == "never" else "smallest"
    for model in (build(GPT_CASE), wrap(build(GPT_CASE), host=host)):
        optimizer = adamw(model)
        torch.manual_seed(0)
        forget(model, optimizer)
        for _ in range(3):
            GPT_CASE.loss(model, GPT_CASE.batch()).backward()
            optimizer.step()
            forget(model, optimizer)
        assert all((p.grad is None) == (how in ("model", "optimizer", "none")) for p in model.parameters())
        ends.append((dict(model.state_dict()), snapshot(optimizer)))
    assert_same("state", ends[0][0], ends[1][0])
    assert_same("moments", ends[0][1], ends[1][1])


def test_steps_in_which_some_or_all_gradients_are_missing(wrap: Wrap) -> None:
    class Partial(GPT):
        used = 3

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.wte(tokens)
            for block in self.h[: self.used]:
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    base = Partial()
    ends = []
    for net in (copy.deepcopy(base), copy.deepcopy(base)):
        model = wrap(net, host="smallest") if ends else net
        optimizer = adamw(model)
        torch.manual_seed(0)
        optimizer.step()
        for used in (3, 1, 0, 2, 3):
            net.used = used
            GPT_CASE.loss(model, GPT_CASE.batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.step()
        ends.append((dict(model.state_dict()), snapshot(optimizer)))
    assert_same("state", ends[0][0], ends[1][0])
    assert_same("moments", ends[0][1], ends[1][1])


def test_a_second_backward_through_the_same_graph(wrap: Wrap) -> None:
    ends = []
    for model in (build(GPT_CASE), wrap(build(GPT_CASE), host="smallest")):
        torch.manual_seed(0)
        loss = GPT_CASE.loss(model, GPT_CASE.batch())
        loss.backward(retain_graph=True)
        loss.backward()
        one, two = (GPT_CASE.loss(model, GPT_CASE.batch()) for _ in range(2))
        (one * two).backward()
        three, four = (GPT_CASE.loss(model, GPT_CASE.batch()) for _ in range(2))
        three.backward()
        four.backward()
        ends.append({n: p.grad.clone().as_subclass(Tensor) for n, p in model.named_parameters()})
    assert_same("gradients", *ends)


def test_autograd_grad_and_a_gradient_penalty(wrap: Wrap) -> None:
    case = BY_NAME["odd-mlp"]
    ends = []
    for model in (build(case), wrap(build(case), host="smallest")):
        torch.manual_seed(0)
        x = torch.randn(5, 37, requires_grad=True)
        y = model(x).tanh().sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        (y + slope.pow(2).sum()).backward()
        del y, slope
        single = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        ends.append({n: p.grad.clone().as_subclass(Tensor) for n, p in model.named_parameters()})
        ends[-1].update({str(i): g.clone() for i, g in enumerate(single)})
    assert_same("gradients", *ends)


def test_backward_after_the_weights_changed_is_refused(wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE), host="smallest")
    optimizer = adamw(model)
    loss = GPT_CASE.loss(model, GPT_CASE.batch())
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()
    model.zero_grad()
    model._runtime.check()


# -- parameters seen from outside --------------------------------------------------------------------------


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
def test_what_is_known_of_a_parameter_moves_no_byte(three: bool, wrap: Wrap) -> None:
    net = build(BY_NAME["views"])
    model = wrap(build(BY_NAME["views"]), host="smallest", device="smallest", three=three)
    model._runtime.pager.transfers.drain()  # of the wrapping itself
    before = moved(model)
    for p, q in zip(net.parameters(), model.parameters(), strict=True):
        assert isinstance(q, nn.Parameter)
        assert (p.shape, p.size(), p.dtype, p.device) == (q.shape, q.size(), q.dtype, q.device)
        assert (p.numel(), p.dim(), p.ndim, len(p)) == (q.numel(), q.dim(), q.ndim, len(q))
        assert (p.requires_grad, p.is_leaf, p.grad) == (q.requires_grad, q.is_leaf, q.grad)
        assert (p.element_size(), p.nbytes, p.layout) == (q.element_size(), q.nbytes, q.layout)
        assert (p.is_floating_point(), p.is_complex(), p.is_cuda) == (q.is_floating_point(), False, False)
        assert p.itemsize == q.itemsize
        assert hash(q) == hash(q)
        assert isinstance(id(q), int)
    sum(p.numel() for p in model.parameters() if p.requires_grad)
    repr(model)
    list(model.named_modules())
    AdamW(model.parameters())
    assert moved(model) == before


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
def test_parameters_are_read_from_outside(three: bool, wrap: Wrap) -> None:
    net = build(GPT_CASE)
    model = wrap(build(GPT_CASE), host="smallest", device="smallest", three=three)
    for (name, p), q in zip(net.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(q, p), name
        assert torch.equal(q.data, p.data)
        assert torch.equal(q.detach(), p.detach())
        assert q.sum().item() == p.sum().item()
        assert q.flatten()[3].item() == p.flatten()[3].item()
        assert (q.detach().numpy() == p.detach().numpy()).all()
        assert q.tolist() == p.tolist()
        assert repr(q) == repr(p)
        assert same(q.detach().clone().as_subclass(Tensor), p.detach())
        assert same(q.cpu().detach().double().as_subclass(Tensor), p.detach().double())
        assert torch.equal(q.T if q.dim() == 2 else q, p.T if p.dim() == 2 else p)
        model._runtime.check()
    with pytest.raises(tiermem.BudgetError, match="let go"):
        nn.utils.parameters_to_vector(model.parameters())  # it holds views of all of them at one time
    model._runtime.check()
    copied = copy.deepcopy(model.head.weight)
    assert type(copied) is nn.Parameter
    assert same(copied.data, net.head.weight.data)
    assert same(pickle.loads(pickle.dumps(model.head.weight)).data, net.head.weight.data)


def _write(model: Any, through_data: bool) -> None:
    """What people do to parameters between steps."""
    with torch.no_grad():
        model.head.weight.clamp_(-0.05, 0.05)
        model.h[0].mlp[0].weight.mul_(0.9)
        model.h[1].ln1.weight.copy_(torch.full((48,), 0.8))
        model.h[0].ln1.bias[2:5] = 0.25
        model.wte.weight[3].zero_()
        model.h[2].mlp[2].weight.t()[1].add_(0.125)
    if through_data:
        model.h[1].mlp[0].bias.data.fill_(0.125)
        model.h[2].mlp[0].weight.data = model.h[2].mlp[0].weight.data * 0.5
        model.wpe.weight.data[0] += 1
    nn.init.normal_(model.h[1].mlp[2].weight, std=0.02)
    nn.init.zeros_(model.h[0].attention.proj.bias)
    nn.init.xavier_uniform_(model.h[0].attention.qkv.weight)


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_parameters_are_written_from_outside(dtype: torch.dtype, three: bool, wrap: Wrap) -> None:
    # An unwrapped optimizer of bfloat16 doesn't notice a write through .data (see Adam's note); a paged one does.
    data = dtype is torch.float32
    ends = []
    for model in (
        build(GPT_CASE, dtype),
        wrap(build(GPT_CASE, dtype), host="smallest", device="smallest", three=three),
    ):
        torch.manual_seed(1)
        _write(model, data)
        ends.append(train(model, adamw(model), GPT_CASE, steps=3, after=lambda _, m=model: _write(m, data)))
    assert_equal(*ends)


def test_an_average_of_the_weights(wrap: Wrap) -> None:
    ends = []
    for model in (build(GPT_CASE), wrap(build(GPT_CASE), host="smallest")):
        average = [p.detach().clone() for p in model.parameters()]

        def update(step: int, model: nn.Module = model, average: list[Tensor] = average) -> None:
            with torch.no_grad():
                for a, p in zip(average, model.parameters(), strict=True):
                    a.lerp_(p, 0.1)

        train(model, adamw(model), GPT_CASE, steps=3, after=update)
        ends.append({i: a.as_subclass(Tensor) for i, a in enumerate(average)})
    assert_same("average", *ends)


def test_moving_copying_and_pickling_are_refused(wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE), host="smallest")
    for move in (
        model.half,
        model.double,
        model.cpu,
        lambda: model.to(torch.bfloat16),
        lambda: model.to("cpu"),
    ):
        with pytest.raises(tiermem.errors.PagingError, match="moved or cast"):
            move()
    with pytest.raises(tiermem.errors.PagingError, match="copied"):
        copy.deepcopy(model)
    with pytest.raises(tiermem.errors.PagingError, match="pickled"):
        pickle.dumps(model)
    with pytest.raises(tiermem.errors.PagingError):
        model.module.half()
    with pytest.raises(tiermem.errors.PagingError):
        model.head.to(torch.float64)


def test_a_paged_model_is_not_wrapped_again(wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE), host="smallest")
    for what in (model, model.module, model.module.h[0], nn.Sequential(model)):
        with pytest.raises(tiermem.ConfigError, match="plain"):
            tiermem.TieredModule(what, {})
    train(model, adamw(model), GPT_CASE, steps=1)


def test_two_models_in_one_folder_and_one_optimizer(wrap: Wrap) -> None:
    conv = BY_NAME["conv"]
    plain = [build(GPT_CASE), build(conv)]
    tiered = [wrap(build(GPT_CASE), host="smallest"), wrap(build(conv), host="smallest")]
    free = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
    free[1].load_state_dict(free[0].state_dict())
    ends = []
    for models, extra in ((plain, free[0]), (tiered, free[1])):
        optimizer = AdamW([p for m in (*models, extra) for p in m.parameters()], lr=1e-2)
        torch.manual_seed(2)
        for _ in range(3):
            loss = GPT_CASE.loss(models[0], GPT_CASE.batch()) * conv.loss(models[1], conv.batch())
            (loss + extra(torch.ones(3)).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([{k: v.clone() for k, v in m.state_dict().items()} for m in (*models, extra)])
        ends[-1].append(snapshot(optimizer))
    for a, b in zip(*ends, strict=True):
        assert_same("state", a, b)


# -- requires_grad, settings, dtypes ------------------------------------------------------------------------


def test_requires_grad_can_be_turned_off_and_on(wrap: Wrap) -> None:
    ends = []
    for model in (build(GPT_CASE), wrap(build(GPT_CASE), host="smallest")):
        optimizer = adamw(model)
        torch.manual_seed(0)
        for step in range(4):
            model.h[1].requires_grad_(step % 2 == 0)
            model.wte.weight.requires_grad = step != 1
            GPT_CASE.loss(model, GPT_CASE.batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append((dict(model.state_dict()), snapshot(optimizer)))
    assert_same("state", ends[0][0], ends[1][0])
    assert_same("moments", ends[0][1], ends[1][1])


def test_what_was_frozen_at_wrapping_can_get_gradients_but_no_state(wrap: Wrap) -> None:
    net = build(GPT_CASE)
    net.h[1].requires_grad_(False)
    model = wrap(net, host="smallest")
    optimizer = adamw(model)
    model.h[1].mlp[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match="frozen when"):
        adamw(model)
    model.h[1].mlp[0].weight.requires_grad_(False)
    train(model, optimizer, GPT_CASE, steps=1)


@pytest.mark.parametrize("host", ["smallest", "1GiB"])
def test_settings_that_split_a_unit_and_schedulers(host: str, wrap: Wrap) -> None:
    ends = []
    for model in (build(GPT_CASE), wrap(build(GPT_CASE), host=host)):
        decayed = [p for p in model.parameters() if p.dim() >= 2]
        rest = [p for p in model.parameters() if p.dim() < 2]
        optimizer = AdamW(
            [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0, "lr": 1e-2}],
            lr=3e-3,
        )
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [3])
        ends.append(train(model, optimizer, GPT_CASE, after=lambda step, s=schedule: s.step()))
    assert_equal(*ends)


def test_an_optimizer_of_some_parameters(wrap: Wrap) -> None:
    ends = []
    for model in (build(GPT_CASE), wrap(build(GPT_CASE), host="smallest")):
        optimizer = AdamW(model.h[0].parameters(), lr=1e-2)
        other = AdamW([model.head.weight], lr=1e-3)
        other.add_param_group({"params": list(model.h[1].mlp.parameters()), "lr": 1e-4})
        torch.manual_seed(0)
        for _ in range(3):
            GPT_CASE.loss(model, GPT_CASE.batch()).backward()
            optimizer.step()
            other.step()
            model.zero_grad()
        ends.append((dict(model.state_dict()), snapshot(optimizer), snapshot(other)))
    for a, b in zip(*ends, strict=True):
        assert_same("state", a, b)


class Mixed(nn.Module):
    """Parameters of several dtypes: an int table, a frozen double, half precision beside float32."""

    def __init__(self, double_trains: bool = False) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randint(0, 67, (67, 3)), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(67).double(), requires_grad=double_trains)
        self.wte = nn.Embedding(67, 48)
        self.low = nn.Linear(48, 96).to(torch.bfloat16)
        self.high = nn.Linear(96, 67)
        self.empty = nn.Parameter(torch.zeros(3, 0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(self.table[tokens]).mean(2)
        x = self.low(x.to(torch.bfloat16)).float()
        return self.high(x) * self.scale[tokens].unsqueeze(-1).float()


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
def test_a_model_of_mixed_dtypes(three: bool, wrap: Wrap) -> None:
    case = GPT_CASE._replace(build=Mixed)
    plain = build(case, None)
    model = wrap(build(case, None), host="smallest", device="smallest", three=three)
    assert_equal(train(plain, adamw(plain), case), train(model, adamw(model), case))


def test_what_the_optimizer_cannot_update_is_refused(wrap: Wrap) -> None:
    torch.manual_seed(0)
    model = wrap(Mixed(double_trains=True), host="1GiB")
    with pytest.raises(ValueError, match="float64"):
        AdamW(model.parameters())


def test_a_sparse_gradient_is_refused_by_name(wrap: Wrap) -> None:
    net = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 2))
    model = wrap(net)
    with pytest.raises(tiermem.errors.PagingError, match=r"0\.weight is sparse"):
        model(torch.tensor([1, 2])).sum().backward()
    model._runtime.check()


# -- modules used in other ways ------------------------------------------------------------------------------


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
@pytest.mark.parametrize("way", ["module", "method", "by hand"])
def test_training_without_the_wrapper_s_forward(way: str, three: bool, wrap: Wrap) -> None:
    def loss_of(model: Any, batch: Any) -> Tensor:
        net = getattr(model, "module", model)
        if way == "module":
            logits = net(batch[0])
        elif way == "method":
            logits = model.head(model.hidden(batch[0]))
        else:
            x = net.wte(batch[0]) @ net.wte.weight[:48].t()
            for block in net.h:
                x = block(x)
            logits = net.head(x)
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    case = GPT_CASE._replace(loss=loss_of)
    plain = build(case)
    model = wrap(build(case), host="smallest", device="smallest", three=three)
    assert_equal(train(plain, adamw(plain), case), train(model, adamw(model), case))


def test_hooks_of_the_user_s_own(wrap: Wrap) -> None:
    seen: list[list[Tensor]] = []
    ends = []
    for wrapped in (False, True):
        net = build(GPT_CASE)
        log: list[Tensor] = []
        net.h[0].register_forward_hook(lambda m, a, out: out * 1.5)
        net.h[1].register_forward_pre_hook(lambda m, a: (a[0] + 0.25,))
        net.h[1].register_full_backward_hook(lambda m, gi, go, log=log: log.append(go[0].clone()))
        net.h[2].register_full_backward_pre_hook(lambda m, go: (go[0] * 2,))
        net.head.weight.register_hook(lambda g: g * 3)
        model = wrap(net, host="smallest") if wrapped else net
        ends.append(train(model, adamw(model), GPT_CASE, steps=3))
        seen.append(log)
    assert_equal(*ends)
    assert all(same(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", "old_weight_norm"])
def test_parametrised_weights(norm: str, wrap: Wrap) -> None:
    def make() -> nn.Module:
        net = GPT()
        how = {
            "weight_norm": nn.utils.parametrizations.weight_norm,
            "spectral_norm": nn.utils.parametrizations.spectral_norm,
            "old_weight_norm": nn.utils.weight_norm,
        }[norm]
        for block in net.h:
            how(block.mlp[0])
        return net

    case = GPT_CASE._replace(build=make)
    plain = build(case)
    model = wrap(build(case), host="smallest")
    assert_equal(train(plain, adamw(plain), case), train(model, adamw(model), case))


def test_an_embedding_that_renormalises_itself_and_a_codebook_that_moves(wrap: Wrap) -> None:
    class Moving(GPT):
        def __init__(self) -> None:
            super().__init__(tied=True)
            self.wte.max_norm = 5.0
            self.codebook = nn.Parameter(torch.randn(48, 48), requires_grad=False)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.hidden(tokens)
            with torch.no_grad():
                self.codebook.lerp_(x.detach().mean((0, 1)).outer(x.detach()[0, 0]), 0.1)
            return self.head(x @ self.codebook.clone())

    case = GPT_CASE._replace(build=Moving)
    plain = build(case)
    model = wrap(build(case), host="smallest")
    assert_equal(train(plain, adamw(plain), case), train(model, adamw(model), case))


def test_a_user_s_saved_tensor_hooks_around_the_model(wrap: Wrap) -> None:
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return GPT_CASE.loss(model, batch)

    class Inside(GPT):
        def hidden(self, tokens: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return super().hidden(tokens)

    for case in (GPT_CASE._replace(loss=loss_of), GPT_CASE._replace(build=Inside)):
        plain = build(case)
        model = wrap(build(case), host="smallest")
        assert_equal(train(plain, adamw(plain), case), train(model, adamw(model), case))


def test_buffers_count_and_change(wrap: Wrap) -> None:
    net = ConvNet()
    model = wrap(net, host="smallest")
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in ConvNet().named_buffers()]
    model(torch.randn(4, 3, 9, 9))
    assert model.body[1].num_batches_tracked.item() == 1
    assert not torch.equal(model.state_dict()["body.1.running_mean"], torch.zeros(24))


def test_every_hook_is_undone_when_wrapping_is_refused(disk: Path) -> None:
    net = build(GPT_CASE)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(tiermem.BudgetError):
        tiermem.TieredModule(net, {"host": {"budget": 4096}, "disk": {"paths": [str(disk)]}})
    with pytest.raises(tiermem.errors.TiermemError):
        tiermem.TieredModule(
            net, {"host": {"budget": "400KiB"}, "disk": {"paths": [str(disk)], "budget": "8KiB"}}
        )
    assert hooks_of(net) == []
    assert {type(p) for p in net.parameters()} == {nn.Parameter}
    assert_same("state", state, net.state_dict())
    assert list(disk.iterdir()) == []
