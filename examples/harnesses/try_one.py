"""Run an agent once on the first row against scripted answers, and show what the engine recorded of it.

    python examples/harnesses/try_one.py --answers examples/harnesses/answers/read_file.jsonl python openai_sdk.py

The agent gets what `relax-trio train` would give it. Standard library only; `relax-trio` must be in PATH.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARSERS = ["--agentic-tool-call-parser", "qwen25", "--agentic-reasoning-parser", "qwen3"]
CONTEXT_LEN = 400_000  # the prompts of the command-line harnesses are long for the demo's small vocabulary


def run_agent(words, base_url, session_id, directory):
    """Run the agent as relax_trio does. Returns its exit status and its output, None if it wrote none."""
    row = json.loads((HERE / "tasks.jsonl").read_text(encoding="utf-8").splitlines()[0])
    (directory / "input.json").write_text(json.dumps(row), encoding="utf-8")
    output = directory / "output.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RELAX_")} | {
        "RELAX_INPUT_JSON": str(directory / "input.json"),
        "RELAX_OUTPUT_JSON": str(output),
        "RELAX_SESSION_IO_DIR": str(directory),
        "RELAX_BASE_URL": base_url,
        "RELAX_SESSION_ID": session_id,
        "RELAX_ROLLOUT_MODE": "train",
        "RELAX_GROUP_ID": "S0",
        "HARNESS_CONTEXT_LEN": str(CONTEXT_LEN),
        "NO_PROXY": "127.0.0.1",
    }
    status = subprocess.run(words, cwd=HERE, env=environment, stdin=subprocess.DEVNULL).returncode
    return status, json.loads(output.read_text(encoding="utf-8")) if output.exists() else None


def show(forest):
    """One line for each turn or observation: number, parent, who says what."""
    for node in forest["nodes"]:
        print(f"node {node['id']} after {node['parent']}, {len(node['token_ids'])} tokens")
        for message in node["messages"]:
            said = message.get("content") or ""
            calls = [call["function"] for call in message.get("tool_calls") or []]
            print(f"  {message['role']}: {said[:200]!r}", *(f"{call['name']}({call['arguments']})" for call in calls))
    print(f"leaves {forest['leaves']}, exportable {forest['exportable_leaves']}, skipped {forest['skipped']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", required=True, type=Path, help="script of answers")
    parser.add_argument("--hf-checkpoint", default="demo", help="checkpoint whose tokenizer is used")
    parser.add_argument("--out", type=Path, help="directory for forest.json, output.json and the agent's files")
    parser.add_argument("agent", nargs=argparse.REMAINDER, help="command of the agent, run in this directory")
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="harness-"))
    out.mkdir(parents=True, exist_ok=True)
    server = subprocess.Popen(
        [
            *("relax-trio", "serve", "--hf-checkpoint", args.hf_checkpoint, "--answers", str(args.answers), *PARSERS),
            *("--rollout-max-context-len", str(CONTEXT_LEN), "--forest-out", str(out / "forest.json")),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        lines = [server.stdout.readline().strip().split("=", 1) for _ in range(2)]
        if [line[0] for line in lines] != ["RELAX_BASE_URL", "RELAX_SESSION_ID"]:
            sys.exit("relax-trio serve did not start")
        status, output = run_agent(args.agent, lines[0][1], lines[1][1], out)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
    show(json.loads((out / "forest.json").read_text(encoding="utf-8")))
    print(f"exit status {status}, output {output}, files in {out}")
    return status


if __name__ == "__main__":
    sys.exit(main())
