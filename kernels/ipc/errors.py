"""Errors of groups of ranks. Each message states the rule, the value that broke it and the remedy."""

from __future__ import annotations


class GroupError(ValueError):
    """Ranks that cannot work together, or did not call the same things in the same order."""


class PoolError(GroupError):
    """Memory of a pool that there is not, or is no longer, or belongs to another group."""
