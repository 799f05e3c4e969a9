"""Checkpoint files of any kind: read safely, inspected, converted."""
