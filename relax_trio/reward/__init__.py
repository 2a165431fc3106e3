"""Rewards from agents and hooks, and the credit that training gets from them."""
