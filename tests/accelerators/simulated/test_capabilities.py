"""Each capability that can be taken away is really gone: its attributes are absent, or what needs it raises."""

import pytest
import torch

import accelerators
from accelerators import Accelerator
from accelerators_sim import CAPABILITIES, SimulatedAccelerator, without
from accelerators_sim.module import _BY_CAPABILITY

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}

# Every way in which a tensor of a dtype can come to be on the device.
WAYS = {
    "made": lambda dtype: torch.empty(3, dtype=dtype, device="sim"),
    "filled": lambda dtype: torch.full((3,), 1.0, dtype=dtype, device="sim"),
    "from numbers": lambda dtype: torch.tensor([1.0, 2.0], dtype=dtype, device="sim"),
    "moved": lambda dtype: torch.ones(3, dtype=dtype).to("sim"),
    "cast": lambda dtype: torch.ones(3, device="sim").to(dtype),
    "summed in": lambda dtype: torch.ones(3, device="sim").sum(dtype=dtype),
    "a result in": lambda dtype: torch.softmax(torch.ones(3, device="sim"), 0, dtype=dtype),
    # Not written with +, which makes any TypeError one about operands.
    "bytes seen as it and added": lambda dtype: torch.add(torch.zeros(8, dtype=torch.uint8, device="sim").view(dtype), 0),
    "a model's": lambda dtype: torch.nn.Linear(2, 2).to("sim").to(dtype),
}
# Norms are taken in a wider dtype than their input's, which only fp64 can be.
WIDER = {
    "a norm in": lambda dtype: torch.linalg.vector_norm(torch.ones(3, device="sim"), dtype=dtype),
    "norms in": lambda dtype: torch._foreach_norm([torch.ones(3, device="sim")], 2, dtype),
}


@pytest.mark.parametrize("name", sorted(_BY_CAPABILITY))
def test_what_a_capability_gives_is_absent_without_it(sim, name):
    with without(name):
        for attribute in _BY_CAPABILITY[name]:
            assert not hasattr(sim, attribute), attribute
            assert attribute not in dir(sim)
    for attribute in _BY_CAPABILITY[name]:
        assert hasattr(sim, attribute) and attribute in dir(sim)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("capability", DTYPES)
def test_no_tensor_of_a_missing_dtype_comes_to_be(sim, capability, way):
    with without(capability), pytest.raises(TypeError, match=f"SIM_WITHOUT={capability}"):
        WAYS[way](DTYPES[capability])


@pytest.mark.promise("D08")
def test_without_fp64_every_double_tensor_raises_and_norms_are_taken_in_what_there_is(sim):
    with without("fp64"):
        for make in (*WAYS.values(), *WIDER.values()):
            with pytest.raises(TypeError, match="fp64"):
                make(torch.float64)
        it = SimulatedAccelerator()
        assert torch.float64 not in it.supported_dtypes()
        x = torch.full((16,), 3.0, device=it.device())
        assert torch.linalg.vector_norm(x, dtype=it.norm_dtype()).item() == 12.0
        assert torch.nn.utils.get_total_norm([x]).item() == 12.0
    assert torch.ones(3, dtype=torch.float64, device="sim").sum().item() == 3.0


def test_what_the_accelerator_found_out_without_a_capability_is_not_believed_once_it_is_back(sim):
    it = accelerators.get("sim")
    for _ in range(2):
        assert it.can_pin and it.supports(torch.bfloat16)
        with without("pin", "bf16"):
            assert not it.can_pin and not it.supports(torch.bfloat16)


@pytest.mark.parametrize("capability", DTYPES)
def test_the_accelerator_says_which_dtypes_are_missing(sim, capability):
    with without(capability):
        it = SimulatedAccelerator()
        assert not it.supports(DTYPES[capability])
        assert set(it.supported_dtypes()) == {torch.float32, *DTYPES.values()} - {DTYPES[capability]}
    assert SimulatedAccelerator().supports(DTYPES[capability])


def test_without_streams_every_copy_blocks_and_code_for_streams_runs_unchanged(sim):
    with without("streams"):
        x, host = torch.ones(4, device="sim"), torch.zeros(4, pin_memory=True)
        host.copy_(x, non_blocking=True)
        assert host.tolist() == [1.0] * 4
        it = SimulatedAccelerator()
        with it.in_stream(it.new_stream()) as stream:
            stream.wait_stream(it.current_stream())
            it.new_event().record(stream)
        assert (x + 1).tolist() == [2.0] * 4


def test_without_record_stream_it_raises(sim):
    x = torch.ones(4, device="sim")
    x.record_stream(sim.current_stream())
    with without("record_stream"), pytest.raises(NotImplementedError, match="Keep a reference"):
        x.record_stream(sim.current_stream())


def test_without_memory_figures_the_accelerator_gives_none(sim):
    with without("memory_figures"):
        reading = SimulatedAccelerator().memory()
        assert (reading.total, reading.available, reading.allocated, reading.peak) == (None,) * 4


def test_a_capability_that_is_not_there_is_refused_with_the_known_ones(sim):
    with pytest.raises(ValueError, match=r"no capability teleport\. Take away some of streams, events"):
        with without("teleport"):
            pass
    assert all(len(meaning) > 8 for meaning in CAPABILITIES.values())


def test_the_accelerator_is_short(sim):
    own = {name for name in vars(SimulatedAccelerator) if not name.startswith("__")}
    assert own <= {*vars(Accelerator), "_has_generic_streams"}


@pytest.mark.parametrize("number", [3, 2.5, 0.1, True])
@pytest.mark.parametrize("operator", [torch.remainder, torch.fmod, torch.mul, torch.add, torch.div])
def test_a_number_in_the_place_of_a_tensor_gives_what_it_gives_on_the_host(operator, number, sim):
    """In each dtype, and of tensors without dimensions, where a tensor in its place would change it."""
    for dtype in (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for there in (torch.arange(1, 6).to(dtype), torch.tensor(7).to(dtype)):
            expected, found = operator(there, number), operator(there.to("sim"), number)
            assert found.dtype == expected.dtype and torch.equal(found.cpu(), expected), (dtype, there.shape)
