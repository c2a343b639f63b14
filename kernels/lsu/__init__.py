"""Threads move the bytes: loads and stores through registers, and cp.async."""
