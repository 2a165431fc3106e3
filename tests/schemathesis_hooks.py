"""What JSON Schema can't say of our requests, for schemathesis (SCHEMATHESIS_HOOKS names this module)."""

from __future__ import annotations

import schemathesis

USER = {"role": "user", "content": "go on"}


@schemathesis.hook
def before_call(context, case, kwargs):
    """What is asked for is not the assistant's last word: no schema names the last item of a list."""
    body = case.body if isinstance(case.body, dict) else {}
    for name in ("messages", "input"):
        if isinstance(body.get(name), list):
            body[name].append(USER)
