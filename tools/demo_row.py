"""One row of the nightly's demo table: `python tools/demo_row.py RUN_DIR SEED SECONDS`."""

import json
import sys
from pathlib import Path


def main() -> None:
    run_dir, seed, seconds = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evals = [json.loads(line)["eval/held_out"] for line in (run_dir / "eval.jsonl").read_text().splitlines()]
    rewards = [step["rollout/raw_reward"] for step in steps]
    gap = max(step["train/rollout_logprob_abs_diff"] for step in steps)
    cells = [seed, f"{steps[0]['train/lr']:g}", f"{rewards[0]:.4f}", f"{rewards[-1]:.4f}"]
    cells += [f"{evals[0]:.3f}", f"{evals[-1]:.3f}", f"{gap:.1e}", seconds]
    print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
