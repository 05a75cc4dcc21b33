"""Loads the plugin."""

pytest_plugins = ["harness.plugin"]
