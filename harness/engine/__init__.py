"""The child side, run under the engine's interpreter."""
