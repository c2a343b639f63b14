"""An emulated GPU that executes PTX."""
