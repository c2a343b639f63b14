"""Reductions between GPUs: AllReduce and ReduceScatter by ring, tree, directly, by the switch, by copies."""
