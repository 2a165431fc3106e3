"""Codex CLI (Responses, streamed). Needs `npm install -g @openai/codex`; standard library only."""

import os
import subprocess
import sys

from harness_task import CONTEXT_LEN, TIMEOUT_S, load_task, write_reward

CONFIG = f"""\
model = "policy"
model_provider = "relax"
model_context_window = {CONTEXT_LEN}
model_auto_compact_token_limit = {10 * CONTEXT_LEN}  # never: a summary would begin another conversation
approval_policy = "never"
sandbox_mode = "danger-full-access"
web_search = "disabled"
check_for_update_on_startup = false

[model_providers.relax]
name = "relax"
base_url = "{os.environ["RELAX_BASE_URL"]}/v1"
env_key = "RELAX_SESSION_ID"
wire_api = "responses"
stream_idle_timeout_ms = {TIMEOUT_S * 1000}  # Codex counts events; a held turn has none
request_max_retries = 0  # its retries carry no mark: each would be sampled anew
stream_max_retries = 0

[analytics]
enabled = false

[agents]
enabled = false  # a sub-agent would be a conversation of its own

[features]
apps = false
goals = false
plugins = false
shell_snapshot = false
unbounded_connection_retries = false
"""


def main():
    task = load_task()
    (task.home / "config.toml").write_text(CONFIG, encoding="utf-8")
    last = task.home / "last.txt"
    words = ["codex", "exec", "--skip-git-repo-check", "--cd", str(task.directory), "-o", str(last), "-"]
    environment = {**os.environ, "CODEX_HOME": str(task.home)}
    done = subprocess.run(words, input=task.prompt, env=environment, text=True)
    if done.returncode != 0:
        sys.exit(f"codex ended with status {done.returncode}")
    write_reward(task, last.read_text(encoding="utf-8") if last.exists() else "")


if __name__ == "__main__":
    main()
