"""Inputs of layers of experts, and what DeepSpeed's own layer makes of them on one rank.

`tests/data/deepspeed_moe.json` was written with DeepSpeed 0.19.8 on the CPU:

    .venv-peers/bin/python -m tests.moe_cases
"""

import json
from pathlib import Path

import torch
from torch import nn

RECORDED = Path(__file__).parent / "data" / "deepspeed_moe.json"
WIDTH, NUM_TOKENS = 4, (1, 7)
WAYS = {
    "as it comes": {},
    "residual": {"use_residual": True},
    "jitter": {"noisy_gate_policy": "Jitter"},
    "drawn": {"noisy_gate_policy": "RSample"},
    "few rows": {"capacity_factor": 0.5, "min_capacity": 1},
    "more rows": {"capacity_factor": 1.3, "min_capacity": 0},
    "not drawn": {"top2_2nd_expert_sampling": False},
    "evaluated": {"eval_capacity_factor": 0.6, "min_capacity": 0},
}
CASES = {f"{k} experts, {'dropped' if drops else 'kept'}, {way}": {"k": k, "drop_tokens": drops, **options}
         for k in (1, 2, 3) for drops in (True, False) for way, options in WAYS.items()}  # fmt: skip


def values(shape, first):
    """Numbers between -1 and 1 without any generator."""
    return torch.sin(torch.arange(shape.numel(), dtype=torch.float32) * 1.7 + first).view(shape)


def outputs(layer_class, options):
    """The output, the loss, the counts, and gradients of the input and of all parameters, in sums of squares."""
    expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    layer = layer_class(WIDTH, expert, num_experts=3, **options)
    layer.set_deepspeed_parallelism()
    with torch.no_grad():
        for number, param in enumerate(layer.parameters()):
            param.copy_(values(param.shape, number))
    layer.train("eval_capacity_factor" not in options)
    x = values(torch.Size((*NUM_TOKENS, WIDTH)), 0.5).requires_grad_()
    torch.manual_seed(3)
    output, loss, counts = layer(x)
    (output.square().sum() + loss).backward()
    grads = {name: float(param.grad.square().sum()) for name, param in layer.named_parameters() if param.grad is not None}
    return {"output": output.flatten().tolist(), "loss": float(loss.detach()), "counts": counts.tolist(),
            "input": float(x.grad.square().sum()), "grads": grads}  # fmt: skip


if __name__ == "__main__":
    import deepspeed
    from deepspeed.moe.layer import MoE

    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    deepspeed.init_distributed("gloo")

    def rounded(value):
        if isinstance(value, dict):
            return {key: rounded(each) for key, each in value.items()}
        return [rounded(each) for each in value] if isinstance(value, list) else float(f"{value:.6g}")

    found = {name: rounded(outputs(MoE, options)) for name, options in CASES.items()}
    RECORDED.write_text("{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(found[key])}" for key in found) + "\n}\n")
