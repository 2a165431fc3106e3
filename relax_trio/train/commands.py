"""What the engine and its trainer processes say to each other: pickled, behind the length.

Both ends are this package on one machine; on the socket between them nobody is let in but the processes that the engine
started (processes.py).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from attrs import frozen

from relax_trio.train.settings import TrainerSettings

LENGTH = struct.Struct(">Q")
"""What stands before each message: its length in bytes."""


@frozen(kw_only=True)
class Job:
    """The first command: what to train.

    Attributes:
      settings: the device is chosen by each process for itself.
      hf_checkpoint, resume: see `opening.open_updater`.
      scratch: directory, where the processes meet and new weights are handed over.
      seed: of torch, the same in all processes: an adapter begins with random numbers.
    """

    settings: TrainerSettings
    hf_checkpoint: Path
    resume: Path | None
    scratch: Path
    seed: int


@frozen
class Done:
    """Reply: the command was carried out.

    Attributes:
      value: of the command; from the first process only.
      n_phases: completed phases.
      weights: file with the weights of now, where the command changed them; from the first process only.
    """

    value: Any
    n_phases: int
    weights: Path | None = None


@frozen
class Failed:
    """Reply: it was not carried out, and model and optimizer are as before, or have to be given up by `give_up`.

    Attributes:
      kind: "config", "train", or "stopped" where the engine asked for it.
      message: what a user reads.
      n_phases: completed phases.
    """

    kind: str
    message: str
    n_phases: int
