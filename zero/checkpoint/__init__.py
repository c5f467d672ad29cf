"""Checkpoints: every rank's stretches in files of their own, one manifest, and nothing visible before all of it is on the disk.

    DIR/latest                          the tag of the newest complete checkpoint
    DIR/TAG/manifest.json               names, shapes, spans, dtypes, a checksum of every file, Python's own values
    DIR/TAG/rank-00000.safetensors      tensors: stretches of parameters and of their state
    DIR/.TAG.saving-ID/                 one that is being written or removed
    DIR/.TAG.replaced/                  the one before of the same tag, while the new one takes its place

Why safetensors and not torch.distributed.checkpoint: that one writes pickled metadata, has no checksum to verify before
anything is changed, and knows whole tensors and shards along their dimensions; ours are stretches of a line.
"""
