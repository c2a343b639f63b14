"""Saved runs: where they are filed, how two of them compare, how a comparison reads."""
