"""The transport between ranks of one host: tensors through shared memory, small messages through pipes."""
