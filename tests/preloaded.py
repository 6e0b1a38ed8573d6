"""What ranks are forked from. All of it stays, so the garbage collector need not look at it, here or in a rank."""
import gc
from importlib import import_module

gc.disable()
for name in ("tests.forked", "transformers.models.auto.tokenization_auto"):
    import_module(name)
gc.freeze()
gc.enable()
