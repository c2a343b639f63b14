"""Reference data-movement kernels, made to be copied. Run from the checkout; not installed."""
