"""Several hosts: which rank a board is, where the ranks meet, and what they must agree on."""
from __future__ import annotations
