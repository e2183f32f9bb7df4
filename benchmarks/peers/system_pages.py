"""torchdil with its memory in large pages, which torch asks Linux for if its environment says so (`PAGES` in `compare`)."""

from benchmarks.peers.system_torchdil import PACKAGES, WARM_UP, calls

__all__ = ["PACKAGES", "WARM_UP", "calls"]
