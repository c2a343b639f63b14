"""Fits and estimators over measured or modelled points. Imports neither kernels nor the emulator."""
