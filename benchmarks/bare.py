"""What a user would write, for comparison: MODEL_PATH, then the arguments of `LLM` as JSON."""

from __future__ import annotations

import json
import sys

if __name__ == "__main__":
    from vllm import LLM

    LLM(sys.argv[1], **json.loads(sys.argv[2]))
