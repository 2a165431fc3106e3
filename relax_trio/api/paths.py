"""Where the API is."""

from __future__ import annotations

from typing import Final

BASE_PATH: Final = "/agentic_api"
