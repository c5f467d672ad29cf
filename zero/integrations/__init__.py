"""Sharded training inside other people's loops. A module here is imported only by name.

    zero.integrations.accelerate      ShardedAccelerator, for `accelerate.Accelerator`
    zero.integrations.transformers    ShardedTrainer, for `transformers.Trainer`
    zero.integrations.lightning       ShardedStrategy, for Lightning's `Trainer(strategy=...)`
    zero.integrations.vllm            WeightSource, for the trainer side of vLLM's weight transfer

A plain loop needs none of them.
"""
