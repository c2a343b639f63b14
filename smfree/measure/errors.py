"""Errors of the measuring side: rule, value, remedy."""

from __future__ import annotations


class MeasureError(Exception):
    """A measurement that would be wrong, refused before it becomes a number."""
