"""`python -m relax_trio`: the same as `relax-trio`."""

from __future__ import annotations

import sys

from relax_trio.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
