"""Scripts as people have them, before they are moved: each trains on the ranks of torch.distributed."""
