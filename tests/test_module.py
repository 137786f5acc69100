"""TieredModule as its users meet it: closing, errors in mid-step, modules used in other ways."""

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
from tests.parity import adamw, assert_equal, assert_same, build, reference, same, train, wrap_in
from tiermem.trainer import AdamW

GPT_CASE = BY_NAME["gpt"]


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


# -- closing -------------------------------------------------------------------------------------------------


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


# -- errors in mid-step --------------------------------------------------------------------------------------


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


# -- what a wrapped module refuses ---------------------------------------------------------------------------


def test_moving_copying_and_pickling_are_refused(wrap: Wrap) -> None:
    model = wrap(build(GPT_CASE), host="smallest")
    for move in (
        model.half,
        model.double,
        lambda: model.to(torch.bfloat16),
        lambda: model.to("meta"),
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


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
def test_a_model_that_calls_another_wrapped_one(three: bool, wrap: Wrap) -> None:
    class Outer(GPT):
        def hidden(self, tokens: Tensor) -> Tensor:
            x: Tensor = super().hidden(tokens) + inner[0].hidden(tokens)
            return x * inner[0](tokens).mean()

    inner: list[Any] = []  # where nobody looks for submodules
    ends = []
    for wrapped in (False, True):
        nets = [build(GPT_CASE._replace(build=each)) for each in (GPT, Outer)]
        if wrapped:
            nets = [wrap(net, host="smallest", device="smallest", three=three) for net in nets]
        inner[:] = nets[:1]
        optimizer = AdamW([p for net in nets for p in net.parameters()], lr=1e-2)
        ends.append(train(nets[1], optimizer, GPT_CASE, steps=3))
        ends[-1].state.update({f"inner.{name}": value for name, value in nets[0].state_dict().items()})
    assert_equal(*ends)


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
