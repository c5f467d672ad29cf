"""Every home keeps the same promises, and a training needs nothing else of one."""

import os
from typing import ClassVar
from unittest import mock

import pytest
import torch

import accelerators
from tests import ranks
from tests.devices import needs_sim
from tests.loopback import solo
from tests.promises.loops import weights
from tests.promises.offloads import adamw, difference, send
from tests.traces import copied
from tests.zoo.case import real_mlp
from zero import shard
from zero.errors import ZeroError
from zero.memory.homes import registry
from zero.memory.homes.file import StateFile, page_aligned
from zero.memory.homes.home import DONE, DeviceHome
from zero.memory.homes.registry import Homes


def keeps_its_promises(home, device):
    """Values in and out, sums in the order in which they were added, and mirrors that are lent again."""
    values = torch.arange(6.0, device=device)
    stored = home.allocate(6, torch.float32)
    assert (stored.shape, stored.dtype, stored.device.type) == ((6,), torch.float32, home.device.type)
    home.write(values, stored).finish()
    assert stored.tolist() == [0, 1, 2, 3, 4, 5]
    target = torch.zeros(6, device=device)
    home.read(stored, target).wait()
    assert target.tolist() == [0, 1, 2, 3, 4, 5]

    total = home.allocate(6, torch.float32)
    for number in range(5):  # more than may be on their way
        home.add(torch.full((6,), float(number), device=device), 0.5, total, fresh=not number).wait()
    home.catch_up()
    assert total.tolist() == [5.0] * 6

    mirror = home.mirror(values[1:4])
    home.write(values[1:4], mirror).finish()
    assert mirror.tolist() == [1, 2, 3] and mirror.device.type == home.device.type
    home.give_back(mirror)
    lent = home.num_lent_bytes
    again = home.mirror(values[1:4])
    assert home.num_lent_bytes == lent
    home.give_back(again)
    home.release()
    assert home.num_lent_bytes == 0


def check_homes(rank, world):
    import accelerators_sim as simulated

    simulated.bring_up()
    simulated.configure(order="late")
    homes = Homes(accelerators.get("sim"), torch.device("sim:0"))
    for home in (homes.device, homes.host):
        keeps_its_promises(home, "sim:0")
    there, transfer = homes.move(torch.arange(4.0, device="sim:0").view(2, 2), homes.host)
    transfer.finish()
    back, _ = homes.move(there, homes.device)
    return there.device.type, there.tolist(), back.device.type, back.tolist()


@needs_sim
def test_the_device_and_the_host_beside_it_keep_the_promises_of_a_home():
    [found] = ranks.run(1, check_homes, apart="sim")
    assert found == ("cpu", [[0, 1], [2, 3]], "sim", [[0, 1], [2, 3]])


def test_where_the_device_is_the_host_both_are_one_home():
    homes = Homes(accelerators.get("cpu"), torch.device("cpu"))
    assert homes.host is homes.device
    keeps_its_promises(homes.device, "cpu")
    values = torch.ones(2)
    assert homes.device.mirror(values) is values and homes.device.write(values, values) is DONE


class FileHome(DeviceHome):
    """A home that the library does not have: what lives there is in mapped files."""

    made: ClassVar[list[int]] = []

    def __init__(self, accelerator, folder):
        super().__init__(torch.device("cpu"))
        self._folder = folder

    def allocate(self, numel, dtype):
        path = self._folder / str(len(self.made))
        self.made.append(numel)
        return torch.from_file(str(path), shared=True, size=numel, dtype=dtype)

    def mirror(self, tensor):
        return self.allocate(tensor.numel(), tensor.dtype)

    def add(self, values, factor, stored, fresh):
        return super().add(values.cpu(), factor, stored, fresh)


def train(rank, world, offload, folder):
    import accelerators_sim as simulated

    simulated.bring_up()
    simulated.configure(order="late")
    FileHome.made.clear()
    with mock.patch.object(registry, "HostHome", lambda accelerator: FileHome(accelerator, folder)):
        with torch.device("sim:0"):
            model = real_mlp()
        optimizer, found = shard(model, adamw(model), stage=2, group=solo(), dtype="bfloat16", offload=offload, clip=0.5), []
        for step in range(3):
            for micro in range(2):
                send(model, optimizer, rank, step, micro)
            optimizer.step()
            optimizer.zero_grad()
            found.append(copied(weights(model)))
        return found, len(FileHome.made)


@needs_sim
@pytest.mark.parametrize("offload", ["cpu", {"ratio": 0.5}])
def test_a_training_uses_a_home_that_the_library_does_not_have(tmp_path, offload):
    [(expected, none)] = ranks.run(1, train, None, tmp_path, apart="sim")
    [(found, made)] = ranks.run(1, train, offload, tmp_path, apart="sim")
    assert none == 0 < made
    assert difference(found, expected) is None


@pytest.mark.promise("H08")
def test_pages_that_change_places_are_noticed(tmp_path):
    file = StateFile(str(tmp_path), "masters")
    memory, page = (page_aligned(size, lambda wanted: torch.empty(wanted, dtype=torch.uint8)) for size in (2**17, 4096))
    memory.view(torch.int32).copy_(torch.arange(2**15))
    region = file.allocate(memory.nbytes)
    file.write(memory, region).finish()
    file.read(region, memory).finish()
    for one, other in ((0, 1), (3, 20)):
        for at, number in ((one, other), (other, one)):
            page.view(torch.int32).copy_(torch.arange(1024 * number, 1024 * (number + 1)))
            os.pwritev(file.fileno(), [page.numpy()], region.start + 4096 * at)
        with pytest.raises(ZeroError, match="the values are not those that were written"):
            file.read(region, memory).finish()
        file.write(memory.view(torch.int32).copy_(torch.arange(2**15)).view(torch.uint8), region).finish()
        file.read(region, memory).finish()
    file.close()
