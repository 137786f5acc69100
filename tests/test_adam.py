"""Adam and AdamW: torch.optim's numbers and manners, and float32 masters for half-precision parameters."""

import copy
import io
import pickle
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tiermem.trainer.adam import Adam, AdamW
from tiermem.trainer.kernel import Kernel

PAIRS = [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)]
HALVES = (torch.bfloat16, torch.float16)


def make_parameters(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def twins(*parameters: Tensor) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in parameters]


def set_gradients(step: int, *lists: Sequence[Tensor]) -> None:
    """Give the parameters of each list the same gradients."""
    for position, parameters in enumerate(zip(*lists, strict=True)):
        generator = torch.Generator().manual_seed(1000 * step + position)
        gradient = torch.randn(parameters[0].shape, generator=generator)
        for p in parameters:
            p.grad = gradient.to(p.dtype)


def assert_close(ours: Sequence[Tensor], torchs: Sequence[Tensor], rtol: float = 1e-5) -> None:
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=rtol, atol=1e-8)


@pytest.mark.parametrize(("kind", "torch_kind"), PAIRS)
@given(
    lr=st.floats(1e-5, 0.1),
    betas=st.tuples(st.floats(0.0, 0.99), st.floats(0.5, 0.9999)),
    eps=st.floats(1e-9, 1e-3),
    weight_decay=st.sampled_from([0.0, 0.01, 0.3]),
    maximize=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_five_steps_agree_with_torch(kind, torch_kind, lr, betas, eps, weight_decay, maximize):
    ours = make_parameters([(40, 30), (17,), (), (0, 3)])
    torchs = twins(*ours)
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    mine, theirs = kind(ours, **options), torch_kind(torchs, foreach=False, **options)
    for step in range(5):
        set_gradients(step, ours, torchs)
        mine.step()
        theirs.step()
    for a, b in zip(ours, torchs, strict=True):
        # An element near zero is a difference of steps of size lr: rounding is relative to those.
        error = (a - b).abs() / (b.abs() + lr)
        assert error.numel() == 0 or error.max() < 1e-5
        for name in ("exp_avg", "exp_avg_sq"):
            # moments of gradients of size 1 cancel, too: what is left is some ulps of those
            torch.testing.assert_close(mine.state[a][name], theirs.state[b][name], rtol=1e-5, atol=1e-6)
        assert mine.state[a]["step"] == theirs.state[b]["step"] == 5


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("kind", "torch_kind"), PAIRS)
def test_half_parameters_are_rounded_masters(kind, torch_kind, dtype):
    ours = make_parameters([(40, 30), (17,), (1,), (0,)], dtype)
    floats = [nn.Parameter(p.detach().float()) for p in ours]
    mine, theirs = kind(ours), torch_kind(floats, foreach=False)
    for step in range(10):
        set_gradients(step, ours)
        for p, f in zip(ours, floats, strict=True):
            f.grad = p.grad.float()
        mine.step()
        theirs.step()
    for p in ours:
        assert mine.state[p]["master"].dtype == mine.state[p]["exp_avg"].dtype == torch.float32
        assert torch.equal(p, mine.state[p]["master"].to(dtype))
    assert_close([mine.state[p]["master"] for p in ours], floats)


def test_steps_too_small_for_bfloat16_add_up():
    (p,) = make_parameters([(100,)], torch.bfloat16)
    before = p.detach().clone()
    optimizer = AdamW([p], lr=1e-5, weight_decay=0.0)
    for _ in range(1000):
        p.grad = torch.ones_like(p)
        optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["master"], before.float() - 1e-2, rtol=0, atol=1e-4)


def test_a_written_parameter_counts_and_the_rest_keep_their_digits():
    (p,) = make_parameters([(64,)], torch.bfloat16)
    optimizer = AdamW([p], lr=1e-4, weight_decay=0.0, betas=(0.0, 0.0))
    p.grad = torch.zeros_like(p)
    p.grad[:32] = 1.0
    optimizer.step()
    p.grad.zero_()
    master = optimizer.state[p]["master"].clone()
    assert not torch.equal(master, p.float())
    with torch.no_grad():
        p[16:48] = 7.0
    optimizer.step()  # with no gradient and no memory it changes nothing
    expected = torch.cat([master[:16], torch.full((32,), 7.0), master[48:]])
    assert torch.equal(optimizer.state[p]["master"], expected)
    assert torch.equal(p, expected.bfloat16())


def test_a_moved_parameter_counts():
    (p,) = make_parameters([(8,)], torch.bfloat16)
    optimizer = AdamW([p], lr=0.0)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    p.data = torch.full((8,), 3.0, dtype=torch.bfloat16)
    optimizer.step()
    assert torch.equal(p, torch.full((8,), 3.0, dtype=torch.bfloat16))


def test_a_graph_that_saved_the_parameter_notices_the_step():
    (p,) = make_parameters([(8,)])
    optimizer = AdamW([p])
    p.grad = torch.ones_like(p)
    loss = (p * p).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


LAYOUTS = {
    "contiguous": lambda t: t.clone(),
    "channels_last": channels_last,
    "transposed": lambda t: t.clone().transpose(0, 1).contiguous().transpose(0, 1),
    "gaps": lambda t: torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)[..., ::2].copy_(t),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradient_layout", [*LAYOUTS, "expanded"])
@pytest.mark.parametrize("parameter_layout", LAYOUTS)
def test_strides_change_no_bit(parameter_layout, gradient_layout, dtype):
    shape = (4, 3, 5, 6)
    values = torch.randn(shape).to(dtype)
    strided = nn.Parameter(LAYOUTS[parameter_layout](values))
    plain = nn.Parameter(values.clone())
    strides = strided.stride()
    optimizers = [AdamW([strided]), AdamW([plain])]
    for _ in range(3):
        gradient = torch.randn(shape[1:]).to(dtype).expand(shape)
        plain.grad = gradient.contiguous()
        # strides of a gradient assigned by hand are kept
        strided.grad = gradient if gradient_layout == "expanded" else LAYOUTS[gradient_layout](gradient)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(strided, plain)
    assert strided.stride() == strides
    for name, value in optimizers[0].state[strided].items():
        assert torch.equal(value, optimizers[1].state[plain][name]), name


def test_contiguous_state_is_loaded_into_a_channels_last_parameter():
    values = torch.randn(4, 3, 5, 6)
    one, two = nn.Parameter(values.clone()), nn.Parameter(channels_last(values))
    first, second = AdamW([one]), AdamW([two])
    for optimizer in (first, second):
        set_gradients(0, [one], [two])
        if optimizer is second:
            with torch.no_grad():
                two.copy_(one)
            second.load_state_dict(first.state_dict())
            set_gradients(1, [one], [two])
            second.step()
        first.step()
    assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_without_gradient_waits(dtype):
    ours = make_parameters([(5,), (6,)], dtype)
    before = ours[1].detach().clone()
    optimizer = AdamW(ours)
    for step in range(4):
        set_gradients(step, ours)
        if step != 2:
            ours[1].grad = None
        optimizer.step()
        if step < 2:
            assert torch.equal(ours[1], before)
            assert ours[1] not in optimizer.state
    assert [int(optimizer.state[p]["step"]) for p in ours] == [4, 1]


def test_groups_and_schedulers_follow_torch():
    ours = make_parameters([(10, 10), (10,), (7,)])
    torchs = twins(*ours)
    optimizers: list[torch.optim.Optimizer] = []
    schedulers = []
    for kind, (weight, bias, late) in ((AdamW, ours), (torch.optim.AdamW, torchs)):
        optimizer = kind([{"params": [weight]}, {"params": [bias], "weight_decay": 0.0, "lr": 0.1}], lr=0.01)
        optimizer.add_param_group({"params": [late], "betas": (0.5, 0.9)})
        optimizers.append(optimizer)
        schedulers.append(
            torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.01, 0.1, 0.01], total_steps=8)
        )
    for step in range(7):
        set_gradients(step, ours, torchs)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()  # moves lr and the first beta
    assert_close(ours, torchs)


def test_lr_may_be_a_tensor():
    ours = make_parameters([(10,)])
    torchs = twins(*ours)
    lr = torch.tensor(0.01)
    optimizers = [AdamW(ours, lr=lr), torch.optim.AdamW(torchs, lr=lr, foreach=False)]
    for step in range(3):
        set_gradients(step, ours, torchs)
        lr.fill_(0.01 / (step + 1))
        for optimizer in optimizers:
            optimizer.step()
    assert_close(ours, torchs)


def test_named_parameters_keep_their_names():
    model = nn.Linear(3, 2)
    assert AdamW(model.named_parameters()).state_dict()["param_groups"][0]["param_names"] == [
        "weight",
        "bias",
    ]


def test_closure_is_called_with_gradients_on():
    (p,) = make_parameters([(5,)])
    optimizer = AdamW([p])
    calls = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        calls.append(loss.item())
        return loss.item()

    assert optimizer.step(closure) == calls[0]
    assert optimizer.step() is None
    assert optimizer.state[p]["step"] == 2


def clone_of_state(optimizer: torch.optim.Optimizer) -> dict:
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    return torch.load(stream)


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_a_resumed_run_continues_bit_for_bit(dtype, model_first):
    shapes = [(30, 20), (7,)]
    run = make_parameters(shapes, dtype)
    optimizer = AdamW(run, lr=0.01)
    for step in range(3):
        set_gradients(step, run)
        optimizer.step()
    state, weights = clone_of_state(optimizer), [p.detach().clone() for p in run]
    resumed = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    second = AdamW(resumed, lr=1.0)
    if not model_first:
        second.load_state_dict(state)
    with torch.no_grad():
        for p, w in zip(resumed, weights, strict=True):
            p.copy_(w)
    if model_first:
        second.load_state_dict(state)
    for step in range(3, 6):
        set_gradients(step, run, resumed)
        optimizer.step()
        second.step()
    for a, b in zip(run, resumed, strict=True):
        assert torch.equal(a, b)
        for name, value in optimizer.state[a].items():
            assert torch.equal(value, second.state[b][name]), name
            assert value.dtype == second.state[b][name].dtype == torch.float32


def test_loading_copies():
    ours = make_parameters([(5,)])
    first, second = AdamW(ours), AdamW(twins(*ours))
    set_gradients(0, ours)
    first.step()
    second.load_state_dict(first.state_dict())
    set_gradients(1, ours)
    before = copy.deepcopy(second.state_dict())
    first.step()
    assert before["state"][0]["step"] == second.state_dict()["state"][0]["step"] == 1
    assert torch.equal(before["state"][0]["exp_avg"], second.state_dict()["state"][0]["exp_avg"])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("kind", "torch_kind"), PAIRS)
def test_state_travels_to_and_from_torch(kind, torch_kind, fused):
    torchs = make_parameters([(30, 20), (7,)])
    theirs = torch_kind(torchs, lr=0.02, weight_decay=0.1, fused=fused)
    for step in range(3):
        set_gradients(step, torchs)
        theirs.step()
    ours = twins(*torchs)
    mine = kind(ours)
    mine.load_state_dict(clone_of_state(theirs))
    back = twins(*torchs)
    again = torch_kind(back)
    again.load_state_dict(clone_of_state(mine))
    for step in range(3, 5):
        set_gradients(step, torchs, ours, back)
        for optimizer in (theirs, mine, again):
            optimizer.step()
    assert_close(ours, torchs)
    assert_close(back, torchs)


def test_amsgrad_state_is_refused_and_changes_nothing():
    ours = make_parameters([(5,)])
    optimizer = AdamW(ours, lr=0.5)
    with pytest.raises(ValueError, match="amsgrad"):
        optimizer.load_state_dict(torch.optim.AdamW(twins(*ours), amsgrad=True).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_user_hooks_see_and_may_change_the_state_dict():
    ours = make_parameters([(5,)], torch.bfloat16)
    first, second = AdamW(ours), AdamW(twins(*ours))
    set_gradients(0, ours)
    first.step()

    def double(optimizer, state_dict):
        values = state_dict["state"][0]
        return {**state_dict, "state": {0: {**values, "exp_avg": values["exp_avg"] * 2}}}

    second.register_load_state_dict_pre_hook(double)
    second.load_state_dict(first.state_dict())
    (loaded,) = second.state.values()
    assert torch.equal(loaded["exp_avg"], first.state[ours[0]]["exp_avg"] * 2)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_continue_alike(duplicate):
    ours = make_parameters([(30,)], torch.bfloat16)
    optimizer = AdamW(ours)
    set_gradients(0, ours)
    optimizer.step()
    other = duplicate(optimizer)
    copies = other.param_groups[0]["params"]
    set_gradients(1, ours, copies)
    optimizer.step()
    other.step()
    assert torch.equal(ours[0], copies[0])
    assert torch.equal(optimizer.state[ours[0]]["master"], other.state[copies[0]]["master"])


def test_a_lent_kernel_is_used_and_left_open():
    with Kernel(1) as kernel:
        for _ in range(2):
            ours = make_parameters([(5,)])
            optimizer = AdamW(ours, kernel=kernel)
            assert optimizer.kernel is kernel
            set_gradients(0, ours)
            optimizer.step()
            del optimizer


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "learning rate"),
        ({"lr": float("nan")}, "learning rate"),
        ({"lr": torch.tensor([0.1, 0.2])}, "1-element"),
        ({"eps": -1.0}, "epsilon"),
        ({"betas": (1.0, 0.9)}, "index 0"),
        ({"betas": (0.9, -0.1)}, "index 1"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_settings_out_of_range_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(make_parameters([(2,)]), **options)


def test_unsupported_parameters_are_refused():
    wide = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    wide.grad = torch.zeros_like(wide)
    with pytest.raises(ValueError, match=r"float64.*float32, bfloat16"):
        AdamW([wide]).step()
    elsewhere = nn.Parameter(torch.zeros(3, device="meta"))
    elsewhere.grad = torch.zeros_like(elsewhere)
    with pytest.raises(ValueError, match="on meta"):
        AdamW([elsewhere]).step()
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        AdamW(embedding.parameters()).step()


def test_a_model_learns():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(256, 8, dtype=torch.bfloat16)
    y = x[:, :1] * x[:, 1:2]
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
