"""Loads the plugin for a bare checkout. Where smfree is installed, its entry point has the same name and
nothing is loaded twice. pytester is for tests/measure; pytest wants it named here."""

pytest_plugins = ["smfree.measure.plugin", "pytester"]
