"""Devices, and the memory of tiers: host slabs, the stand-in's, and CUDA's where there is one."""

import threading

import pytest
import torch

from tests.conformance_tier import TierTests
from tiermem.device import CpuDevice, CudaDevice, Device, StandInDevice, available_nbytes, open_device
from tiermem.errors import ConfigError
from tiermem.policies import eviction
from tiermem.tier import Tier

no_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


class TestHost(TierTests):
    def make(self, nbytes: int) -> Tier:
        return Tier("host", torch.zeros(nbytes, dtype=torch.uint8), eviction("lru"))


class TestStandIn(TierTests):
    def make(self, nbytes: int) -> Tier:
        device = StandInDevice()
        device.close()
        return Tier("device", device.allocate(nbytes), eviction("belady"))


@pytest.mark.cuda
@no_cuda
class TestCuda(TierTests):
    def make(self, nbytes: int) -> Tier:
        return Tier("device", CudaDevice().allocate(nbytes), eviction("belady"))


def test_the_cpu_is_one_with_the_host() -> None:
    device = CpuDevice()
    typed: Device = device
    assert typed.unified
    assert device.torch_device == torch.device("cpu")
    assert 0 < device.free_nbytes() <= available_nbytes() * 2
    with pytest.raises(AssertionError, match="no slab"):
        device.allocate(4096)
    with pytest.raises(AssertionError, match="never copied"):
        device.copy(torch.zeros(1), torch.zeros(1))
    assert "not needed" in device.pin(torch.zeros(1))
    device.close()


def test_the_stand_in_copies_in_order_and_later() -> None:
    device = StandInDevice(nbytes=1 << 20)
    typed: Device = device
    assert not typed.unified
    assert device.free_nbytes() == 1 << 20
    slab = device.allocate(4096)
    assert set(slab.tolist()) == {0xFF}  # what has not arrived shows
    gate = threading.Event()
    blocker = device._thread.submit(gate.wait)
    source = torch.full((4096,), 3, dtype=torch.uint8)
    back = torch.zeros(4096, dtype=torch.uint8)
    first, second = device.copy(slab, source), device.copy(back, slab)
    assert not first.done()
    assert not second.done()
    assert set(slab.tolist()) == {0xFF}
    gate.set()
    second.wait()
    assert first.done()
    first.wait()
    assert torch.equal(back, source)
    assert blocker.result()
    names = {thread.name for thread in threading.enumerate()}
    assert any("tiermem-stand-in" in name for name in names)
    device.close()
    assert not any(thread in threading.enumerate() for thread in device._thread._threads)


def test_a_copy_that_fails_says_so_at_its_wait() -> None:
    device = StandInDevice()
    copy = device.copy(torch.zeros(2, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="must match"):
        copy.wait()
    assert copy.done()
    device.close()


def test_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(open_device("auto"), CpuDevice)
    assert isinstance(open_device("cpu"), CpuDevice)
    for kind in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match=r"sees no CUDA device; use \"cpu\" or \"auto\""):
            open_device(kind)


@pytest.mark.cuda
@no_cuda
def test_cuda_copies_to_and_fro() -> None:
    device = open_device("cuda")
    slab = device.allocate(4096)
    source, back = torch.arange(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    device.copy(slab, source).wait()
    copy = device.copy(back, slab)
    copy.wait()
    assert copy.done()
    assert torch.equal(back, source)
    with pytest.raises(ConfigError, match="numbered from 0"):
        open_device(f"cuda:{torch.cuda.device_count()}")
    device.close()
