"""Between GPUs: symmetric memory, signals, and one AllGather over every way its bytes can go."""
