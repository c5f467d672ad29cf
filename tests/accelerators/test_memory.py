import pytest

import accelerators
from accelerators.memory import MemoryReading, format_bytes, format_table, memory_cap, parse_bytes
from accelerators.testing import peak_of

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        *[("0", 0), ("1000", 1000), ("2k", 2000), ("500 MB", 500_000_000), (" 1.5 gib ", 3 * GIB // 2), ("1TiB", 1024 * GIB)],
        *[("9007199254740993", 9007199254740993), ("9" * 400, 10**400 - 1)],  # beyond what a float counts, or holds
    ],
)
def test_a_size_is_read_with_its_unit(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "4 giga", "-1", "1e9", "4GiBs", "\u0664GiB"])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"^Cannot take '.*' as a number of bytes: .*\. Write it like 4GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(None, "?"), (0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (GIB, "1.00 GiB"), (5 << 40, "5.00 TiB")],
)
def test_bytes_are_written_for_people(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_a_cap_bounds_total_and_what_this_process_may_still_take():
    reading = MemoryReading(total=100, available=80, allocated=15, peak=20)
    assert reading.capped(None) == reading
    assert reading.capped(50) == MemoryReading(total=50, available=35, allocated=15, peak=20)
    assert reading.capped(10).available == 0


def test_a_cap_above_what_is_there_changes_nothing():
    # Memory that a process holds may be reclaimable, and so still counts as available: total - allocated is no bound.
    reading = MemoryReading(total=100, available=90, allocated=15, peak=20)
    assert reading.capped(1000) == reading
    assert reading.capped(106).available == 90


def test_a_cap_gives_figures_to_a_device_that_tells_none():
    assert MemoryReading(None, None, None, None).capped(50) == MemoryReading(50, 50, None, None)


def test_the_cap_is_read_from_the_environment_at_each_call(monkeypatch):
    monkeypatch.delenv("ACCELERATOR_MEMORY", raising=False)
    assert memory_cap() is None
    monkeypatch.setenv("ACCELERATOR_MEMORY", " ")
    assert memory_cap() is None
    monkeypatch.setenv("ACCELERATOR_MEMORY", "4GiB")
    assert memory_cap() == 4 * GIB
    assert accelerators.get("cpu").memory().total <= 4 * GIB


@pytest.mark.parametrize("text", ["lots", "0"])
def test_a_cap_that_is_no_size_names_the_variable(monkeypatch, text):
    monkeypatch.setenv("ACCELERATOR_MEMORY", text)
    with pytest.raises(ValueError, match=f"Cannot use ACCELERATOR_MEMORY={text}: "):
        accelerators.get("cpu").memory()


def test_a_reading_prints_on_one_line_and_several_as_a_table():
    reading = MemoryReading(total=4 * GIB, available=None, allocated=GIB, peak=2 * GIB)
    assert str(reading) == "allocated 1.00 GiB, peak 2.00 GiB, available ?, total 4.00 GiB"
    head, first, second = format_table([("cuda:0", reading), ("cuda:1", reading)]).splitlines()
    assert head.split() == ["allocated", "peak", "available", "total"]
    assert first.split() == ["cuda:0", "1.00", "GiB", "2.00", "GiB", "?", "4.00", "GiB"]
    assert len(head) == len(first) == len(second)


def test_a_peak_that_cannot_be_reset_is_not_given_for_a_function():
    class NoReset(accelerators.Accelerator):
        name = "cpu"

        def read_memory(self, index):
            return MemoryReading(100, 50, 10, 90, "process start")

    assert peak_of(NoReset(), lambda: 5) == (5, None)
