"""The Adam kernel: the right numbers, and the same bits however a span is cut."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiermem.trainer.kernel import BEST_LEVEL, Hyper, Kernel

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)
SIZES = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 511, 512, 513, 1025)
PAIRS = [(p, g) for p in DTYPES for g in DTYPES]


@dataclass
class Span:
    """The five arrays of an update; `master` is None when the parameter is float32."""

    parameter: Tensor
    gradient: Tensor
    master: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def clone(self) -> "Span":
        return Span(*(None if t is None else t.clone() for t in vars(self).values()))

    def equals(self, other: "Span") -> bool:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return all(same_bits(a, b) for a, b in pairs if a is not None)


def same_bits(a: Tensor, b: Tensor) -> bool:
    integers = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.view(integers), b.view(integers))


def make_span(count: int, parameter_dtype: torch.dtype, gradient_dtype: torch.dtype, seed: int = 0) -> Span:
    generator = torch.Generator().manual_seed(seed)
    parameter = torch.randn(count, generator=generator)
    gradient = torch.randn(count, generator=generator).to(gradient_dtype)
    exp_avg = torch.randn(count, generator=generator) * 0.1
    exp_avg_sq = torch.rand(count, generator=generator) * 0.1
    master = None if parameter_dtype == torch.float32 else parameter.clone()
    return Span(parameter.to(parameter_dtype), gradient, master, exp_avg, exp_avg_sq)


def make_hyper(**changes: float | bool) -> Hyper:
    values = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    return Hyper(**{**values, "decoupled": True, "maximize": False, **changes})  # type: ignore[arg-type]


def update(
    kernel: Kernel,
    span: Span,
    hyper: Hyper,
    *,
    step: int = 3,
    grad_scale: float = 1.0,
    first: int = 0,
    last: int | None = None,
) -> None:
    last = span.parameter.numel() if last is None else last

    def address(tensor: Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr() + first * tensor.element_size()

    kernel.update(
        parameter=address(span.parameter),
        parameter_dtype=span.parameter.dtype,
        gradient=address(span.gradient),
        gradient_dtype=span.gradient.dtype,
        master=address(span.master),
        exp_avg=address(span.exp_avg),
        exp_avg_sq=address(span.exp_avg_sq),
        count=last - first,
        hyper=hyper,
        step=step,
        grad_scale=grad_scale,
    )


def slow_update(span: Span, hyper: Hyper, *, step: int = 3, grad_scale: float = 1.0) -> None:
    """The kernel's formula with one torch operation per rounding."""
    target = span.parameter if span.master is None else span.master
    gradient = span.gradient
    if grad_scale != 1.0:
        gradient = gradient.clone().mul_(grad_scale)
    g = gradient.float()
    if hyper.maximize:
        g = -g
    if hyper.decoupled:
        decayed = target * (1 - hyper.lr * hyper.weight_decay)
    else:
        decayed = target.clone()
        if hyper.weight_decay:
            g = g + target * hyper.weight_decay
    weight = torch.tensor(1 - hyper.beta1, dtype=torch.float32)
    if weight < 0.5:
        span.exp_avg.copy_(span.exp_avg + weight * (g - span.exp_avg))
    else:
        span.exp_avg.copy_(g - (g - span.exp_avg) * (1 - weight))
    span.exp_avg_sq.copy_(span.exp_avg_sq * hyper.beta2 + (g * (1 - hyper.beta2)) * g)
    # torch's float32 sqrt may be MKL's, which is off by a bit now and then; through float64 it is exact
    root = span.exp_avg_sq.double().sqrt().float()
    denominator = root / math.sqrt(1 - hyper.beta2**step) + hyper.eps
    target.copy_(decayed + (span.exp_avg * -(hyper.lr / (1 - hyper.beta1**step))) / denominator)
    if span.master is not None:
        span.parameter.copy_(span.master)


hypers = st.builds(
    Hyper,
    lr=st.floats(1e-6, 1.0),
    beta1=st.floats(0.0, 0.99),
    beta2=st.floats(0.0, 0.9999),
    eps=st.floats(1e-10, 1e-3),
    weight_decay=st.sampled_from([0.0, 1e-4, 0.01, 0.3]),
    decoupled=st.booleans(),
    maximize=st.booleans(),
)
scales = st.sampled_from([1.0, 0.5, 0.3337, 1e-3, 7.1])


@pytest.fixture(scope="module")
def kernel():
    with Kernel(1) as kernel:
        yield kernel


@given(
    pair=st.sampled_from(PAIRS),
    hyper=hypers,
    step=st.integers(1, 10_000),
    scale=scales,
    count=st.integers(0, 700),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_bits_are_those_of_the_formula(kernel, pair, hyper, step, scale, count, seed):
    ours = make_span(count, *pair, seed)
    reference = ours.clone()
    update(kernel, ours, hyper, step=step, grad_scale=scale)
    slow_update(reference, hyper, step=step, grad_scale=scale)
    assert ours.equals(reference)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("level", range(BEST_LEVEL + 1))
def test_every_size_on_every_instruction_set(pair, level):
    with Kernel(1, level=level) as kernel:
        for count in SIZES:
            for hyper in (make_hyper(), make_hyper(decoupled=False, beta1=0.3)):
                ours = make_span(count, *pair)
                reference = ours.clone()
                update(kernel, ours, hyper, grad_scale=0.7)
                slow_update(reference, hyper, grad_scale=0.7)
                assert ours.equals(reference), (count, hyper)


@given(data=st.data(), pair=st.sampled_from(PAIRS), count=st.integers(1, 2000), hyper=hypers, scale=scales)
@settings(max_examples=100, deadline=None)
def test_splits_change_no_bit(kernel, data, pair, count, hyper, scale):
    points = data.draw(st.lists(st.integers(0, count), max_size=6))
    levels = data.draw(st.lists(st.integers(0, BEST_LEVEL), min_size=7, max_size=7))
    whole = make_span(count, *pair)
    pieces = whole.clone()
    update(kernel, whole, hyper, grad_scale=scale)
    bounds = [0, *sorted(points), count]
    for first, last, level in zip(bounds, bounds[1:], levels, strict=False):
        with Kernel(1, level=level) as other:
            update(other, pieces, hyper, grad_scale=scale, first=first, last=last)
    assert pieces.equals(whole)


@pytest.mark.parametrize("pair", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("num_threads", [2, 3, 8])
def test_threads_change_no_bit(kernel, pair, num_threads):
    whole = make_span(2_500_003, *pair)
    shared = whole.clone()
    update(kernel, whole, make_hyper())
    with Kernel(num_threads) as threads:
        update(threads, shared, make_hyper())
    assert shared.equals(whole)


def test_threads_follow_the_callers_denormal_mode(kernel):
    count = 300_001
    spans = []
    with Kernel(3) as threads:
        update(threads, make_span(count, torch.float32, torch.float32), make_hyper())  # starts them
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush denormals")
        try:
            for each in (kernel, threads):
                span = make_span(count, torch.float32, torch.float32)
                span.exp_avg.fill_(1e-40)
                span.gradient.fill_(0.0)
                update(each, span, make_hyper())
                spans.append(span)
        finally:
            torch.set_flush_denormal(False)
    assert spans[0].equals(spans[1])
    assert spans[0].exp_avg.count_nonzero() == 0


@pytest.mark.parametrize("count", [600, 70_000])
@pytest.mark.parametrize("offset", [*range(1, 17), 31, 32, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_element_may_be_first(kernel, dtype, offset, count):
    whole = make_span(count + offset, dtype, dtype)
    reference = Span(*(None if t is None else t[offset:].clone() for t in vars(whole).values()))
    update(kernel, whole, make_hyper(), first=offset)
    update(kernel, reference, make_hyper())
    shifted = Span(*(None if t is None else t[offset:] for t in vars(whole).values()))
    assert shifted.equals(reference)


def test_nothing_beyond_the_span_is_written(kernel):
    for count in (*SIZES, 65_536, 70_001):
        span = make_span(count + 128, torch.bfloat16, torch.bfloat16)
        before = span.clone()
        update(kernel, span, make_hyper(), first=64, last=64 + count)
        for after, old in zip(vars(span).values(), vars(before).values(), strict=True):
            assert same_bits(after[:64], old[:64])
            assert same_bits(after[64 + count :], old[64 + count :])


SPECIALS = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    1e-40,
    -1e-45,
    1e-20,
    3.4e38,
    -3.4e38,
    1.0,
    65520.0,
    6e-8,
]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_specials_behave_as_in_torch(kernel, dtype, decoupled, weight_decay):
    grid = torch.cartesian_prod(torch.tensor(SPECIALS), torch.tensor(SPECIALS))
    parameter, gradient = grid.t().contiguous().to(dtype)
    master = None if dtype == torch.float32 else parameter.float()
    ours = Span(parameter, gradient, master, torch.zeros(len(grid)), torch.zeros(len(grid)))
    torchs = torch.nn.Parameter(ours.parameter.float().clone())
    torchs.grad = ours.gradient.float()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([torchs], lr=1e-3, weight_decay=weight_decay, foreach=False)
    for step in (1, 2):
        update(kernel, ours, make_hyper(weight_decay=weight_decay, decoupled=decoupled), step=step)
        optimizer.step()
    result = ours.parameter if ours.master is None else ours.master
    torch.testing.assert_close(result, torchs.detach(), rtol=1e-5, atol=1e-44, equal_nan=True)
    torch.testing.assert_close(ours.parameter, result.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_is_widened_and_narrowed_as_torch_does(kernel, dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[~every.isinf()]  # as exp_avg below it would be inf - inf * 0
    zeros = torch.zeros(len(every))
    span = Span(every.clone(), every.clone(), every.float(), zeros.clone(), zeros.clone())
    update(kernel, span, make_hyper(lr=0.0, beta1=0.0, beta2=0.0, weight_decay=0.0), step=1)
    torch.testing.assert_close(span.exp_avg, every.float(), rtol=0, atol=0, equal_nan=True)
    # where the update is a number (lr = 0 makes it 0), parameter and master are what they were
    usable = every.float().isfinite() & span.exp_avg_sq.isfinite()
    assert usable.sum() > 2**14
    torch.testing.assert_close(span.parameter[usable], every[usable], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", HALVES)
def test_masters_are_rounded_to_nearest_even(kernel, dtype):
    generator = torch.Generator().manual_seed(1)
    master = torch.randint(-(2**31), 2**31, (200_000,), generator=generator, dtype=torch.int64)
    master = master.to(torch.int32).view(torch.float32)
    every = torch.arange(0, 2**15 - 1, dtype=torch.int16).view(dtype).float()
    ties = (every[:-1] + every[1:]) / 2
    around = torch.cat([ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(math.inf))])
    master = torch.cat([master, around, -around])
    zeros = torch.zeros(len(master))
    span = Span(zeros.to(dtype), zeros.to(dtype), master.clone(), zeros.clone(), zeros.clone())
    update(kernel, span, make_hyper(weight_decay=0.0), step=1)
    torch.testing.assert_close(span.master, master, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(span.parameter, master.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.5, 0.1, 3.3, 1e-6, 0.0])
@pytest.mark.parametrize("maximize", [False, True])
def test_grad_scale_is_mul_then_update(kernel, dtype, scale, maximize):
    fused = make_span(1000, dtype, dtype)
    scaled = fused.clone()
    update(kernel, fused, make_hyper(maximize=maximize), grad_scale=scale)
    scaled.gradient.mul_(scale)
    update(kernel, scaled, make_hyper(maximize=maximize))
    fused.gradient = scaled.gradient  # the kernel reads gradients and leaves them as they were
    assert fused.equals(scaled)


def test_refusals(kernel):
    span = make_span(4, torch.float32, torch.float32)
    bf16 = make_span(4, torch.bfloat16, torch.bfloat16)
    with pytest.raises(ValueError, match=r"torch\.float64"):
        update(kernel, replace(span, parameter=span.parameter.double()), make_hyper())
    with pytest.raises(ValueError, match="bfloat16 parameter with master=0x0"):
        update(kernel, replace(bf16, master=None), make_hyper())
    with pytest.raises(ValueError, match="float32 parameter with master="):
        update(kernel, replace(span, master=span.parameter.clone()), make_hyper())
    with pytest.raises(ValueError, match="at least 1, got 4 and 0"):
        update(kernel, span, make_hyper(), step=0)
    with pytest.raises(ValueError, match="num_threads"):
        Kernel(0)
    with pytest.raises(ValueError, match="level"):
        Kernel(1, level=BEST_LEVEL + 1)
    closed = Kernel(2)
    closed.close()
    closed.close()
    with pytest.raises(RuntimeError, match="closed"):
        update(closed, span, make_hyper())
