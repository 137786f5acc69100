"""What every tier's memory must keep to: a test file subclasses TierTests and says how to make one."""

import pytest
import torch

from tiermem.page import ALIGNMENT, Frame, Kind, Page
from tiermem.tier import Tier, aligned

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]


class TierTests:
    """Subclass it as `class TestMine(TierTests)` and define `make`."""

    def make(self, nbytes: int) -> Tier:
        """A new tier of so many bytes."""
        raise NotImplementedError

    def frame(self, tier: Tier, cells: int, number: int = 0) -> Frame:
        page = Page(number, 0, Kind.PARAMETER, torch.uint8, cells * ALIGNMENT, sinks=True)
        frame = tier.slab.reserve(page)
        assert frame is not None
        return frame

    def test_frames_are_all_of_the_memory_and_no_two_share_a_byte(self) -> None:
        tier = self.make(6 * ALIGNMENT)
        frames = [self.frame(tier, cells, cells) for cells in (1, 2, 3)]
        assert tier.slab.free == 0
        for frame in frames:
            assert tier.bytes_of(frame).numel() == frame.nbytes
            tier.bytes_of(frame).fill_(frame.page.number)
        for frame in frames:
            assert set(tier.bytes_of(frame).tolist()) == {frame.page.number}
        assert tier.memory.numel() == tier.slab.nbytes

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_view_is_a_part_of_its_frame(self, dtype: torch.dtype) -> None:
        tier = self.make(3 * ALIGNMENT)
        self.frame(tier, 1)
        frame = self.frame(tier, 2, 1)
        tier.memory.fill_(0)
        view = tier.view(frame, dtype, 64, (2, 3), (3, 1))
        assert (view.dtype, view.shape, view.stride()) == (dtype, (2, 3), (3, 1))
        assert view.device == tier.memory.device
        assert view.data_ptr() == tier.address_of(frame) + 64 * dtype.itemsize
        view.fill_(1)
        touched = tier.bytes_of(frame)[64 * dtype.itemsize :][: 6 * dtype.itemsize]
        assert torch.equal(touched, torch.ones(6, dtype=dtype, device=view.device).view(torch.uint8))
        assert int((tier.memory != 0).sum()) == int((touched != 0).sum())

    def test_a_view_may_lie_in_another_order(self) -> None:
        tier = self.make(ALIGNMENT)
        frame = self.frame(tier, 1)
        tier.view(frame, torch.int32, 0, (6,), (1,)).copy_(torch.arange(6, dtype=torch.int32))
        assert tier.view(frame, torch.int32, 0, (2, 3), (1, 2)).tolist() == [[0, 2, 4], [1, 3, 5]]
        assert tier.view(frame, torch.int32, 5, (), ()).item() == 5

    def test_addresses(self) -> None:
        tier = self.make(3 * ALIGNMENT)
        frames = [self.frame(tier, 1, number) for number in range(3)]
        for frame in frames:
            assert tier.address_of(frame) == tier.bytes_of(frame).data_ptr() == tier.address + frame.offset
            assert frame.offset % ALIGNMENT == 0

    def test_a_view_outlives_the_tier(self) -> None:
        tier = self.make(ALIGNMENT)
        view = tier.view(self.frame(tier, 1), torch.uint8, 0, (ALIGNMENT,), (1,))
        view.fill_(7)
        tier.close()
        assert tier.memory.numel() == 0
        assert set(view.tolist()) == {7}

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_tensors_in_a_page_are_aligned(self, dtype: torch.dtype) -> None:
        for numel in (1, 7, 64, 65):
            assert numel <= aligned(numel, dtype) < numel + 64
            assert aligned(numel, dtype) * dtype.itemsize % 64 == 0
