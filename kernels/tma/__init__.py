"""The TMA moves the bytes: 1-D bulk copies and 2-D tensor copies."""
