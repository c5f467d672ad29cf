"""`python examples/train`, from wherever the checkout is; every rank is started the same way."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Otherwise `import text` would find this folder's module, for all code.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from train.command import main

    sys.exit(main())
