"""Several hosts: which rank a board is, where the rendezvous is, and what the boards must agree on."""
from __future__ import annotations
