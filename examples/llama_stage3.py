"""A Llama of any size, of which no rank has the whole: from the meta device, through training, to a folder for transformers.

    torchrun --nproc-per-node 8 examples/llama_stage3.py --width 8192 --layers 80 --heads 64 --vocabulary 128256 --out llama-70b

With --model it begins with the weights of a folder or a name on the hub in place of random ones.
"""

import argparse
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.initialization import no_init_weights

import accelerators
import zero
from zero.integrations.transformers import from_pretrained, save_pretrained


def make_model(options: argparse.Namespace) -> tuple[Any, zero.ShardedOptimizer]:
    adamw = partial(torch.optim.AdamW, lr=options.lr)
    if options.model is not None:
        model = from_pretrained(AutoModelForCausalLM, options.model, stage=3, dtype=torch.bfloat16)
        model.to(accelerators.current().device())  # which reads nothing yet
        return model, zero.shard(model, adamw, stage=3)  # here each rank reads its shares
    config = LlamaConfig(
        hidden_size=options.width, num_hidden_layers=options.layers, num_attention_heads=options.heads,
        intermediate_size=options.width * 8 // 3 // 16 * 16, vocab_size=options.vocabulary, max_position_embeddings=4096,
    )  # fmt: skip
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    optimizer = zero.shard(model, adamw, stage=3)
    torch.manual_seed(0)  # the same random weights on all ranks
    model.init_weights()  # one chunk of weights after the other is written where it lies
    return model, optimizer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 64), ("layers", 2), ("heads", 4), ("vocabulary", 256), ("steps", 5), ("length", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--model", help="a folder of transformers, or a name on the hub")
    parser.add_argument("--out", default="llama", help="a folder that rank 0 writes")
    options = parser.parse_args(arguments)
    model, optimizer = make_model(options)
    model.gradient_checkpointing_enable()
    model.train()
    rank, device = optimizer.group.rank, accelerators.current().device()
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(model.config.vocab_size, (2, options.length), generator=generator).to(device)
    for step in range(options.steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    save_pretrained(model, options.out, max_shard_size="5GB")
    if rank == 0:
        print(f"saved in {options.out}")


if __name__ == "__main__":
    main()
