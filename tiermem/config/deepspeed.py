"""DeepSpeed's configurations, key by key: what becomes a key of the policy file, what isn't needed, what there isn't.

The keys are those of DeepSpeed 0.19's documentation.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tiermem.config import Config
from tiermem.errors import ConfigError


class Fate(enum.Enum):
    """What becomes of a key."""

    TAKEN = "taken"  # it is a key of the policy file
    SCRIPT = "in the script"  # a line of the training script does it
    NOT_NEEDED = "not needed"
    NOT_SUPPORTED = "not supported"


class Verdict(NamedTuple):
    """What becomes of one key, and why."""

    key: str
    value: Any
    fate: Fate
    why: str


_DEVICES = {"nvme": "disk", "cpu": "host"}
_PLANNED = "the plan and the budgets decide what is fetched when, and what is kept"
_STAGING = "frames are cut from the budget, whatever their number and size"
_MEASURED = "[trace] file has all of it: tiermem trace summary"
_BATCHES = (
    "batches are the training script's: its loader, and how many backward() come before optimizer.step()"
)

NOT_NEEDED = {
    **dict.fromkeys(
        (
            "zero_optimization.allgather_partitions", "zero_optimization.allgather_bucket_size",
            "zero_optimization.reduce_scatter", "zero_optimization.reduce_bucket_size",
            "zero_optimization.overlap_comm", "zero_optimization.contiguous_gradients",
            "zero_optimization.round_robin_gradients", "zero_optimization.sub_group_size",
            "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_max_live_parameters",
            "zero_optimization.stage3_max_reuse_distance", "zero_optimization.stage3_param_persistence_threshold",
            "zero_optimization.stage3_model_persistence_threshold", "zero_optimization.ignore_unused_parameters",
            "zero_optimization.use_multi_rank_bucket_allreduce", "zero_optimization.load_from_fp32_weights",
        ),
        _PLANNED,
    ),
    **{
        f"zero_optimization.{which}.{key}": _STAGING
        for which in ("offload_param", "offload_optimizer")
        for key in (
            "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init", "ratio",
        )
    },
    **dict.fromkeys(("aio.single_submit", "aio.overlap_events", "aio.thread_count", "aio.intra_op_parallelism"),
                    "the queue has one way of doing it"),
    **dict.fromkeys(
        (
            "steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "flops_profiler",
            "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet",
        ),
        _MEASURED,
    ),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save":
        "model.save() writes all parameters, and tiermem checkpoint export makes safetensors of them",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "as stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.elastic_checkpoint": "any number of ranks loads what any number has saved",
    "zero_allow_untested_optimizer": "there is no list of optimizers",
    "zero_force_ds_cpu_optimizer": "tiermem.trainer.AdamW is the optimizer",
    "checkpoint": "model.save() has its options",
}  # fmt: skip

IN_SCRIPT = {
    "train_batch_size": _BATCHES,
    "train_micro_batch_size_per_gpu": _BATCHES,
    "gradient_accumulation_steps": _BATCHES,
    "scheduler": "a scheduler of torch.optim.lr_scheduler, made in the script",
    "seed": "torch.manual_seed",
    "dataloader_drop_last": _BATCHES,
    "activation_checkpointing": "torch.utils.checkpoint in the model; or [placement] activations pages what is saved",
}

NOT_SUPPORTED = {
    "amp": "apex isn't used: [precision] parameters, or torch.autocast in the script",
    "autotuning": "tiermem plan says what fits and how fast",
    "compression_training": "there is no compression of weights",
    "curriculum_learning": "what is trained on is the script's",
    "data_efficiency": "what is trained on is the script's",
    "elasticity": "a run goes on with another number of ranks from a checkpoint",
    "pipeline": "there are no pipeline stages",
    "tensor_parallel": "tensors aren't split; pages are",
    "sparse_attention": "attention is the model's",
    "sparse_gradients": "gradient pages are dense",
    "hybrid_engine": "there is no engine: model.generate() is the module's own",
    "fp16.loss_scale": "there is no loss scaling: use bfloat16, or scale the loss in the script",
    "fp16.initial_scale_power": "as fp16.loss_scale",
    "fp16.loss_scale_window": "as fp16.loss_scale",
    "fp16.hysteresis": "as fp16.loss_scale",
    "fp16.min_loss_scale": "as fp16.loss_scale",
    "aio.use_gds": "pages go through the host",
    "prescale_gradients": "gradients are averaged as torch does it",
    "gradient_predivide_factor": "gradients are averaged as torch does it",
    "zero_optimization.zero_hpz_partition_size": "slices are of all ranks",
    "zero_optimization.zero_quantized_weights": "what is exchanged are the bits",
    "zero_optimization.zero_quantized_gradients": "what is exchanged are the bits",
    "zero_optimization.mics_shard_size": "slices are of all ranks",
    "zero_optimization.cpu_offload": "an old name: use offload_optimizer",
}


def translate(path: Path) -> tuple[Config, list[Verdict]]:
    """The policy that a DeepSpeed configuration comes to, and what became of each of its keys.

    Raises ConfigError when it can't be read, or has values that DeepSpeed wouldn't take.
    """
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't be read: {error.strerror}", source=str(path)) from error
    except ValueError as error:
        raise ConfigError(f"this is not JSON: {error}", source=str(path)) from error
    if not isinstance(read, dict):
        raise ConfigError(f"read a {type(read).__name__}; allowed is an object", source=str(path))
    policy: dict[str, dict[str, Any]] = {}
    verdicts = [_verdict(key, value, policy) for key, value in _flat(read, "")]
    if "bf16" not in read and "fp16" not in read:
        verdicts.append(
            Verdict("bf16", None, Fate.NOT_NEEDED, "parameters keep the module's own dtype, as there")
        )
    try:
        return Config(**policy), verdicts
    except ConfigError as error:
        raise ConfigError(*error.problems, source=str(path)) from error


def _flat(table: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    """Every key that has a value, by its path; sections that go as a whole are not looked into."""
    for name, value in table.items():
        key = f"{above}{name}"
        whole = key in NOT_NEEDED or key in IN_SCRIPT or key in NOT_SUPPORTED or key == "optimizer"
        if isinstance(value, Mapping) and value and not whole:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _verdict(key: str, value: Any, policy: dict[str, dict[str, Any]]) -> Verdict:
    def take(section: str, name: str, taken: Any, why: str = "") -> Verdict:
        policy.setdefault(section, {})[name] = taken
        return Verdict(key, value, Fate.TAKEN, f"[{section}] {name} = {json.dumps(taken)}{why}")

    if value == "auto" and key not in NOT_NEEDED:
        return Verdict(
            key, value, Fate.SCRIPT, "its value comes from the script there: set it there here, too"
        )
    known = _known(key, value, take, policy)
    if known is not None:
        return known
    for table, fate in (
        (NOT_NEEDED, Fate.NOT_NEEDED),
        (IN_SCRIPT, Fate.SCRIPT),
        (NOT_SUPPORTED, Fate.NOT_SUPPORTED),
    ):
        if key in table:
            return Verdict(key, value, fate, table[key])
    return Verdict(
        key, value, Fate.NOT_SUPPORTED, "there is no such key in the documentation of DeepSpeed 0.19"
    )


def _known(
    key: str, value: Any, take: Callable[..., Verdict], policy: dict[str, dict[str, Any]]
) -> Verdict | None:
    """The keys whose value matters."""
    parts = key.split(".")
    if key == "zero_optimization.stage":
        return take("ranks", "stage", value)
    if len(parts) == 3 and parts[1] in ("offload_param", "offload_optimizer"):
        kind = "parameters" if parts[1] == "offload_param" else "optimizer"
        if parts[2] == "device" and value in _DEVICES:
            return take("placement", kind, _DEVICES[value])
        if parts[2] == "device":
            return Verdict(key, value, Fate.NOT_NEEDED, "the budgets say how much stays where")
        if parts[2] == "nvme_path" and str(value) in policy.get("disk", {}).get("paths", ()):
            return Verdict(key, value, Fate.TAKEN, "[disk] paths has it already")
        if parts[2] == "nvme_path":
            return take("disk", "paths", [*policy.get("disk", {}).get("paths", ()), str(value)])
        if parts[2] == "pin_memory":
            return take("host", "pinned", "auto" if value else False, ": where there is CUDA")
    if key in ("bf16.enabled", "fp16.enabled", "bfloat16.enabled"):
        if value is not True:
            return Verdict(key, value, Fate.NOT_NEEDED, "parameters keep the module's own dtype")
        return take("precision", "parameters", "float16" if key.startswith("fp16") else "bfloat16")
    if key == "aio.block_size":
        return take("io", "request", int(value) // 4096 * 4096 or 4096)
    if key == "aio.queue_depth":
        return take("io", "depth", value)
    if key == "communication_data_type":
        if value == "fp32":
            return take("ranks", "reduce", "float32")
        return Verdict(
            key, value, Fate.NOT_SUPPORTED, "gradients are summed in their own dtype, or in float32"
        )
    if key == "gradient_clipping":
        return Verdict(key, value, Fate.SCRIPT, f"model.clip_grad_norm_({value}) before optimizer.step()")
    if key == "optimizer" and isinstance(value, Mapping):
        return _optimizer(value)
    return None


def _optimizer(value: Mapping[str, Any]) -> Verdict:
    name, settings = str(value.get("type")), value.get("params") or {}
    if name.lower() in ("adam", "adamw"):
        adam_w = name.lower() == "adamw" or settings.get("adam_w_mode", True) is True
        given = ", ".join(
            f"{key}={tuple(each) if isinstance(each, list) else each!r}"
            for key, each in settings.items()
            if key in ("lr", "betas", "eps", "weight_decay") and each != "auto"
        )
        line = f"tiermem.trainer.{'AdamW' if adam_w else 'Adam'}(model.parameters(){', ' if given else ''}{given})"
        return Verdict("optimizer", dict(value), Fate.SCRIPT, line)
    return Verdict(
        "optimizer", dict(value), Fate.NOT_SUPPORTED,
        "paged state is Adam's and AdamW's; torch's own optimizers work where all parameters fit the budget",
    )  # fmt: skip
