"""The parameters of well-known models, from the numbers in a Hugging Face configuration file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]

_MOST = 1_000_000  # the most parameters: a file that names more was not written by a model


def parameters_of(config: Mapping[str, Any]) -> list[tuple[str, Shape]]:
    """Returns names and shapes of every parameter, a tied one once. Raises ValueError for a configuration of an unknown
    family."""
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise ValueError(
            f"Cannot plan a model of type {kind!r}: those known here are {', '.join(sorted(FAMILIES))}. "
            "Give the number of its parameters instead, or a function that makes the model."
        )
    try:
        named = list(itertools.islice(FAMILIES[kind](config), _MOST + 1))
    except KeyError as missing:
        raise ValueError(f"Cannot plan a {kind} model: its configuration has no {missing}. Give the whole file.") from None
    except (TypeError, ArithmeticError) as error:
        what = f"its configuration has other values than numbers, or none that fit ({error})"
        raise ValueError(f"Cannot plan a {kind} model: {what}. Give the file of a model.") from error
    if len(named) > _MOST:
        raise ValueError(f"Cannot plan a {kind} model of more than {_MOST:,} parameters. Give the file of a model.")
    wrong = next((f"{name} has the shape {shape!r:.60}" for name, shape in named if not _is_shape(shape)), None)
    if wrong is not None:
        raise ValueError(f"Cannot plan a {kind} model: by its configuration {wrong}. Give the file of a model.")
    return named


def _is_shape(shape: Shape) -> bool:
    return all(type(size) is int and 0 < size < 2**48 for size in shape)


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> Named:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int, bias: bool = True) -> Named:
    yield f"{name}.weight", (width,)
    if bias:
        yield f"{name}.bias", (width,)


def _llama(
    config: Mapping[str, Any],
    bias: bool = False,
    num_experts: int | None = None,
    head_norms: bool = False,
    head: int | None = None,
) -> Named:
    """Yields the weights of llama and of models made from it: grouped attention, gated feed-forward, norms without bias."""
    width, inner, num_heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config.get("head_dim") or head or width // num_heads
    keys = head * (config.get("num_key_value_heads") or num_heads)
    bias, out_bias = (True, False) if bias else (bool(config.get("attention_bias")),) * 2
    wide_bias = bool(config.get("mlp_bias"))
    yield "embed_tokens.weight", (config["vocab_size"], width)
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}"
        yield from _linear(f"{layer}.self_attn.q_proj", width, num_heads * head, bias)
        yield from _linear(f"{layer}.self_attn.k_proj", width, keys, bias)
        yield from _linear(f"{layer}.self_attn.v_proj", width, keys, bias)
        yield from _linear(f"{layer}.self_attn.o_proj", num_heads * head, width, out_bias)
        if head_norms:
            yield from _norm(f"{layer}.self_attn.q_norm", head, False)
            yield from _norm(f"{layer}.self_attn.k_norm", head, False)
        if num_experts is not None:
            yield from _linear(f"{layer}.mlp.gate", width, num_experts, False)
        for expert in range(1 if num_experts is None else num_experts):
            mlp = f"{layer}.mlp" if num_experts is None else f"{layer}.mlp.experts.{expert}"
            yield from _linear(f"{mlp}.gate_proj", width, inner, wide_bias)
            yield from _linear(f"{mlp}.up_proj", width, inner, wide_bias)
            yield from _linear(f"{mlp}.down_proj", inner, width, wide_bias)
        yield from _norm(f"{layer}.input_layernorm", width, False)
        yield from _norm(f"{layer}.post_attention_layernorm", width, False)
    yield from _norm("norm", width, False)
    if not config.get("tie_word_embeddings", False):
        yield "lm_head.weight", (config["vocab_size"], width)


def _mixtral(config: Mapping[str, Any]) -> Named:
    return _llama(config, num_experts=config["num_local_experts"])


def _qwen2(config: Mapping[str, Any]) -> Named:
    return _llama(config, bias=True)


def _qwen3(config: Mapping[str, Any]) -> Named:
    return _llama(config, head_norms=True, head=128)


def _gpt2(config: Mapping[str, Any]) -> Named:
    width, positions = config["n_embd"], config.get("n_positions") or config["n_ctx"]
    inner = config.get("n_inner") or 4 * width
    yield "wte.weight", (config["vocab_size"], width)
    yield "wpe.weight", (positions, width)
    for index in range(config["n_layer"]):
        layer = f"h.{index}"
        yield from _norm(f"{layer}.ln_1", width)
        yield from _linear(f"{layer}.attn.c_attn", width, 3 * width, True)
        yield from _linear(f"{layer}.attn.c_proj", width, width, True)
        yield from _norm(f"{layer}.ln_2", width)
        yield from _linear(f"{layer}.mlp.c_fc", width, inner, True)
        yield from _linear(f"{layer}.mlp.c_proj", inner, width, True)
    yield from _norm("ln_f", width)
    if not config.get("tie_word_embeddings", True):
        yield "lm_head.weight", (config["vocab_size"], width)


def _gpt_neox(config: Mapping[str, Any]) -> Named:
    width, inner = config["hidden_size"], config["intermediate_size"]
    yield "embed_in.weight", (config["vocab_size"], width)
    for index in range(config["num_hidden_layers"]):
        layer, bias = f"layers.{index}", config.get("attention_bias", True)
        yield from _norm(f"{layer}.input_layernorm", width)
        yield from _norm(f"{layer}.post_attention_layernorm", width)
        yield from _linear(f"{layer}.attention.query_key_value", width, 3 * width, bias)
        yield from _linear(f"{layer}.attention.dense", width, width, bias)
        yield from _linear(f"{layer}.mlp.dense_h_to_4h", width, inner, True)
        yield from _linear(f"{layer}.mlp.dense_4h_to_h", inner, width, True)
    yield from _norm("final_layer_norm", width)
    if not config.get("tie_word_embeddings", False):
        yield "embed_out.weight", (config["vocab_size"], width)


def _bert(config: Mapping[str, Any]) -> Named:
    width, inner = config["hidden_size"], config["intermediate_size"]
    yield "embeddings.word_embeddings.weight", (config["vocab_size"], width)
    yield "embeddings.position_embeddings.weight", (config["max_position_embeddings"], width)
    yield "embeddings.token_type_embeddings.weight", (config["type_vocab_size"], width)
    yield from _norm("embeddings.LayerNorm", width)
    for index in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{index}"
        for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            yield from _linear(f"{layer}.{name}", width, width, True)
        yield from _norm(f"{layer}.attention.output.LayerNorm", width)
        yield from _linear(f"{layer}.intermediate.dense", width, inner, True)
        yield from _linear(f"{layer}.output.dense", inner, width, True)
        yield from _norm(f"{layer}.output.LayerNorm", width)
    yield from _linear("pooler.dense", width, width, True)


FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], Named]] = {
    "bert": _bert, "gpt2": _gpt2, "gpt_neox": _gpt_neox, "llama": _llama, "mistral": _llama, "mixtral": _mixtral,
    "qwen2": _qwen2, "qwen3": _qwen3,
}  # fmt: skip
