"""The command-line arguments that DeepSpeed's scripts have."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config`, which `initialize(args=...)` reads."""
    group = parser.add_argument_group("DeepSpeed", "configuration of the engine")
    group.add_argument("--deepspeed", action="store_true", help="for scripts that ask; initialize is what shards")
    group.add_argument("--deepspeed_config", type=str, default=None, help="a DeepSpeed file")
    return parser
