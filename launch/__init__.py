"""From a configuration to a live pipeline: what a start needs, the ranks of one machine or of several hosts."""
from __future__ import annotations
