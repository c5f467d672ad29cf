"""The modules that ranks of frameworks have from the start, beside those of tests.forked_with: they take seconds to import."""

# ruff: noqa: F401
import contextlib
import gc

import tests.forked_with

gc.disable()  # as there

with contextlib.suppress(ImportError):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer
with contextlib.suppress(ImportError):
    import pytorch_lightning

gc.freeze()
gc.enable()
