"""Several ranks in processes of their own, for tests: started together, and never waited for without end."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SECONDS = 200
"""After which a test's ranks are killed: for a machine on which much else runs. It is no part of what is tested."""


class Started:
    """Rank processes that run. ``results``: what each has returned, or its error as text, by rank, once joined."""

    def __init__(self, world: int, function: Callable[..., Any], *args: Any) -> None:
        # Forked from a process that has imported these and done nothing else: that takes seconds, for each rank anew.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "tiermem", "tiermem.trainer"])
        self.folder = Path(tempfile.mkdtemp(prefix="tiermem-ranks-", dir="/var/tmp"))
        port = _free_port()
        self.processes = [
            context.Process(target=_run, args=(rank, world, port, str(self.folder), function, args))
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def join(self, seconds: float = SECONDS) -> list[Any]:
        """Wait for all; returns what each rank returned: :class:`Error` where it raised, None where it was killed."""
        for process in self.processes:
            process.join(seconds)
            if process.is_alive():
                raise AssertionError(f"ranks hang: {self.log()}")
        return [
            pickle.loads(path.read_bytes()) if path.exists() else None
            for path in (self.folder / f"{rank}.pickle" for rank in range(len(self.processes)))
        ]

    def log(self) -> str:
        """What the ranks have written to their standard errors."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        """Kill what still runs, and remove what it left."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]  # it was started
            process.join()
        import shutil

        shutil.rmtree(self.folder, ignore_errors=True)


class Error(str):
    """An exception of a rank: its class and text."""


@contextlib.contextmanager
def started(world: int, function: Callable[..., Any], *args: Any) -> Iterator[Started]:
    """``function(rank, world, folder, *args)`` in ``world`` processes of one gloo group."""
    ranks = Started(world, function, *args)
    try:
        yield ranks
    finally:
        ranks.close()


def once(
    temporary: pytest.TempPathFactory, world: int, function: Callable[..., Any], *args: Any
) -> list[Any]:
    """What ``function`` returns on each rank, without errors. All test processes of one run of pytest share it."""
    shared = temporary.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    kept = shared / f"{function.__module__}.{function.__qualname__}.{world}.pickle"
    with open(kept.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            with started(world, function, *args) as ranks:
                results = ranks.join()
                for result in results:
                    assert not isinstance(result, Error | None), f"{result}\n{ranks.log()}"
            kept.write_bytes(pickle.dumps(results))
        found: list[Any] = pickle.loads(kept.read_bytes())
    return found


def _run(rank: int, world: int, port: int, folder: str, function: Any, args: Any) -> None:
    log = open(f"{folder}/{rank}.log", "w")  # noqa: SIM115  # for as long as the process
    faulthandler.dump_traceback_later(SECONDS - 20, file=log)
    sys.stderr = log
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        result = function(rank, world, Path(folder), *args)
    except BaseException as error:
        traceback.print_exc(file=log)
        result = Error(f"{type(error).__name__}: {error}")
    log.flush()
    Path(folder, f"{rank}.tmp").write_bytes(pickle.dumps(result))
    os.replace(f"{folder}/{rank}.tmp", f"{folder}/{rank}.pickle")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
