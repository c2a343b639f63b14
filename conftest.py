"""Loads the plugin for a bare checkout. Where smfree is installed, its entry point has the same name and
nothing is
loaded twice."""

pytest_plugins = ["smfree.measure.plugin"]
