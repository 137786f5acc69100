"""The machine that ``tiermem plan`` is asked about: from its options, and measured where they say ``--here``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiermem.cli import rates
from tiermem.cli.output import format_rate

if TYPE_CHECKING:
    from tiermem.planner import Hardware, Model, Training


def machine_of(
    model: Model,
    training: Training,
    gpu: str | None,
    ram: str | None,
    nvme: list[str],
    pcie: str | None,
    tflops: float | None,
    ranks: int,
    here: bool,
    folder: Path | None,
    host_budget: str | None,
) -> tuple[Hardware, list[str]]:
    """The machine, and what is assumed of it in words. Raises ConfigError for what isn't known or can't be."""
    from tiermem.aio.memory import look
    from tiermem.cli.doctor import _checked, _default_folder
    from tiermem.errors import ConfigError, format_bytes
    from tiermem.parts import part_numel
    from tiermem.planner import Hardware, process_nbytes
    from tiermem.policies.timeline import Link

    if folder is not None and not here:
        raise ConfigError("--path: a folder is measured with --here alone")
    if pcie is not None and gpu is None and not here:
        raise ConfigError("--pcie: there is no device with memory of its own; give --gpu, or leave it out")
    if ram is None and not here:
        raise ConfigError("the machine's memory isn't known: give --ram, or --here for this machine")
    if tflops is not None and not tflops > 0:
        raise ConfigError(f"--tflops: read {tflops}; allowed are numbers above 0")
    assumed: list[str] = []
    values: dict[str, Any] = {"ranks": ranks}
    values["ram_nbytes"] = rates.size("--ram", ram) if ram is not None else look().free
    if ram is None:
        assumed.append(f"RAM: {format_bytes(values['ram_nbytes'])}, what is free here now")
    if nvme:
        nbytes, read, write = rates.disks(nvme)
    elif here:
        nbytes, read, write = rates.disk_here(_checked(folder if folder is not None else _default_folder()))
        assumed.append(
            f"disk: {format_bytes(nbytes)} free, reads {format_rate(read)}, writes {format_rate(write)}, measured now"
        )
    else:
        nbytes, read, write = 0, 1.0, 1.0
    values |= {"disk_nbytes": nbytes, "disk": Link(read, write, 5e-5, rates.EFFORT)}
    if host_budget is not None:
        values["host_budget"] = rates.size("--host-budget", host_budget)
    cuda = False
    name = ""
    if gpu is not None:
        values["device_nbytes"], name = rates.gpu(gpu)
    elif here:
        import torch

        cuda = torch.cuda.is_available()
        if cuda:
            values["device_nbytes"] = torch.cuda.mem_get_info()[0]
            assumed.append(
                f"device: {torch.cuda.get_device_name()}, {format_bytes(values['device_nbytes'])} free now"
            )
    if "device_nbytes" in values:
        values["pcie"] = rates.rate("--pcie", pcie) if pcie else rates.copy_rate() if cuda else 25e9
        if pcie is None:
            how = "measured now" if cuda else "assumed: PCIe 4.0 with 16 lanes in practice"
            assumed.append(f"link to the device: {format_rate(values['pcie'])} each way, {how}")
    elif here:
        values["process_nbytes"] = process_nbytes()
        assumed.append(f"a process without pages: {format_bytes(values['process_nbytes'])}, measured now")
    if tflops is not None:
        values["flops"] = tflops * 1e12
    elif name:
        peak = rates.DEVICES[name]
        values["flops"] = getattr(peak, training.precision) * 1e12
        assumed.append(
            f"arithmetic: {getattr(peak, training.precision):g} TFLOP/s in {training.precision}, an {name}'s "
            f"({peak.source}); --tflops says otherwise"
        )
    elif here:
        values |= {"flops": rates.layer_flops(model.decoder, training, cuda), "utilisation": 1.0}
        assumed.append(
            f"arithmetic: {values['flops'] / 1e12:.3g} TFLOP/s in {training.precision}, those of a layer's forward and "
            "backward, measured now"
        )
    else:
        values["flops"] = rates.CPU_TFLOPS * 1e12
        assumed.append(f"arithmetic: {rates.CPU_TFLOPS:g} TFLOP/s of the cpu; --tflops says otherwise")
    values["update"] = (
        rates.update_rate(part_numel(values.get("host_budget", values["ram_nbytes"])))
        if here
        else rates.UPDATE
    )
    assumed.append(
        f"optimizer: {format_rate(values['update'])} of RAM, {'measured now' if here else 'assumed'}"
    )
    return Hardware(**values), assumed
