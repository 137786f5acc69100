"""The figures of a run: what :meth:`tiermem.TieredModule.stats` says."""

from __future__ import annotations

from typing import Any

from tiermem.runtime import Runtime


def figures(runtime: Runtime) -> dict[str, Any]:
    """Plain data: bytes, numbers, seconds."""
    with runtime.door:
        counters = runtime.pager.counters
        tiers: dict[str, Any] = {}
        for tier in (runtime.pager.device, runtime.pager.host):
            if tier is not None:
                tiers[tier.name] = {
                    "budget": runtime.budgets[tier.name],
                    "smallest": runtime.smallest[tier.name],
                    "in_use": tier.slab.used,
                    "peak": tier.slab.peak,
                }
        activations = runtime.hooks.views.activations
        if activations is not None:
            tiers["host"]["in_use"] += activations.arena.slab.used
            tiers["host"]["peak"] += activations.arena.slab.peak
        used = runtime.disk.used if runtime.disk is not None else 0
        paths = runtime.disk.stats() if runtime.disk is not None else {}
        tiers["disk"] = {"budget": runtime.budgets["disk"], "in_use": used, "peak": used, "paths": paths}
        cursor = runtime.steps.training.cursor
        ranks: dict[str, Any] = {}
        if runtime.ranks is not None:
            ranks = {
                "rank": runtime.ranks.rank,
                "world": runtime.ranks.world,
                "stage": runtime.partition.stage,
                "shards": runtime.partition.world,
                "nbytes_sent": dict(runtime.ranks.exchange.nbytes_sent),
                "nbytes_received": dict(runtime.ranks.exchange.nbytes_received),
                "exchanges": dict(runtime.ranks.exchange.num),
                "seconds": {what: ns / 1e9 for what, ns in counters.collective_ns.items()},
            }
        return {
            "ranks": ranks,
            "steps": runtime.steps.number,
            "tiers": tiers,
            "state_nbytes": sum(page.nbytes for page in runtime.table),
            "tiles": {tiled.name: len(tiled.tiles) for tiled in runtime.tiling.tiled.values()},
            "activations": activations.stats() if activations is not None else None,
            "links": {
                "disk_to_host": counters.disk_to_host.by_name(),
                "host_to_disk": counters.host_to_disk.by_name(),
                "host_to_device": counters.host_to_device.by_name(),
                "device_to_host": counters.device_to_host.by_name(),
            },
            "nbytes_written_to_disk": counters.host_to_disk.total,
            "nbytes_read_from_disk": counters.disk_to_host.total,
            "hits": counters.num_hits,
            "faults": counters.num_faults,
            "prefetches": {
                "begun": counters.num_prefetches,
                "used": counters.num_prefetches_used,
                "late": counters.num_prefetches_late,
                "wasted": counters.num_prefetches_wasted,
            },
            "evictions": counters.num_evictions,
            "relocations": counters.num_relocations,
            "failed_transfers": counters.num_failed,
            "stall_seconds": sum(counters.stall_ns.values()) / 1e9,
            "stall_seconds_by_cause": {cause: ns / 1e9 for cause, ns in counters.stall_ns.items()},
            "departures": runtime.steps.departures,
            "recognised": runtime.steps.recognised,
            "commits": runtime.commits.stats() if runtime.commits is not None else None,
            "schedule_accesses": len(cursor.schedule) if cursor is not None else 0,
        }
