"""Runs over several hosts: the rank of a board, the rendezvous, and what the boards must agree on."""
from __future__ import annotations
