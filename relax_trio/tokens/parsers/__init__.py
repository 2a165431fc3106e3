"""Parsers of generated text: reasoning and tool calls, by the names SGLang gives them."""
