"""Commands of `kvmatrix`, a module each: `add` makes its parser, `run` does it."""
