"""Torch without a third of its import: the rules by which it computes shapes alone, in Python.

Only compilers and bitsandbytes use them; `torch.empty(..., device="meta")` and layers there do not.
"""
from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType

SHAPE_RULES = "torch._meta_registrations"


def omit_shape_rules() -> None:
    """Let this process import torch without them, unless it has done so already."""
    sys.modules.setdefault(SHAPE_RULES, ModuleType(SHAPE_RULES))


def import_shape_rules() -> None:
    """Import them after all."""
    if not hasattr(sys.modules.get(SHAPE_RULES), "__file__"):
        sys.modules.pop(SHAPE_RULES, None)
        with suppress(ImportError):  # an older torch has none
            import_module(SHAPE_RULES)
