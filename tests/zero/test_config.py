"""What ZeroConfig accepts, refuses and says."""

import inspect
import json
import pickle
import subprocess
import sys

import hypothesis
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from accelerators.memory import parse_bytes
from tests.config_values import NEEDED, OTHER_VALUES
from zero.config.registry import FUSED_IN_TORCH, OPTIMIZERS, SCHEDULES
from zero.config.schema import Batch, LossScale, OptimizerSpec, ScheduleSpec, ZeroConfig

# Anything, and most of it for any field wrong.
ODD_THINGS = [
    10**400, float("nan"), 2**63, "auto", "cpu", "float16", "bf16", "mean", "\ud800", object(), torch.float16, LossScale,
    {1: 2}, {"home": "nvme"}, {"kind": "Adam"}, {"kind": []}, {"initial": 0}, (), ("a", 1), torch.ones(2),
]  # fmt: skip
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.binary(max_size=3),
    st.sampled_from(ODD_THINGS), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["home", "kind", "settings", "window", "x"]), st.integers()),
)  # fmt: skip
CHOSEN = st.sets(st.sampled_from(sorted(OTHER_VALUES)), max_size=6)


def in_a_fresh_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_reading_a_configuration_imports_no_torch():
    assert in_a_fresh_python("import sys, zero.config.deepspeed.reader; print('torch' in sys.modules)") == "False"


def test_the_command_line_imports_no_pydantic_before_it_is_needed():
    assert in_a_fresh_python("import sys, zero.__main__; print('pydantic' in sys.modules)") == "False"


def test_every_field_is_in_the_text_and_in_the_digest():
    assert set(OTHER_VALUES) == set(ZeroConfig.model_fields)
    for name, value in OTHER_VALUES.items():
        base = {"stage": 2, **NEEDED.get(name, {})}
        plain, other = ZeroConfig(**base), ZeroConfig(**{**base, name: value})
        assert plain.digest != other.digest, name
        assert plain.text().splitlines()[:-1] != other.text().splitlines()[:-1], name


def test_equal_configurations_have_equal_digests_whatever_order_they_were_written_in():
    one = ZeroConfig(stage=2, clip=1, optimizer=OptimizerSpec.of("adamw", {"lr": 1e-3, "eps": 1e-8}))
    two = ZeroConfig(optimizer=OptimizerSpec.of("AdamW", {"eps": 1e-8, "lr": 0.001}), clip=1.0, stage=2)
    assert one == two and hash(one) == hash(two) and one.digest == two.digest and one.text() == two.text()


@pytest.mark.promise("N10")
def test_nothing_is_clipped_unless_asked():
    assert ZeroConfig(stage=2).clip is None
    assert "clip = none" in ZeroConfig(stage=2).text().splitlines()


def test_a_configuration_comes_back_from_json_and_pickle():
    config = ZeroConfig(
        stage=1, dtype="float16", keep_fp32=["norm", "head"], loss_scale=LossScale(window=7), offload="host",
        optimizer=OptimizerSpec.of("Adam", {"betas": [0.8, 0.9]}), batch=Batch.of(global_samples=12, world_size=3),
    )
    assert ZeroConfig.model_validate_json(json.dumps(config.as_dict())) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_nothing_in_a_configuration_can_be_changed():
    config = ZeroConfig(stage=1, optimizer=OptimizerSpec.of("Adam"), loss_scale=LossScale())
    for block, name in ((config, "stage"), (config.loss_scale, "window"), (config.optimizer, "kind")):
        with pytest.raises(ValueError, match="frozen"):
            setattr(block, name, 2)
    config.optimizer.kwargs["lr"] = 7.0
    assert config.optimizer.kwargs["lr"] == 1e-3


@pytest.mark.promise("E04")
def test_what_the_caller_passes_is_not_changed():
    names, params = ["norm"], {"lr": 1e-3, "betas": [0.9, 0.95]}
    one = ZeroConfig(stage=1, keep_fp32=names, optimizer=OptimizerSpec.of("AdamW", params))
    assert names == ["norm"] and params == {"lr": 1e-3, "betas": [0.9, 0.95]}
    names.append("head")
    params["betas"][0] = 0.0
    assert one.keep_fp32 == ("norm",) and one.optimizer.kwargs["betas"] == (0.9, 0.95)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ZeroConfig(), "'stage' is missing"),
        (lambda: ZeroConfig(stage=4), "Cannot use stage=4: "),
        (lambda: ZeroConfig(stage=-1), "Cannot use stage=-1: "),
        (lambda: ZeroConfig(stage=True), "Cannot use stage=True: "),
        (lambda: ZeroConfig(stage="2"), "Cannot use stage='2': "),
        (lambda: ZeroConfig(stage=1, buckets=2), "Did you mean 'bucket_bytes'"),
        (lambda: ZeroConfig(stage=1, bucket_bytes=0), "bucket_bytes=0: "),
        (lambda: ZeroConfig(stage=1, clip=float("nan")), "clip=nan: "),
        (lambda: ZeroConfig(stage=1, reduce=0), "reduce=0: "),
        (lambda: ZeroConfig(stage=1, offload="disk"), "Cannot use offload='disk': .*Use offload='cpu'"),
        (lambda: ZeroConfig(stage=1, timeout_s=0), "timeout_s=0: "),
        (lambda: ZeroConfig(stage=1, loss_scale=LossScale(), dtype="bfloat16"), "Leave loss_scale out"),
        (lambda: ZeroConfig(stage=1, loss_scale="high"), "Give a number for a fixed scale"),
        (lambda: ZeroConfig(stage=1, loss_scale=True), "Give a number for a fixed scale"),
        (lambda: ZeroConfig(stage=1, loss_scale=LossScale(), on_nonfinite="propagate"), "Use 'skip'"),
        (lambda: ZeroConfig(stage=1, dtype="float16", on_nonfinite="propagate"), "Leave on_nonfinite out"),
        (lambda: ZeroConfig(stage=1, dtype="float16", loss_scale=8.0, on_nonfinite="propagate"), "Leave on_nonfinite out"),
        (lambda: ZeroConfig(stage=1, cast_inputs=True), "Give dtype"),
        (lambda: ZeroConfig(stage=1, autocast="bfloat16", dtype="float16"), "Use one dtype for both"),
        (lambda: ZeroConfig(stage=1, predivide=2.0, reduce="sum"), "Leave predivide out"),
        (lambda: ZeroConfig(stage=1, kernels="fused", optimizer=OptimizerSpec.of("Lion")), "Use kernels='torch'"),
        (lambda: ZeroConfig(stage=1, accumulation=3, batch=Batch.of(micro_samples=1)), "Give one of the two"),
        (lambda: OptimizerSpec.of("LBFGS"), "evaluates the loss several times a step"),
        (lambda: OptimizerSpec.of("onebitadam"), "compressed communication"),
        (lambda: OptimizerSpec.of("AdamX"), "Did you mean 'Adam"),
        (lambda: OptimizerSpec.of(3), "it is not a name"),
        (lambda: OptimizerSpec.of("AdamW", {"lr": -1}), "AdamW.lr -1: it has to lie in"),
        (lambda: OptimizerSpec.of("AdamW", {"lr": "1e-3"}), "AdamW.lr '1e-3': it has to be a number"),
        (lambda: OptimizerSpec.of("AdamW", {"lr": 10**400}), "has to be finite"),
        (lambda: OptimizerSpec.of("AdamW", {"betas": [0.9]}), "has to be two numbers"),
        (lambda: OptimizerSpec.of("AdamW", {"betas": [0.9, 1.0]}), "has to lie in \\[0, 1\\)"),
        (lambda: OptimizerSpec.of("AdamW", {"learning_rate": 1}), "has no such setting"),
        (lambda: ScheduleSpec.of("WarmupDecayLR"), "'total_num_steps' is missing"),
        (lambda: ScheduleSpec.of("WarmupLR", {"warmup_num_steps": 0}), "has to be at least 1"),
        (lambda: ScheduleSpec.of("WarmupLR", {"warmup_type": "cosine"}), "has to be one of log, linear"),
        (lambda: ScheduleSpec.of("Warmup"), "Did you mean 'WarmupLR'"),
    ],
)
@pytest.mark.promise("E06")
def test_what_cannot_be_is_refused_in_words_that_help(make, words):
    with pytest.raises(ValueError, match=words) as caught:
        make()
    message = str(caught.value)
    # What was asked or found, and then a remedy: two sentences at least, and none of pydantic's own.
    assert message.rstrip().endswith((".", "?")) and message.count(". ") >= 1, message
    assert "pydantic" not in message and "validation error" not in message


def test_a_loss_scale_is_a_number_a_word_or_its_settings():
    assert ZeroConfig(stage=1, loss_scale=256).loss_scale == LossScale(dynamic=False, initial=256.0)
    assert ZeroConfig(stage=1, loss_scale="dynamic").loss_scale == LossScale()
    assert ZeroConfig(stage=1, loss_scale={"window": 7}).loss_scale == LossScale(window=7)


@pytest.mark.parametrize(
    "settings",
    [
        {"window": 0}, {"window": -1}, {"window": 1.5}, {"window": True}, {"hysteresis": 0}, {"minimum": 0.0},
        {"minimum": -1.0}, {"initial": float("inf")}, {"initial": float("nan")}, {"initial": 0.0}, {"initial": 2.0**128},
        {"max_skips": 0}, {"initial": 1.0, "minimum": 2.0},
    ],
)
@pytest.mark.promise("N14")
def test_a_loss_scale_that_cannot_work_is_refused_at_construction(settings):
    with pytest.raises(ValueError, match=r"loss_scale\.|start the loss scale"):
        LossScale(**settings)


@pytest.mark.parametrize(
    ("given", "world_size", "expected"),
    [
        # global, micro, accumulation -> the same three, all known
        ((32, 4, 2), 4, (32, 4, 2)),
        ((32, 4, None), 4, (32, 4, 2)),
        ((32, None, 2), 4, (32, 4, 2)),
        ((None, 4, 2), 4, (32, 4, 2)),
        ((32, None, None), 4, (32, 8, 1)),
        ((None, 4, None), 4, (16, 4, 1)),
        ((3, None, None), 3, (3, 1, 1)),
        ((32, 4, 3), 4, "make 48"),
        ((33, 4, None), 4, "not a multiple"),
        ((33, None, 2), 4, "not a multiple"),
        ((30, None, None), 4, "not a multiple"),
        ((2, None, None), 4, "not a multiple"),
        ((None, None, 2), 4, "only accumulation=2 is known"),
        ((None, None, None), 4, "only accumulation=None is known"),
        ((0, 4, 2), 4, "global_samples=0"),
        ((32, -4, 2), 4, "micro_samples=-4"),
        ((32, 4, 2.0), 4, "accumulation=2.0"),
        ((32, True, 2), 4, "micro_samples=True"),
        ((32, 4, 2), 0, "world_size=0"),
    ],
)
@pytest.mark.promise("E07")
def test_the_batch_identity_holds_or_the_batch_is_refused(given, world_size, expected):
    sizes = dict(zip(("global_samples", "micro_samples", "accumulation"), given, strict=True))
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            Batch.of(**sizes, world_size=world_size)
        return
    batch = Batch.of(**sizes, world_size=world_size)
    assert (batch.global_samples, batch.micro_samples, batch.accumulation) == expected
    assert ZeroConfig(stage=0, batch=batch).accumulation == expected[2]


@pytest.mark.promise("E07")
def test_a_batch_made_by_hand_keeps_the_identity_too():
    with pytest.raises(ValueError, match="make 8"):
        Batch(global_samples=9, micro_samples=2, accumulation=2, world_size=2)


@pytest.mark.parametrize("kind", sorted(set(OPTIMIZERS) - {"Lion", "Muon", "PlainAdam"}))  # test_muon.py has Muon
def test_every_optimizer_by_name_can_be_built_from_its_settings(kind):
    torch_class = getattr(torch.optim, kind)
    settings = OptimizerSpec.of(kind).kwargs
    optimizer = torch_class([torch.nn.Parameter(torch.ones(2))], **settings)
    # Decay is the one thing that has another default here: DeepSpeed's AdamW decays nothing unless told to.
    for name, parameter in inspect.signature(torch_class).parameters.items():
        if name in settings and name != "weight_decay":
            assert settings[name] == parameter.default, name
            assert optimizer.param_groups[0][name] == parameter.default, name


def test_the_optimizers_with_a_fused_kernel_are_those_that_torch_has_one_for():
    kinds = {kind: getattr(torch.optim, kind) for kind in OPTIMIZERS if hasattr(torch.optim, kind)}
    assert {name for name, kind in kinds.items() if "fused" in inspect.signature(kind).parameters} == FUSED_IN_TORCH


def test_every_schedule_by_name_lists_each_of_its_settings():
    required = {"total_num_steps": 10, "cycle_min_lr": 0.1, "cycle_max_lr": 0.2}
    for kind, settings in SCHEDULES.items():
        spec = ScheduleSpec.of(kind, {name: value for name, value in required.items() if name in settings})
        assert set(spec.kwargs) == set(settings)


@pytest.mark.parametrize("field", ["loss_scale", "offload", "report", "batch", "optimizer", "schedule"])
def test_settings_of_a_block_whose_names_are_no_texts_are_refused(field):
    with pytest.raises(ValueError, match="names of settings in a block are not strings"):
        ZeroConfig(stage=2, **{field: {1: 2}})


# Any configuration ------------------------------------------------------------------------------------------------------


def made(given_settings):
    """The configuration, or None where it is refused; it must be by a ValueError, with what was found and what to do."""
    try:
        return ZeroConfig(**given_settings)
    except ValueError as error:
        assert str(error).endswith((".", "?")) and ". " in str(error) and "pydantic" not in str(error), error
        return None


@hypothesis.settings(max_examples=75, deadline=None)
@given(CHOSEN, st.sampled_from([*sorted(OTHER_VALUES), "stages", ""]), ODD)
def test_a_configuration_with_one_field_broken_is_refused_with_a_value_error_and_repaired_it_is_accepted(chosen, field, odd):
    valid = {"stage": 2, **{name: OTHER_VALUES[name] for name in chosen}}
    whole = made(valid)
    assume(whole is not None)
    broken = made({**valid, field: odd})
    if broken is not None:
        assert made(broken.model_dump()) == broken and len(broken.digest) == 12
    elif field in OTHER_VALUES:  # its neighbours: the value that it had, and the others that go with the rest
        assert made({**valid, field: odd} | {field: getattr(whole, field)}) == whole
        assert made({"stage": 2, field: OTHER_VALUES[field], **NEEDED.get(field, {})}) is not None


@hypothesis.settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(OTHER_VALUES)) | st.text(max_size=4), ODD, max_size=5))
def test_any_settings_are_accepted_or_refused_with_a_value_error(anything):
    made(anything)
    made({"stage": 1, **anything})


@pytest.mark.parametrize("text", ["16MiB", "1.5GiB", "500 MB", "4096", "4k", "1e6", "-1", "16Mib ", "auto"])
def test_every_size_is_read_alike_and_as_the_command_line_and_accelerators_read_it(text):
    """A text that is no size for one of them is none for the others."""
    homes = lambda size: {"homes": {"moments": "disk:/fast", "piece_bytes": size}}  # noqa: E731
    try:
        expected = parse_bytes(text)
    except ValueError:
        expected = "auto" if text == "auto" else None
    for name in ("bucket_bytes", "gathered_bytes", "piece_bytes"):
        given = homes(text) if name == "piece_bytes" else {name: text}
        fits = expected == "auto" or (expected is not None and (name != "piece_bytes" or expected % 4096 == 0))
        if fits:
            config = ZeroConfig(stage=3, **given)
            assert (config.homes.piece_bytes if name == "piece_bytes" else getattr(config, name)) == expected
        else:
            with pytest.raises(ValueError, match=f"{name}="):
                ZeroConfig(stage=3, **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"clip": 0}, "Cannot use clip=0: it must be above 0. Use clip=None to turn clipping off."),
        ({"bucket_bytes": "16 miles"}, "Cannot use bucket_bytes='16 miles': it takes 'auto' or a whole number of bytes, such "
                                       "as '16MiB'. Use bucket_bytes='auto'."),
        ({"reduce": "avg"}, "Cannot use reduce='avg': it takes 'mean', 'sum' or a number. Use reduce='mean'."),
        ({"dtype": "bf16"}, "Cannot use dtype='bf16': it takes 'float32', 'bfloat16' or 'float16'. Did you mean 'bfloat16'?"),
        ({"dtype": "fp16"}, "Cannot use dtype='fp16': it takes 'float32', 'bfloat16' or 'float16'. Did you mean 'float16'?"),
        ({"bucket_size": 1}, "Cannot use bucket_size: zero.shard has no such option. Did you mean 'bucket_bytes'? All options "
                             "are in docs/config.md."),
        ({"offload": "nvme"}, "Cannot use offload='nvme': offload is for host memory. Use offload='cpu'; for a disk, "
                              "homes={'masters': 'disk:/fast', 'moments': 'disk:/fast'}."),
        ({"offload": True}, "Cannot use offload=True: name the place. Use offload='cpu'."),
        ({"offload": False}, "Cannot use offload=False: name the place. Use offload=None."),
        ({"homes": {"optimizer": "cpu"}}, "Cannot use homes.optimizer: the kinds of state are weights, gradients, masters and "
                                          "moments. Use homes={'masters': 'cpu', 'moments': 'cpu'}."),
        ({"offload": {"ratio": 2.0}}, "Cannot use offload.ratio=2.0: it must be at most 1. Use offload.ratio=1.0."),
    ],
)  # fmt: skip
def test_an_error_names_the_argument_the_reason_and_one_remedy(given, words):
    with pytest.raises(ValueError) as error:
        ZeroConfig(stage=2, **given)
    assert str(error.value) == words
