"""The modules that ranks of frameworks have from the start, beside those of tests.forked_with: they take seconds to import."""

# ruff: noqa: F401
import contextlib

import tests.forked_with

with contextlib.suppress(ImportError):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer
with contextlib.suppress(ImportError):
    import pytorch_lightning
