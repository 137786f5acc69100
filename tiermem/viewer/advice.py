"""What to change: from the figures of a run and its policy file to a sentence that names a key of it."""

import sys
from collections.abc import Mapping
from typing import Any

from tiermem.trace.events import REASON_WORDS, Reason
from tiermem.trace.summary import Summary

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WORTH_CHANGING = 0.05
"""The share of the step time from which on waiting is worth a change."""

_NEAR_LIMIT = 0.8


def advice(summary: Summary, policy: object) -> str:
    """One or two sentences on what to change in the policy file; ``policy`` is its text, from the trace's meta."""
    if summary.steps.count == 0 or summary.stall_share < WORTH_CHANGING or not summary.stalls_by_reason:
        return _computing(summary)
    causes = {words: reason for reason, words in REASON_WORDS.items()}
    cause = causes.get(next(iter(summary.stalls_by_reason)), Reason.NONE)
    keys = _parsed(policy)
    # What the optimizer reads ahead by itself can be late too.
    missing = cause in (Reason.NOT_PREFETCHED, Reason.PREFETCHED_LATE)
    if missing and _at(keys, "policy", "prefetch") == "none":
        return 'Set [policy] prefetch = "lookahead": what modules use is not fetched ahead of its use.'
    if cause == Reason.NOT_PREFETCHED:
        if summary.departures > summary.steps.count:
            return (
                f"Units were used out of the recorded order {summary.departures:,} times, and what isn't foreseen "
                "isn't prefetched: keep the model's order the same from step to step, or raise [host] budget."
            )
        return "Raise [host] budget, or [policy] lookahead: pages were not asked for ahead of their use."
    if cause == Reason.DEPARTED:
        return (
            f"Units were used out of the recorded order {summary.departures:,} times, and what isn't foreseen isn't "
            "prefetched: keep the model's order the same from step to step, or raise [host] budget."
        )
    if cause == Reason.PREFETCHED_LATE:
        return _late(summary, keys)
    if cause == Reason.NO_FRAME:
        tier = _fullest(summary)
        use = summary.tiers.get(tier)
        held = f", of which {use.peak / use.budget:.0%} was in use at most" if use and use.budget else ""
        return f"Raise [{tier}] budget{held}: there was no room, in one piece, for what came next."
    if cause == Reason.DISK_BUSY:
        if _at(keys, "placement", "gradients") in (None, "disk"):
            return 'Set [placement] gradients = "host", or name a second disk in [disk] paths: writes hold reads up.'
        return "Name a second disk in [disk] paths: writes hold reads up."
    if cause == Reason.UPDATE:
        return (
            "The optimizer's arithmetic is what is waited for: give it more threads (torch.set_num_threads)."
        )
    if cause == Reason.COLLECTIVE:
        return (
            "Ranks wait for each other: look for the slowest of them; its own first cause is what to change."
        )
    return "The waits have no cause that a key of the policy file would change."


def _computing(summary: Summary) -> str:
    if summary.steps.count == 0:
        return ""
    tier = summary.tiers.get("host")
    if tier and tier.budget and tier.peak < tier.budget // 2:
        return "Paging is hidden behind computation. [host] budget could be lowered: less than half of it was used."
    return "Paging is hidden behind computation: nothing in the policy file would make it faster."


def _late(summary: Summary, keys: Mapping[str, Any]) -> str:
    ahead = _at(keys, "policy", "lookahead")
    if isinstance(ahead, int) and not isinstance(ahead, bool):
        return f'Set [policy] lookahead = "auto" (it is {ahead}): prefetches begin too late.'
    waited = _waited(summary)
    if waited and max(waited, key=lambda link: waited[link]) == "host->device":
        return "Raise [device] budget, or what is free of it: prefetches to the device begin too late for want of room."
    upward = [link for link in summary.links if link.source == "disk"]
    link = max(upward, key=lambda each: each.busy_s, default=None)
    if link and link.limit and link.bandwidth > _NEAR_LIMIT * link.limit:
        return (
            f"The disk gives {link.bandwidth / link.limit:.0%} of what it can: name a second one in [disk] paths, "
            "raise [host] budget so that less has to be read, or halve the bytes with "
            '[precision] parameters = "bfloat16".'
        )
    optimizer = summary.phases["optimizer"].stall_s
    if optimizer > summary.stall_s / 2:
        return (
            "Most of it is the optimizer's phase, where the state streams from the disk with little arithmetic to hide "
            "behind: raise [host] budget so that more of the state stays, or name a second disk in [disk] paths."
        )
    return "Raise [host] budget so that prefetches can begin sooner, or name a second disk in [disk] paths."


def _waited(summary: Summary) -> dict[str, float]:
    """Seconds by link, of the slowest stalls."""
    found: dict[str, float] = {}
    for stall in summary.slowest_stalls:
        if stall.link:
            found[stall.link] = found.get(stall.link, 0.0) + stall.seconds
    return found


def _fullest(summary: Summary) -> str:
    def part(name: str) -> float:
        budget = summary.tiers[name].budget
        return summary.tiers[name].peak / budget if budget else 0.0

    return max(summary.tiers, key=part, default="host")


def _parsed(policy: object) -> Mapping[str, Any]:
    if not isinstance(policy, str):
        return {}
    try:
        return tomllib.loads(policy)
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}


def _at(keys: Mapping[str, Any], section: str, key: str) -> Any:
    part = keys.get(section)
    return part.get(key) if isinstance(part, dict) else None
