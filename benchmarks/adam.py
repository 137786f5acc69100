"""Adam on the CPU: tiermem's kernel against torch and DeepSpeed, and against what memory allows.

    python benchmarks/adam.py --elements 1M 16M 128M --threads 1 2 [--deepspeed-python PATH] [--json FILE]

All contenders of a line run in turn, round after round, on arrays of the same kind (anonymous memory on huge
pages), and the table gives medians, so that what else the machine does falls on all alike. "best" compares the
fastest rounds, which others on the machine disturbed least. Bandwidth counts the bytes an update must move, 28
per element in either form, whatever a contender moves in fact:

    float32   reads parameter, gradient and both moments (16), writes parameter and both moments (12)
    bfloat16  reads float32 master and moments, bfloat16 gradient (14), writes the same three and the bfloat16
              parameter (14)

"stream" is the ceiling: a loop in C that reads the four float32 arrays and writes three of them, adding to
each. "copy" is memcpy of as many bytes: 14 read and 14 written per element.
"""

import argparse
import importlib
import inspect
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from cffi import FFI

from tiermem.trainer.kernel import BEST_LEVEL, Hyper, Kernel

BYTES = 28
HYPER = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, maximize=False)
BASELINE = "torch fused, float32"


def allocate(count: int, dtype: torch.dtype) -> torch.Tensor:
    """A zeroed tensor whose memory begins and lies on huge pages."""
    huge = 2 << 20
    nbytes = count * dtype.itemsize
    memory = mmap.mmap(-1, nbytes + 2 * huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    start = -raw.data_ptr() % huge
    return raw[start : start + nbytes].view(dtype).zero_()


DECLARATION = "void stream(uintptr_t p, uintptr_t g, uintptr_t m, uintptr_t v, size_t count, float factor)"
COPY = "void copy(uintptr_t target, uintptr_t source, size_t nbytes)"
STREAM = """
#include <stdint.h>
#include <string.h>
%s { memcpy((void *)target, (void *)source, nbytes); }
%s {
  float *restrict a = (float *)p, *restrict b = (float *)m, *restrict c = (float *)v;
  const float *restrict d = (const float *)g;
  for (size_t i = 0; i < count; i++) { float x = d[i] * factor; a[i] += x; b[i] += x; c[i] += x; }
}
"""


@contextmanager
def compiled_stream() -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder:
        ffi = FFI()
        ffi.cdef(f"{COPY}; {DECLARATION};")
        ffi.set_source("_stream", STREAM % (COPY, DECLARATION), extra_compile_args=["-O3"])
        ffi.compile(tmpdir=folder)
        sys.path.insert(0, folder)
        try:
            module = importlib.import_module("_stream")
        finally:
            sys.path.remove(folder)
        yield module.lib


class DeepSpeed:
    """DeepSpeedCPUAdam in a process of its own, one update per :meth:`__call__`, timed there."""

    WORKER = """
import mmap, sys, time, torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
count = int(sys.argv[1])
p = torch.nn.Parameter(allocate(count, torch.float32))
p.grad = allocate(count, torch.float32).normal_()
optimizer = DeepSpeedCPUAdam([p], lr=1e-3, weight_decay=0.01, adamw_mode=True)
optimizer.state[p] = {"step": 1}
for name in ("exp_avg", "exp_avg_sq"):
    optimizer.state[p][name] = allocate(count, torch.float32)
print("ready", flush=True)
for _ in sys.stdin:
    start = time.perf_counter()
    optimizer.step()
    print(time.perf_counter() - start, flush=True)
"""

    PATIENCE = 300  # seconds for an answer; importing and compiling is done

    def __init__(self, python: str, extensions: str, count: int, num_threads: int) -> None:
        path = os.path.dirname(python) + os.pathsep + os.environ["PATH"]  # its ninja
        self._process = subprocess.Popen(
            [python, "-c", "import torch, mmap\n" + inspect.getsource(allocate) + self.WORKER, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={
                **os.environ,
                "PATH": path,
                "OMP_NUM_THREADS": str(num_threads),
                "DS_ACCELERATOR": "cpu",
                "TORCH_EXTENSIONS_DIR": extensions,
            },
        )
        # DeepSpeed logs on stdout while it is imported
        while (line := self._read()) != "ready":
            if not line and self._process.poll() is not None:
                raise RuntimeError(f"{python} could not run DeepSpeedCPUAdam")

    def _read(self) -> str:
        assert self._process.stdout is not None
        alarm = threading.Timer(self.PATIENCE, self._process.kill)
        alarm.start()
        try:
            return self._process.stdout.readline().strip()
        finally:
            alarm.cancel()

    def __call__(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def built(python: str) -> str:
    """The folder of the interpreter's DeepSpeedCPUAdam, which is compiled first where need be.

    Raises subprocess.SubprocessError where that fails.
    """
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers", "deepspeed_step.py")
    command = [python, script, "--build", "CPUAdamBuilder"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1800, check=True)
    return done.stdout.strip().splitlines()[-1]


def timed(update: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        update()
        return time.perf_counter() - start

    return run


@dataclass
class Row:
    elements: int
    threads: int
    contender: str
    milliseconds: float
    gigabytes_per_second: float
    speed_against_baseline: float
    best_against_baseline: float


def measure(
    count: int, num_threads: int, rounds: int, deepspeed: tuple[str, str] | None, stream_lib: Any
) -> list[Row]:
    torch.set_num_threads(num_threads)
    p, g, m, v, scratch = (allocate(count, torch.float32) for _ in range(5))
    half, half_gradient = (allocate(count, torch.bfloat16) for _ in range(2))
    p.normal_()
    g.normal_()
    half.copy_(p)
    half_gradient.copy_(g)
    parameter = torch.nn.Parameter(p)
    parameter.grad = g

    def torch_adam(*, fused: bool) -> torch.optim.AdamW:
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.01, fused=fused, foreach=not fused)
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": m, "exp_avg_sq": v}
        return optimizer

    with ExitStack() as stack:
        kernel = stack.enter_context(Kernel(num_threads))
        pool = stack.enter_context(ThreadPoolExecutor(num_threads))

        def float32() -> None:
            kernel.update(
                parameter=p.data_ptr(),
                parameter_dtype=torch.float32,
                gradient=g.data_ptr(),
                gradient_dtype=torch.float32,
                master=0,
                exp_avg=m.data_ptr(),
                exp_avg_sq=v.data_ptr(),
                count=count,
                hyper=HYPER,
                step=10,
            )

        def bfloat16() -> None:
            kernel.update(
                parameter=half.data_ptr(),
                parameter_dtype=torch.bfloat16,
                gradient=half_gradient.data_ptr(),
                gradient_dtype=torch.bfloat16,
                master=p.data_ptr(),
                exp_avg=m.data_ptr(),
                exp_avg_sq=v.data_ptr(),
                count=count,
                hyper=HYPER,
                step=10,
            )

        def stream() -> None:
            share = -(-count // num_threads)

            def piece(first: int) -> None:
                addresses = (t.data_ptr() + 4 * first for t in (p, g, m, v))
                stream_lib.stream(*addresses, min(share, count - first), 0.0)  # leaves the values as they are

            list(pool.map(piece, range(0, count, share)))

        def copy() -> None:
            share = -(-count // num_threads)
            pairs = [(scratch, g), (scratch, m), (scratch, v), (half, half_gradient)]

            def piece(first: int) -> None:
                for target, source in pairs:
                    size = source.element_size()
                    addresses = (t.data_ptr() + size * first for t in (target, source))
                    stream_lib.copy(*addresses, size * min(share, count - first))

            list(pool.map(piece, range(0, count, share)))

        contenders: dict[str, Callable[[], float]] = {
            "copy": timed(copy),
            "stream": timed(stream),
            "tiermem, float32": timed(float32),
            "tiermem, bfloat16 + float32 state": timed(bfloat16),
            BASELINE: timed(torch_adam(fused=True).step),
            "torch foreach, float32": timed(torch_adam(fused=False).step),
        }
        if deepspeed is not None:
            worker = DeepSpeed(*deepspeed, count, num_threads)
            stack.callback(worker.close)
            contenders["DeepSpeedCPUAdam, float32"] = worker

        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(rounds + 1):
            for name, run in contenders.items():
                seconds = run()
                if turn > 0:  # the first round touches memory and wakes threads
                    times[name].append(seconds)

    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    bests = {name: min(seconds) for name, seconds in times.items()}
    return [
        Row(
            count,
            num_threads,
            name,
            1e3 * t,
            BYTES * count / t / 1e9,
            medians[BASELINE] / t,
            bests[BASELINE] / bests[name],
        )
        for name, t in medians.items()
    ]


def elements(text: str) -> int:
    """A count of elements; K and M stand for 2**10 and 2**20."""
    factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper())
    return int(text[:-1]) * factor if factor else int(text)


def machine() -> str:
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    level = ("baseline", "AVX2", "AVX-512")[BEST_LEVEL]
    return f"{model}, {os.cpu_count()} cores, {gib:.0f} GiB, {level}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--elements", type=elements, nargs="+", default=[elements(n) for n in ("1M", "16M", "128M")]
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15, help="timed updates per contender (default 15)")
    parser.add_argument("--deepspeed-python", metavar="PATH", help="an interpreter that has deepspeed")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    options = parser.parse_args()

    print(machine())
    deepspeed = None
    if options.deepspeed_python is None:
        print("DeepSpeedCPUAdam: not run (give --deepspeed-python an interpreter that has deepspeed)")
    else:
        try:
            deepspeed = options.deepspeed_python, built(options.deepspeed_python)
        except subprocess.SubprocessError as error:
            print(f"DeepSpeedCPUAdam: not run ({error})")
    print(
        f"{BYTES} bytes per element; medians of {options.rounds} interleaved rounds; speed: {BASELINE} = 1\n"
    )
    print(
        f"{'elements':>10} {'threads':>7}  {'contender':<34} {'ms':>9} {'GB/s':>6} {'speed':>6} {'best':>6}"
    )
    rows: list[Row] = []
    with compiled_stream() as stream_lib:
        for count in options.elements:
            for num_threads in options.threads:
                for row in measure(count, num_threads, options.rounds, deepspeed, stream_lib):
                    rows.append(row)
                    print(
                        f"{row.elements:>10} {row.threads:>7}  {row.contender:<34} {row.milliseconds:>9.3f} "
                        f"{row.gigabytes_per_second:>6.1f} {row.speed_against_baseline:>6.2f} "
                        f"{row.best_against_baseline:>6.2f}",
                        flush=True,
                    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"machine": machine(), "bytes": BYTES, "rows": [asdict(r) for r in rows]}, file, indent=1
            )


if __name__ == "__main__":
    main()
