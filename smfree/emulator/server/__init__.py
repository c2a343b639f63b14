"""One process serves an emulated node; the programs of its ranks are clients and share the devices."""
