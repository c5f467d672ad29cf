"""Prints which accelerator this program is on, why, and what it offers.

    python examples/select_backend.py
    ACCELERATOR=cpu python examples/select_backend.py
"""

import torch

import accelerators
from accelerators.memory import format_table

accelerator = accelerators.current()
for candidate in accelerators.candidates():
    if candidate.priority < 0:
        continue  # taken on request only, so not even tried here
    is_chosen = candidate.usable and candidate.accelerator is accelerator
    print(f"{'*' if is_chosen else ' '} {candidate.name:5} {candidate.reason or 'usable'}")

dtype = accelerator.preferred_dtype()
model = torch.nn.Linear(1024, 1024).to(accelerator.device(), dtype)
model(torch.ones(8, 1024, device=accelerator.device(), dtype=dtype)).sum().backward()
accelerator.synchronize()

print(f"\nA model of {dtype} on {accelerator.device()}; torch.distributed should use {accelerator.communication_backend}.")
indices = range(accelerator.device_count())
print(format_table((str(accelerator.device(index)), accelerator.memory(index)) for index in indices))
