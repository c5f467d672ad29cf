"""Collectives for devices that torch.distributed has no backend for: through the host, over gloo.

    torch.distributed.init_process_group(accelerators.current().communication_backend)

An accelerator without collectives of its own names this backend, "staged". Each collective is cut into chunks. A chunk is
copied to pinned host memory on a stream of the group, sent by gloo, and copied back on another one. While one chunk is on the
wire, the next one is copied out and the previous one is copied in. Where the device has no pinned memory, pageable memory
serves; where it has no streams, its one queue keeps the order.

| file         | what it is for                                                                   |
|--------------|----------------------------------------------------------------------------------|
| device.py    | what the group asks of an accelerator                                            |
| memory.py    | the host memory that chunks pass through                                         |
| work.py      | what a collective returns, and what waiting for it means                         |
| exchange.py  | one collective: its tensors, its chunks, the copies to the host and back         |
| pipeline.py  | the two threads of a group                                                       |
| sums.py      | which sums gloo can take                                                         |
| group.py     | the process group                                                                |
| backend.py   | finds out whether a device needs it, and registers it with torch                 |
"""
