"""Modelled time: devices, wires and groups that take the time of those that they stand for."""
from __future__ import annotations
