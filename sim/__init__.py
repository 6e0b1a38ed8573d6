"""Modelled time: devices, wires and groups that take the time of the hardware that they model."""
from __future__ import annotations
