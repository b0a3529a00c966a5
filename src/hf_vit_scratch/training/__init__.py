"""Flags, recipes and the trainer."""
