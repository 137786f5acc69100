"""Ranks: processes that train one model together, each with a slice of its pages.

Which rank has what is `tiermem.partition`'s; here is how they agree, and how bytes get from one to another. Nothing
here knows frames, tiers or the pager.
"""

from tiermem.ranks.exchange import Term, scratch_nbytes
from tiermem.ranks.peers import Peers, agree, find_peers, group_of
from tiermem.ranks.ranks import Ranks
from tiermem.ranks.request import Request

__all__ = ["Peers", "Ranks", "Request", "Term", "agree", "find_peers", "group_of", "scratch_nbytes"]
