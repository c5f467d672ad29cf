"""The engine with DeepSpeed's interface: forward, backward and step of a model, and its checkpoints."""
