"""A tiny checkpoint with the demo's tokenizer and random weights: real files, no training."""

from __future__ import annotations

from pathlib import Path

import torch


def save_tiny_checkpoint(directory: Path) -> Path:
    """Write a Hugging Face directory whose model writes noise."""
    from attrs import evolve

    from relax_trio.demo.checkpoint import save_checkpoint
    from relax_trio.demo.recipe import DemoRecipe
    from relax_trio.demo.tokenizer import train_tokenizer
    from relax_trio.demo.warm_start import build_model

    numbers = evolve(DemoRecipe().warm_start, n_layers=2, hidden_len=64, intermediate_len=128)
    tokenizer = train_tokenizer(numbers.vocab_len)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_model(len(tokenizer), tokenizer, numbers)
    directory.mkdir(parents=True, exist_ok=True)
    save_checkpoint(model, tokenizer, directory)
    return directory
