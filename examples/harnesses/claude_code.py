"""Claude Code CLI (Messages, streamed). Needs `npm install -g @anthropic-ai/claude-code`; standard library only."""

import json
import os
import subprocess
import sys

from harness_task import CONTEXT_LEN, TIMEOUT_S, load_task, write_reward

TOOLS = "Bash,Edit,Read,Write"  # without the tools that start sub-agents: each of those is a conversation of its own


def settings(task):
    """The environment of the CLI, besides what it inherits."""
    return {
        "ANTHROPIC_BASE_URL": os.environ["RELAX_BASE_URL"],
        "ANTHROPIC_API_KEY": os.environ["RELAX_SESSION_ID"],
        "ANTHROPIC_MODEL": "policy",
        "CLAUDE_CONFIG_DIR": str(task.home),
        # No telemetry, no updates, no titles: nothing but the conversation.
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # A held turn is no failure. A retry of the CLI's own carries no mark: it would be sampled anew.
        "API_TIMEOUT_MS": str(TIMEOUT_S * 1000),
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(TIMEOUT_S * 1000),
        "CLAUDE_CODE_MAX_RETRIES": "0",
        "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
        # A full context ends the agent; a summary would begin another conversation.
        "DISABLE_COMPACT": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT_LEN),
    }


def main():
    task = load_task()
    words = ["claude", "-p", "--output-format", "json", "--no-session-persistence", "--strict-mcp-config"]
    words += ["--tools", TOOLS, "--allowedTools", TOOLS]
    done = subprocess.run(
        words,
        input=task.prompt,
        cwd=task.directory,
        env={**os.environ, **settings(task)},
        stdout=subprocess.PIPE,
        text=True,
    )
    print(done.stdout)
    if done.returncode != 0:
        sys.exit(f"claude ended with status {done.returncode}")
    write_reward(task, json.loads(done.stdout)["result"])


if __name__ == "__main__":
    main()
