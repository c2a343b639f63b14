"""Pipelines on mbarriers: copy the next tiles while computing on this one. Each file is made to be copied."""
