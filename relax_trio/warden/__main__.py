"""Start of the warden program: `python -I -S …/warden FD ENGINE_PID`; FD is its end of the engine's socket pair."""

import os
import sys

if __name__ == "__main__":
    # Isolated mode has no path to this package; appended, so that the standard library always wins.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from relax_trio.warden.program import main

    main(int(sys.argv[1]), int(sys.argv[2]))
