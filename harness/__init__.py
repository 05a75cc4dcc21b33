"""How it is tested: a pure core, thin shells, and `engine`, the only part that knows vLLM."""
