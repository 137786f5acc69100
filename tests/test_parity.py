"""Paging changes no bit: every model trains as the same optimizer trains it when it isn't wrapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import Wrap
from tests.models import BY_NAME, CASES, GPT
from tests.parity import adamw, assert_equal, build, reference, same, train


@pytest.mark.parametrize(
    ("three", "dtype"), [(False, torch.float32), (True, torch.bfloat16)], ids=["cpu-fp32", "three-tiers-bf16"]
)
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_every_model_in_the_smallest_workable_budget(
    name: str, three: bool, dtype: torch.dtype, wrap: Wrap
) -> None:
    case = BY_NAME[name]
    model = wrap(build(case, dtype), host="smallest", device="smallest", three=three)
    assert_equal(reference(name, dtype), train(model, adamw(model), case))


BUDGETS = ["1GiB", 0.5, 0.25, "smallest"]


@pytest.mark.parametrize("host", BUDGETS)
@pytest.mark.parametrize(
    ("eviction", "prefetch"), [("lru", "none"), ("lru", "lookahead"), ("belady", "lookahead")]
)
def test_every_policy_in_every_budget(host: Any, eviction: str, prefetch: str, wrap: Wrap) -> None:
    case = BY_NAME["gpt-tied"]
    model = wrap(build(case), host=host, policy={"eviction": eviction, "prefetch": prefetch})
    assert_equal(reference(case.name), train(model, adamw(model), case))


@pytest.mark.parametrize("device", ["1GiB", 0.5, "smallest"])
@pytest.mark.parametrize("host", BUDGETS)
def test_three_tiers_in_every_budget(host: Any, device: Any, wrap: Wrap) -> None:
    case = BY_NAME["gpt-frozen"]
    model = wrap(build(case), host=host, device=device, three=True)
    assert_equal(reference(case.name), train(model, adamw(model), case))


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
@pytest.mark.parametrize(
    "placement",
    [
        {"gradients": "host"},
        {"optimizer": "host"},
        {"parameters": "host", "gradients": "host"},
        {"parameters": "host", "gradients": "host", "optimizer": "host"},
    ],
    ids=lambda placement: "-".join(placement),
)
def test_every_placement(placement: dict[str, str], three: bool, wrap: Wrap) -> None:
    case = BY_NAME["odd-mlp"]
    model = wrap(build(case), host="smallest", device="smallest", three=three, placement=placement)
    assert_equal(reference(case.name), train(model, adamw(model), case))


@pytest.mark.parametrize("engine", ["libaio", "threads"])
@pytest.mark.parametrize("request_size", ["4KiB", "1MiB"])
def test_both_engines(engine: str, request_size: str, wrap: Wrap) -> None:
    case = BY_NAME["conv"]
    io = {"engine": engine, "request": request_size, "depth": 2}
    model = wrap(build(case), host="smallest", io=io)
    assert_equal(reference(case.name), train(model, adamw(model), case))


@pytest.mark.parametrize("lookahead", [1, 3, "64KiB"])
@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
def test_every_lookahead(lookahead: Any, three: bool, wrap: Wrap) -> None:
    case = BY_NAME["albert"]
    model = wrap(build(case), host=0.4, device=0.4, three=three, policy={"lookahead": lookahead})
    assert_equal(reference(case.name), train(model, adamw(model), case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("clip", [None, 0.05, 1e9])
def test_clipping(clip: float | None, dtype: torch.dtype, wrap: Wrap) -> None:
    case = BY_NAME["structured"]
    model = wrap(build(case, dtype), host="smallest")
    assert_equal(reference(case.name, dtype, clip), train(model, adamw(model), case, clip=clip))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_the_norm_of_any_order_and_the_refusal_of_one_that_is_not_finite(
    norm_type: float, wrap: Wrap
) -> None:
    case = BY_NAME["odd-mlp"]
    plain, model = build(case), wrap(build(case), host="smallest")
    for _ in range(2):  # twice: a second clip scales what the first one did
        for each in (plain, model):
            torch.manual_seed(0)
            case.loss(each, case.batch()).backward()
        for limit in (0.5, 0.25):
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit, norm_type)
            assert same(expected, model.clip_grad_norm_(limit, norm_type))
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    model.gain.grad.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert model.clip_grad_norm_(1.0).isnan()


@pytest.mark.parametrize("name", ["gpt", "odd-mlp", "conv", "gpt-frozen"])
def test_close_to_torch_s_own_adamw(name: str, wrap: Wrap) -> None:
    case = BY_NAME[name]
    plain, model = build(case), wrap(build(case), host="smallest")
    # Biases of keys, and those before a batch norm, have a gradient that is zero but for rounding. With the usual eps
    # Adam makes whole steps of that noise, in which no two implementations agree.
    settings = {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-3}
    train(plain, torch.optim.AdamW(plain.parameters(), **settings), case, clip=None)
    train(model, adamw(model, **settings), case, clip=None)
    found = model.state_dict()
    for key, value in plain.state_dict().items():
        assert (found[key].double() - value.double()).norm() <= 1e-5 * value.double().norm(), key


@pytest.mark.parametrize("host", ["1GiB", "smallest"])
@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
@pytest.mark.parametrize("name", ["gpt-tied", "conv", "gpt-frozen"])
def test_precision_keeps_the_bits_that_the_cast_hides(name: str, three: bool, host: str, wrap: Wrap) -> None:
    case = BY_NAME[name]
    plain = build(case)
    masters = [p.detach().clone() for p in plain.parameters()]
    plain.to(torch.bfloat16)
    optimizer = adamw(plain)
    for p, master in zip(plain.parameters(), masters, strict=True):
        if p.requires_grad:
            zero = torch.zeros_like(master)
            optimizer.state[p] = {
                "step": torch.tensor(0.0),
                "exp_avg": zero,
                "exp_avg_sq": zero.clone(),
                "master": master,
            }
            optimizer._seen[p] = (p._version, p.data_ptr())
    model = wrap(build(case), host=host, device="smallest", three=three, precision={"parameters": "bfloat16"})
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert_equal(train(plain, optimizer, case), train(model, adamw(model), case))


# -- inference ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["gpt-dropout", "encoder", "conv", "recurrent"])
def test_inference_between_steps_changes_nothing(name: str, mode: Any, three: bool, wrap: Wrap) -> None:
    case = BY_NAME[name]
    batch = case.batch()
    answers: list[list[torch.Tensor]] = []
    ends = []
    for wrapped in (False, True):
        net = build(case)
        model = wrap(net, host="smallest", device="smallest", three=three) if wrapped else net
        seen: list[torch.Tensor] = []

        def ask(step: int = 0, model: torch.nn.Module = model, seen: list[torch.Tensor] = seen) -> None:
            model.eval()
            with mode():
                seen.extend(case.loss(model, batch).clone() for _ in range(2))
            model.train()

        ask()  # before the first step, too
        ends.append(train(model, adamw(model), case, after=ask))
        answers.append(seen)
    assert_equal(*ends)
    for a, b in zip(*answers, strict=True):
        # In eval torch's encoder layer has a fused kernel of its own, which it leaves where its weights are apart.
        assert torch.allclose(a, b, rtol=1e-5) if name == "encoder" else same(a, b)
    assert model.stats()["departures"] == 0


def test_forwards_without_backward_change_nothing(wrap: Wrap) -> None:
    case = BY_NAME["gpt"]
    model = wrap(build(case), host="smallest")
    optimizer = adamw(model)
    batch = case.batch()
    for _ in range(20):
        case.loss(model, batch)
    model._runtime.check()
    assert_equal(reference("gpt"), train(model, optimizer, case))


@pytest.mark.parametrize("three", [False, True], ids=["cpu", "three-tiers"])
def test_autocast(three: bool, wrap: Wrap) -> None:
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return BY_NAME["gpt-tied"].loss(model, batch)

    case = BY_NAME["gpt-tied"]._replace(loss=loss)
    plain = build(case)
    model = wrap(build(case), host="smallest", device="smallest", three=three)
    assert_equal(train(plain, adamw(plain), case), train(model, adamw(model), case))


def test_a_module_skipped_at_random(wrap: Wrap) -> None:
    class LayerDrop(GPT):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.wte(tokens)
            for block in self.h:
                if torch.rand(()) < 0.6 and (not self.training or x.mean() > -1):
                    x = block(x)
            return self.head(x)

    case = BY_NAME["gpt"]._replace(build=LayerDrop)
    plain = build(case)
    model = wrap(build(case), host="smallest")
    assert_equal(*(train(each, adamw(each), case, steps=12) for each in (plain, model)))
    assert model.stats()["departures"] > 0
