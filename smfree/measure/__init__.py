"""The pytest plugin: devices, the device timer, cache and clock control, records and tables."""
