"""Torch without half of its import: what compilers, exporters, quantizers and bitsandbytes use, and layers do not.

The largest are the rules by which torch computes shapes alone; `torch.empty(..., device="meta")` does without them.
"""
from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

SHAPE_RULES = "torch._meta_registrations"
GPU_KERNELS = "torch._native"  # a build without GPUs only lists them
KNOWN_TORCH = "2.13."  # the version whose import does without the others, too
LEFT_OUT = (  # in the order in which torch can import them
    "torch.nn.intrinsic", "torch.nn.qat", "torch.nn.quantizable", "torch.nn.quantized", "torch.quantization",
    "torch.distributions", "torch.hub", "torch.masked", "torch.func", "torch._higher_order_ops",
    "torch._higher_order_ops.invoke_subgraph", "torch.export")


class LeftOutModule(ModuleType):
    """A module with an empty class for each name that torch's import takes from it."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        empty_class = type(name, (), {})
        setattr(self, name, empty_class)
        return empty_class


def left_out_modules(torch_version: str) -> tuple[str, ...]:
    """Return the names of the modules without which this version of torch can be imported."""
    if not torch_version.startswith(KNOWN_TORCH):
        return SHAPE_RULES,
    return (*LEFT_OUT, SHAPE_RULES, *([GPU_KERNELS] if torch_version.endswith("+cpu") else ()))


def make_lean() -> None:
    """Let this process import torch without these modules, unless it has done so already."""
    with suppress(PackageNotFoundError):
        for name in left_out_modules(version("torch")):
            sys.modules.setdefault(name, LeftOutModule(name))


def import_left_out() -> None:
    """Import them after all."""
    torch = sys.modules.get("torch")
    left_out = [module for module in map(sys.modules.get, (*LEFT_OUT, SHAPE_RULES, GPU_KERNELS))
                if isinstance(module, LeftOutModule)]
    for module in left_out:
        del sys.modules[module.__name__]

    for module in left_out:
        with suppress(ImportError):  # an older torch has no rules for shapes
            imported = import_module(module.__name__)
            taken_names = [name for name, value in vars(module).items() if vars(torch).get(name) is value]
            vars(torch).update((name, getattr(imported, name)) for name in taken_names)
