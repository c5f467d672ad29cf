"""Models of transformers on parts of sequences, beside the same models on whole ones in one process."""

import pickle

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import zero
from tests import ranks
from tests.devices import has_package, needs_accelerate, needs_transformers
from tests.zero.integrations.on_ranks import both_ranks, one_process
from tests.zero.integrations.test_transformers import assert_same_run

pytestmark = needs_transformers
needs_peft = pytest.mark.skipif(not has_package("peft"), reason="peft is not installed")
NUM_STEPS, SAMPLES, VOCABULARY = 2, 2, 31
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


def make_model(kind, heads):
    import transformers as hf

    torch.manual_seed(0)
    sizes = {**SIZES, "num_key_value_heads": heads}
    if kind == "mistral":
        model = hf.MistralForCausalLM(hf.MistralConfig(**sizes, sliding_window=3))
    elif kind == "qwen3 moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4}
        model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**sizes, experts_implementation="eager"))
    else:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))
    return model.double()


def batch_of(case, number):
    generator, length = torch.Generator().manual_seed(number), case.get("length", 12)
    tokens = torch.randint(3, VOCABULARY, (SAMPLES, length), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    places = torch.arange(length)
    if case.get("packed"):
        starts = torch.tensor([[0, 5, 9], [0, 2, 10]])
        number_of = (places[None, None] >= starts[:, :, None]).sum(1) - 1
        batch["position_ids"] = places - starts.gather(1, number_of)
    if "absent" in case:  # these tokens of the first sample are padding
        begin, end = case["absent"]
        batch["attention_mask"] = torch.ones_like(tokens)
        batch["attention_mask"][0, begin:end] = 0
        if not case.get("with_targets"):
            batch["labels"] = tokens.masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def with_adapters(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)).double()


def sgd(model):
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)


def differences(rank, world, case):
    size = case.get("sp", world)
    mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("dp", "sp"))
    kind, heads = case.get("kind", "llama"), case.get("heads", 2)
    plain, model = make_model(kind, heads), make_model(kind, heads)
    if case.get("adapters"):
        plain, model = with_adapters(plain), with_adapters(model)
    zero.ulysses(mesh["sp"], model)
    if case.get("chunks"):
        zero.in_chunks(model, case["chunks"])
        for layer in model.model.layers:
            zero.in_chunks(layer.mlp, case["chunks"])
    if case.get("recomputes"):
        model.gradient_checkpointing_enable({"use_reentrant": case["recomputes"] == "reentrant"})
        model.train()
    optimizer, oracle = zero.shard(model, sgd(model), stage=case.get("stage", 2), reduce="sum"), sgd(plain)
    if case.get("compiled"):
        zero.compile(model, backend="aot_eager", fullgraph=True)
    worst = 0.0
    for step in range(NUM_STEPS):
        part, number = zero.sequence_batch(batch_of(case, 10 * step + mesh["dp"].get_local_rank()), mesh["sp"])
        loss = model(**part, num_items_in_batch=number).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        oracle.zero_grad()
        losses = [plain(**batch_of(case, 10 * step + row), num_items_in_batch=number, use_cache=False).loss
                  for row in range(world // size)]  # fmt: skip
        sum(losses).backward()
        oracle.step()
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))
        worst = max(worst, abs(optimizer.grad_norm / norm - 1))
    optimizer.close()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        worst = max(worst, float((one - other).detach().abs().max()))
    return worst


CASES = {
    "llama": {"recomputes": "yes"},
    "one head of keys, packed": {"heads": 1, "packed": True, "stage": 3},
    "packed, padded, recomputed by a reentrant checkpoint": {"packed": True, "length": 13, "recomputes": "reentrant"},
    "a window": {"kind": "mistral"},
    "a window, packed": {"kind": "mistral", "packed": True, "length": 11},
    "padding on the left": {"absent": (0, 4)},
    "padding on the right": {"absent": (8, 12), "stage": 3},
    "padding on the right that has targets": {"absent": (7, 12), "with_targets": True},
    "padding within": {"absent": (4, 7)},
    "experts": {"kind": "qwen3 moe", "packed": True},
    "adapters": {"adapters": True, "packed": True},
    "by chunks": {"chunks": 4, "packed": True, "stage": 3},
    "by chunks, recomputed": {"chunks": 4, "recomputes": "yes", "length": 13},
    "compiled": {"compiled": True, "packed": True, "stage": 3},
}
MARKS = {"adapters": needs_peft, "compiled": pytest.mark.full}


@pytest.mark.promise("Y01", "Y02", "Y03")
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in CASES])
def test_a_model_of_transformers_trains_on_parts_as_on_whole_sequences(name):
    worst = ranks.run(2, differences, CASES[name], apart="frameworks")
    assert max(worst) < 1e-10, worst


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_peft if name == "adapters" else ()) for name in CASES])
def test_a_model_of_transformers_trains_on_parts_over_two_of_four_ranks(name):
    worst = ranks.run(4, differences, {**CASES[name], "sp": 2}, apart="frameworks")
    assert max(worst) < 1e-10, worst


@pytest.mark.promise("Y01", "Y04")
@needs_accelerate
@pytest.mark.parametrize("as_deepspeed", [False, True])
def test_a_trainer_cuts_sequences_and_trains_as_in_one_process(tmp_path, as_deepspeed):
    of_trainer = "tests.zero.integrations.test_transformers:trained"
    logged, weights = one_process(of_trainer, str(tmp_path / "plain"), {"batch": 2})
    zero_of = {"stage": 3, "sequence_ranks": 2}
    if as_deepspeed:
        zero_of = {"zero_optimization": {"stage": 2}, "sequence_parallel_size": 2, "train_micro_batch_size_per_gpu": "auto",
                   "train_batch_size": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}  # fmt: skip
    found = both_ranks(of_trainer, str(tmp_path / "cut"), {"zero": zero_of, "batch": 2})
    assert_same_run(found, logged, weights)


OTHER_MODELS = {
    "convolutions": ("Lfm2", "CausalLM", {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2}),
    "tokens mixed otherwise": ("FNet", "MaskedLM", {}),
    "positions that begin later": ("Roberta", "MaskedLM", {}),
    "one class a sample": ("Llama", "SequenceClassification", {}),
    "one token a sample": ("Llama", "QuestionAnswering", {}),
}


def of_ones_own():
    """Makes a model in a class of transformers whose layers call torch's attention themselves."""
    import transformers as hf

    class Own(hf.PreTrainedModel):
        config_class = hf.LlamaConfig

        def __init__(self, config):
            super().__init__(config)
            self.embed, self.head = torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, VOCABULARY)

        def forward(self, input_ids, position_ids=None, attention_mask=None):
            x = self.embed(input_ids).unflatten(-1, (4, 4)).transpose(1, 2)
            attended = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
            return self.head(attended.transpose(1, 2).flatten(2))

    return Own(hf.LlamaConfig(**SIZES))


def told(rank, world, case):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("sp",))["sp"]
    model, batch = make_model("llama", 2), batch_of({}, 0)
    part, _ = zero.sequence_batch(batch, mesh)
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)) as caught:
        if case in OTHER_MODELS:
            import transformers as hf

            kind, head, others = OTHER_MODELS[case]
            model = getattr(hf, f"{kind}For{head}")(getattr(hf, f"{kind}Config")(**SIZES, **others))
            part = {name: value for name, value in part.items() if name != "shift_labels"}
        elif case == "attention that is not of transformers":
            model = of_ones_own()
            part = {name: part[name] for name in ("input_ids", "position_ids")}
        zero.ulysses(mesh, model)
        if case == "another attention":
            model.set_attn_implementation("sdpa")
        elif case == "a part of the model":
            model.model(input_ids=part["input_ids"], position_ids=part["position_ids"])
        if case == "labels":
            model(input_ids=part["input_ids"], labels=part["shift_labels"])
        model(**part)
    return str(caught.value)


@pytest.mark.promise("Y01")
@pytest.mark.parametrize(("case", "expected"), {
    "a mean of a part": "Cannot compute a mean of the targets of a part of each sequence",
    "labels": "Pass shift_labels, as zero.sequence_batch returns them",
    "another attention": "with attn_implementation='sdpa'",
    "a part of the model": "Give zero.ulysses the model that is called",
    "convolutions": "layers of type conv would carry nothing from one part to the next",
    "tokens mixed otherwise": "Cannot train a FNetForMaskedLM on parts of sequences: its forward exchanged no attention",
    "attention that is not of transformers": "Give its layers the attention of transformers' ALL_ATTENTION_FUNCTIONS",
    "positions that begin later": "Pass position_ids that begin at 1 to zero.sequence_batch",
    "one class a sample": "Cannot train a LlamaForSequenceClassification on parts of sequences: its results are of whole",
    "one token a sample": "Cannot train a LlamaForQuestionAnswering on parts of sequences: its results are of whole",
}.items())  # fmt: skip
def test_a_model_that_would_be_trained_wrongly_is_refused(case, expected):
    for said in ranks.run(2, told, case, apart="frameworks"):
        assert expected in said, said


@pytest.mark.promise("Y05")
def test_the_latest_call_says_in_which_chunks_a_loss_is_computed():
    widths = []
    model, tokens = make_model("llama", 2), torch.arange(12)[None]
    for chunk in (8, 3):
        zero.in_chunks(model, chunk)
        with torch.profiler.profile(record_shapes=True) as profiled:
            model(tokens, labels=tokens)
        shapes = [event.input_shapes for event in profiled.events() if event.name == "aten::linear"]
        widths.append(max(x[0] for x, weight, *_ in shapes if weight == [VOCABULARY, 16]))
    assert widths == [8, 3]


def padded(samples):
    """Makes a batch of samples, each cut to another length."""
    tokens = torch.stack([each["input_ids"] for each in samples])
    is_token = torch.arange(tokens.shape[1]) < 5 + tokens[:, :1] % 12
    return {"input_ids": tokens.where(is_token, 0), "labels": tokens.where(is_token, -100), "attention_mask": is_token.long()}


def evaluated(folder, **options):
    """The losses of a Trainer's evaluations: before there are steps, and after some."""
    from examples.transformers_trainer import Tokens, make_trainer

    trainer = make_trainer(folder, use_cpu=True, eval_dataset=Tokens(7), data_collator=padded, **options)
    trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 2
    trainer.args.per_device_eval_batch_size = 2
    trainer.train()
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


@pytest.mark.full
@needs_accelerate
@pytest.mark.parametrize("stage", [2, 3])
def test_a_trainer_that_cuts_sequences_evaluates_as_in_one_process(tmp_path, stage):
    of_trainer = "tests.zero.integrations.test_sequences:evaluated"
    expected = one_process(of_trainer, str(tmp_path / "plain"))
    assert len(set(expected)) == 2
    found = both_ranks(of_trainer, str(tmp_path / "cut"), zero={"stage": stage, "sequence_ranks": 2})
    assert found == [pytest.approx(expected, rel=1e-5)] * 2


@pytest.mark.promise("Y01", "Y05")
def test_a_pickle_of_a_model_has_its_own_attention():
    model, plain = make_model("llama", 2), make_model("llama", 2)
    for _ in range(2):
        zero.ulysses(None, model)
    zero.in_chunks(model, 4)
    pickled = pickle.dumps(model)
    assert b"zero.sequence" not in pickled, "it is loaded where zero is not installed"
    sent = pickle.loads(pickled)
    assert type(sent) is type(plain) and {each.config._attn_implementation for each in (sent, sent.model)} == {"sdpa"}
    assert sent.model.layers[0].self_attn.config is sent.config and type(sent.lm_head) is torch.nn.Linear
    tokens = batch_of({"packed": True}, 0)
    expected = plain(**tokens, use_cache=False)
    torch.testing.assert_close(sent(**tokens, use_cache=False).loss, expected.loss)
    assert torch.equal(model.lm_head.weight, plain.lm_head.weight) and model.config._attn_implementation == "ulysses_0"
