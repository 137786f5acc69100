"""Sequential direct I/O: tiermem's queue against fio at its best, interleaved on the same file.

Both use libaio, O_DIRECT, the same request size and depth, and buffers on huge pages. fio runs twice a round,
with and without huge pages for its malloc, and the better of its two medians counts.

    python benchmarks/io.py [--folder DIR] [--nbytes N] [--rounds N] [--json]
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tiermem.aio import Buffer, File, open_queue
from tiermem.aio.speed import fill, sweep, window

OPS = ("write", "read")
FIO_VARIANTS = {"fio": {}, "fio, huge pages": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}}


def fio(path: str, op: str, nbytes: int, request: int, depth: int, environment: dict[str, str]) -> float:
    """Bytes per second of one fio run over the whole file, by fio's own clock."""
    command = [
        "fio",
        "--name=sequential",
        f"--filename={path}",
        f"--rw={op}",
        f"--bs={request}",
        f"--iodepth={depth}",
        f"--size={nbytes}",
        "--ioengine=libaio",
        "--direct=1",
        "--iomem_align=2M",
        "--invalidate=0",
        "--scramble_buffers=0",
        "--gtod_reduce=1",
        "--output-format=json",
    ]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout)["jobs"][0][op]["bw_bytes"])


def run(folder: str, nbytes: int, request: int, depth: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Bytes per second, by op, by contender, of every round."""
    rates: dict[str, dict[str, list[float]]] = {
        op: {name: [] for name in ("tiermem", *FIO_VARIANTS)} for op in OPS
    }
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".tiermem-bench-") as inside,
        File(Path(inside) / "file", nbytes, create=True, direct=True) as file,
        Buffer(window(request, depth)) as buffer,
        open_queue("libaio", request, depth) as queue,
    ):
        fill(buffer)
        sweep(queue, file, buffer, nbytes, writing=True)  # allocates on disk: not counted
        for number in range(rounds):
            for op in OPS:
                contenders = list(rates[op])
                turn = number % len(contenders)
                for name in contenders[turn:] + contenders[:turn]:
                    if name == "tiermem":
                        rate = nbytes / sweep(queue, file, buffer, nbytes, writing=op == "write")
                    else:
                        rate = fio(file.path, op, nbytes, request, depth, FIO_VARIANTS[name])
                    rates[op][name].append(rate)
    return rates


def summary(rates: dict[str, list[float]]) -> dict[str, Any]:
    """The medians of one op, and tiermem's against the better of fio's."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max(medians[name] for name in FIO_VARIANTS)
    return {"bytes_per_second": medians, "ratio": medians["tiermem"] / best}


def machine(folder: str) -> str:
    names = Path("/proc/cpuinfo").read_text().split("model name\t: ")
    processor = names[1].split("\n")[0] if len(names) > 1 else platform.machine()
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    inside = [mount for mount in mounts if Path(folder).resolve().is_relative_to(mount[1])]
    kind = max(inside, key=lambda mount: len(mount[1]))[2]
    return f"{os.cpu_count()} x {processor}, Linux {platform.release()}, {kind}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure (default: here)")
    parser.add_argument("--nbytes", type=int, default=2 << 30, help="size of the file (default: 2 GiB)")
    parser.add_argument("--request", type=int, default=1 << 20, help="bytes of a request (default: 1 MiB)")
    parser.add_argument("--depth", type=int, default=32, help="requests in flight (default: 32)")
    parser.add_argument(
        "--rounds", type=int, default=7, help="rounds, of which medians are shown (default: 7)"
    )
    parser.add_argument("--json", action="store_true", help="print every round's numbers instead of a table")
    choice = parser.parse_args()
    if shutil.which("fio") is None:
        print("fio isn't installed, and it is the baseline. Once: apt-get install -y fio", file=sys.stderr)
        return 2
    rates = run(choice.folder, choice.nbytes, choice.request, choice.depth, choice.rounds)
    result = {op: summary(rates[op]) for op in OPS}
    version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if choice.json:
        facts = {"machine": machine(choice.folder), "fio": version, **vars(choice)}
        print(json.dumps({**facts, "result": result, "rounds": rates}, indent=2))
        return 0
    print(f"machine   {machine(choice.folder)}; {version}")
    print(
        f"work      {choice.nbytes >> 20} MiB in order, requests of {choice.request >> 10} KiB, "
        f"{choice.depth} in flight, O_DIRECT, medians of {choice.rounds} interleaved rounds"
    )
    print(f"\n{'MB/s':<8}" + "".join(f"{name:>18}" for name in rates["read"]) + f"{'ratio to best fio':>20}")
    for op in OPS:
        medians = result[op]["bytes_per_second"]
        print(f"{op:<8}" + "".join(f"{rate / 1e6:>18.0f}" for rate in medians.values()), end="")
        print(f"{result[op]['ratio']:>20.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
