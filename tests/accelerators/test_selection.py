"""The policy of choosing: by name, by environment, by priority, and which device."""

import logging
import sys

import pytest
import torch

from accelerators.selection import (
    BUILT_IN,
    Candidate,
    Registration,
    Registry,
    Request,
    Selection,
    choose,
    choose_index,
    parse_request,
    requested_by,
)
from tests.accelerators.fakes import fake_device_module, give_torch, install_plugin


@pytest.fixture
def registry(monkeypatch):
    for variable in ("ACCELERATOR", "DS_ACCELERATOR", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    # None of the real plug-ins, whatever this machine has installed: a None there makes them look not installed.
    for plugin in ("torch_npu", "torch_mlu", "torch_musa", "torch_gcu", "torch_sdaa", "torch_supa", "habana_frameworks"):
        monkeypatch.delitem(sys.modules, plugin, raising=False)
    give_torch(monkeypatch, cuda=fake_device_module(0), xpu=fake_device_module(0), mps=fake_device_module(0))
    return Registry(BUILT_IN, find_entry_points=lambda group: [])


# The importable modules, what torch then has (by number of devices, None for no module), and the accelerator that is taken.
SITUATIONS = {
    "nothing but a CPU": ((), {}, "cpu"),
    "a plug-in is importable, and that is all": (("torch_npu",), {"npu": None}, "cpu"),
    "a plug-in has a module and no device": (("torch_npu",), {"npu": 0}, "cpu"),
    "a plug-in has devices": (("torch_npu",), {"npu": 2}, "npu"),
    "a plug-in without devices does not hide a GPU": (("torch_npu",), {"npu": 0, "cuda": 1}, "cuda"),
    "what torch has built in goes before a plug-in": (("torch_npu",), {"npu": 8, "cuda": 1}, "cuda"),
    "an integrated XPU does not beat a GPU": ((), {"xpu": 1, "cuda": 1}, "cuda"),
    "Intel's extension does not push GPU users to the CPU": (("intel_extension_for_pytorch",), {"cuda": 1}, "cuda"),
    "Intel's extension without an XPU": (("intel_extension_for_pytorch",), {"xpu": 0}, "cpu"),
    "a GPU build without a GPU, beside an XPU": ((), {"cuda": 0, "xpu": 1}, "xpu"),
    "two plug-ins with devices, in the order of their names": (("torch_npu", "torch_mlu"), {"npu": 1, "mlu": 1}, "mlu"),
    "a device that answers as cuda too goes first": (("torch_supa",), {"supa": 1, "cuda": 1}, "supa"),
    "an Apple GPU": ((), {"mps": 1}, "mps"),
}


@pytest.mark.promise("X03")
@pytest.mark.parametrize("situation", SITUATIONS)
def test_unasked_the_best_that_has_a_device_is_taken(registry, monkeypatch, situation):
    importable, devices, expected = SITUATIONS[situation]
    for plugin in importable:
        install_plugin(monkeypatch, plugin)
    give_torch(monkeypatch, **{name: None if n is None else fake_device_module(n) for name, n in devices.items()})
    chosen = Selection(registry).current()
    assert (chosen.name, chosen.accelerator.name) == (expected, expected)
    assert chosen.why == "the usable one of highest priority"
    reasons = {candidate.name: candidate.reason for candidate in registry}
    for name, count in devices.items():
        assert (reasons[name] is None) == bool(count)


@pytest.mark.promise("X03")
def test_explicit_goes_before_environment_and_environment_before_probing(registry, monkeypatch):
    give_torch(monkeypatch, cuda=fake_device_module(1), xpu=fake_device_module(1))
    assert Selection(registry).current().name == "cuda"
    monkeypatch.setenv("ACCELERATOR", "xpu")
    chosen = Selection(registry).current()
    assert (chosen.name, chosen.why) == ("xpu", "ACCELERATOR=xpu")
    chosen = Selection(registry).use("cpu")
    assert (chosen.name, chosen.why) == ("cpu", "accelerators.use('cpu')")


@pytest.mark.promise("X03")
def test_equal_priorities_are_said_in_the_log(registry, monkeypatch, caplog):
    install_plugin(monkeypatch, "torch_npu")
    install_plugin(monkeypatch, "torch_mlu")
    give_torch(monkeypatch, npu=fake_device_module(1), mlu=fake_device_module(1))
    with caplog.at_level(logging.INFO, "accelerators"):
        choose(registry)
    assert "Accelerators mlu, npu have the same priority; mlu is taken." in caplog.text


def test_what_cannot_win_is_not_tried(registry, monkeypatch):
    tried = []
    registry.add(Registration("mydev", lambda: tried.append(True), priority=10))
    give_torch(monkeypatch, cuda=fake_device_module(1))
    assert choose(registry).name == "cuda"
    assert not tried


REQUESTS = [
    ("cuda", Request("cuda", None, "it")),
    (" CUDA ", Request("cuda", None, "it")),
    ("Cuda:1", Request("cuda", 1, "it")),
    (" cuda : 12 ", Request("cuda", 12, "it")),
    ("", None),
    ("   ", None),
]


@pytest.mark.promise("X04")
@pytest.mark.parametrize(("text", "request_"), REQUESTS)
def test_a_name_is_normalised(text, request_):
    assert parse_request(text, "it") == request_


@pytest.mark.promise("X04")
@pytest.mark.parametrize("text", [":", ":1", "cuda:", "cuda:x", "cuda:-1", "cuda:1.0", "cuda:1:2"])
def test_what_is_no_name_is_refused_in_three_parts(text):
    with pytest.raises(ValueError, match=r"^Cannot use it: .*\. Write it like cuda or cuda:1"):
        parse_request(text, "it")


ENVIRONMENTS = [
    ({}, None),
    ({"ACCELERATOR": ""}, None),
    ({"ACCELERATOR": "xpu"}, "xpu"),
    ({"DS_ACCELERATOR": "xpu"}, "xpu"),
    ({"ACCELERATOR": "cpu", "DS_ACCELERATOR": "xpu"}, "cpu"),
    ({"ACCELERATOR": " ", "DS_ACCELERATOR": "XPU "}, "xpu"),
]


@pytest.mark.promise("X04")
@pytest.mark.parametrize(("environment", "name"), ENVIRONMENTS)
def test_accelerator_goes_before_ds_accelerator_and_empty_is_unset(environment, name):
    request = requested_by(environment)
    assert (request.name if request else None) == name


@pytest.mark.promise("X04")
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("cdua", r"Cannot use ACCELERATOR=cdua: no .* named 'cdua'\. Use one of cpu, cuda, .*\. Did you mean 'cuda'\?"),
        ("zzz", r"no accelerator is named 'zzz'\. Use one of cpu, cuda, .*\. Register your own"),
        ("cuda", r"Cannot use ACCELERATOR=cuda: torch.cuda.is_available\(\) is False .*\. Install"),
        ("sim", r"Cannot use ACCELERATOR=sim: its package is not installed\. Do: pip install zero-accelerators-sim "),
        ("npu", r"Cannot use ACCELERATOR=npu: torch_npu is not installed\. Install"),
        ("cpu:1", r"Cannot use ACCELERATOR=cpu:1: 1 cpu is visible here\. Use cpu:0"),
        ("xpu:", r"Cannot use ACCELERATOR=xpu:: "),
    ],
)
def test_what_was_asked_for_and_cannot_be_had_is_an_error_and_never_the_cpu(registry, monkeypatch, value, message):
    monkeypatch.setenv("ACCELERATOR", value)
    choice = Selection(registry)
    with pytest.raises(ValueError, match=message):
        choice.current()
    assert choice.chosen is None


# Visible devices, environment, index asked for, and which device it is, or what the error says.
INDICES = [
    (1, {}, None, None),
    (4, {}, None, None),
    (4, {"LOCAL_RANK": ""}, None, None),
    (4, {"LOCAL_RANK": "0"}, None, 0),
    (4, {"LOCAL_RANK": "3"}, None, 3),
    (4, {"LOCAL_RANK": " 3 "}, None, 3),
    (1, {"LOCAL_RANK": "3"}, None, 0),  # the launcher shows each rank a device of its own
    (4, {"LOCAL_RANK": "1"}, 2, 2),
    (2, {"LOCAL_RANK": "2"}, None, "Cannot use LOCAL_RANK=2: only 2 devices are visible here. Start one rank a device"),
    (2, {"LOCAL_RANK": "7"}, None, "Cannot use LOCAL_RANK=7: only 2"),
    (2, {"LOCAL_RANK": "-1"}, None, "Cannot use LOCAL_RANK=-1: it takes a whole number"),
    (2, {"LOCAL_RANK": "one"}, None, "Cannot use LOCAL_RANK=one: it takes a whole number"),
    (2, {}, 2, "Cannot use dev:2: 2 dev are visible here. Use dev:0 to dev:1."),
    (2, {"RANK": "9", "LOCAL_RANK": "1"}, None, 1),  # a node with fewer devices than others: only the local rank counts
]


@pytest.mark.promise("X07")
@pytest.mark.parametrize(("visible", "environment", "asked", "expected"), INDICES)
def test_the_device_is_the_local_rank_where_there_is_one_and_an_error_where_not(visible, environment, asked, expected):
    request = None if asked is None else Request("dev", asked, f"dev:{asked}")
    if isinstance(expected, str):
        with pytest.raises(ValueError) as error:
            choose_index(request, environment, visible)
        assert expected in str(error.value)
    else:
        assert choose_index(request, environment, visible) == expected


@pytest.mark.promise("X07")
def test_the_device_is_set_when_the_choice_is_made_before_anything_is_allocated(registry, monkeypatch):
    give_torch(monkeypatch, cuda=fake_device_module(4))
    monkeypatch.setenv("LOCAL_RANK", "3")
    accelerator = Selection(registry).current().accelerator
    assert accelerator.current_index() == 3
    assert accelerator.device() == torch.device("cuda:3")


def test_a_usable_candidate_of_negative_priority_is_never_taken_unasked():
    cpu = Candidate(next(registration for registration in BUILT_IN if registration.name == "cpu"))
    on_request = Candidate(Registration("other", "accelerators.backends.cpu:CpuAccelerator", priority=-1))
    assert on_request.usable
    assert choose([cpu, on_request]) is cpu
