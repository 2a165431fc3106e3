"""Engines that turn a token prefix into more tokens, behind one Protocol."""
