"""`python examples/train`, from wherever the checkout is; every rank is started the same way."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # or `import text` would be the one of this folder, for everybody
    from train.command import main

    sys.exit(main())
