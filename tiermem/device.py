"""Devices: where modules compute. The CPU, CUDA, and a stand-in with memory of its own for tests.

A device that is *unified* computes straight from host frames; the others hold a slab of their own and copy
asynchronously. Everything that knows about streams and events is here.

Note: order on CUDA. Copies run on a stream of their own. A copy waits for the kernels that were enqueued
before it was submitted (so a frame whose page was evicted is overwritten only after the last kernel that
read it), and whoever needs the page waits for the copy. The pager asks ``Copy.done`` or calls ``Copy.wait``.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from tiermem.aio.memory import look
from tiermem.errors import ConfigError

_cuda: Any = torch.cuda  # partly without types


class Copy(Protocol):
    """One copy in flight."""

    def done(self) -> bool:
        """Has it ended, well or badly? Never blocks."""

    def wait(self) -> None:
        """Block until it has ended; raises what went wrong."""


class Device(Protocol):
    """What the pager asks of a device."""

    name: str
    torch_device: torch.device
    unified: bool

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A slab of ``nbytes`` bytes (uint8) in the device's memory."""

    def free_nbytes(self) -> int:
        """Bytes of the device's memory that are free now."""

    def pin(self, slab: torch.Tensor) -> str:
        """Register a host slab for fast copies; returns in words what was done."""

    def unpin(self, slab: torch.Tensor) -> None:
        """Undo :meth:`pin`."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Begin to copy between host and device (uint8, equal sizes), after the compute enqueued so far."""

    def close(self) -> None:
        """Let go of threads and streams."""


class CpuDevice:
    """The CPU: device and host are one, nothing is ever copied."""

    name = "cpu"
    unified = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def allocate(self, nbytes: int) -> torch.Tensor:
        raise AssertionError("a unified device has no slab of its own")

    def free_nbytes(self) -> int:
        return available_nbytes()

    def pin(self, slab: torch.Tensor) -> str:
        return "not needed: the CPU computes from host frames"

    def unpin(self, slab: torch.Tensor) -> None:
        pass

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        raise AssertionError("a unified device is never copied to")

    def close(self) -> None:
        pass


class _ThreadCopy:
    """A copy made by a thread of the stand-in device."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


class StandInDevice:
    """A device made of ordinary memory, apart from the host slab, with asynchronous copies in order.

    It exercises all three tiers on machines without an accelerator: what is computed must have been copied.
    """

    name = "stand-in"
    unified = False

    def __init__(self, nbytes: int = 1 << 34) -> None:
        self.torch_device = torch.device("cpu")
        self._nbytes = nbytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tiermem-stand-in")

    def allocate(self, nbytes: int) -> torch.Tensor:
        # Not zeros: computing from a frame before its page has landed must show.
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)

    def free_nbytes(self) -> int:
        return self._nbytes

    def pin(self, slab: torch.Tensor) -> str:
        return "not needed: the stand-in copies with the CPU"

    def unpin(self, slab: torch.Tensor) -> None:
        pass

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        def run() -> None:
            target.copy_(source)

        return _ThreadCopy(self._thread.submit(run))

    def close(self) -> None:
        self._thread.shutdown()


class _EventCopy:
    """A copy on a CUDA stream, ended when its event has been recorded."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class CudaDevice:
    """One CUDA device: two copy streams (to it and from it), a pinned host slab where the driver allows."""

    unified = False

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            read = "cuda" if index is None else f"cuda:{index}"
            raise ConfigError(f'device.kind = "{read}": this torch sees no CUDA device; use "cpu" or "auto"')
        count = torch.cuda.device_count()
        index = torch.cuda.current_device() if index is None else index
        if index >= count:
            raise ConfigError(
                f'device.kind = "cuda:{index}": there are {count} CUDA devices, numbered from 0'
            )
        self.torch_device = torch.device("cuda", index)
        self.name = f"cuda:{index}"
        self._up = _cuda.Stream(self.torch_device)
        self._down = _cuda.Stream(self.torch_device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def free_nbytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def pin(self, slab: torch.Tensor) -> str:
        code = int(_cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0))
        if code:
            return f"refused by CUDA (error {code}): pageable memory is used, copies are slower and not asynchronous"
        return "registered with CUDA"

    def unpin(self, slab: torch.Tensor) -> None:
        _cuda.cudart().cudaHostUnregister(slab.data_ptr())

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        stream = self._up if target.is_cuda else self._down
        stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = _cuda.Event()
            event.record(stream)
        if source.is_cuda:
            source.record_stream(stream)
        return _EventCopy(event)

    def close(self) -> None:
        torch.cuda.synchronize(self.torch_device)


def open_device(kind: str) -> Device:
    """The device that ``device.kind`` of the policy file names: auto, cpu, cuda or cuda:N."""
    if kind == "auto":
        return CudaDevice() if torch.cuda.is_available() else CpuDevice()
    if kind == "cpu":
        return CpuDevice()
    return CudaDevice(int(kind[5:]) if kind.startswith("cuda:") else None)


def available_nbytes() -> int:
    """Bytes of RAM that this process can have without paging anything out, as the kernel and its cgroups say."""
    return look().free
