"""Checkpoints: safe, elastic, never half-written."""
