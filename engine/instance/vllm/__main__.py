"""`python -m engine.instance.vllm`: runs one rollout instance with vLLM, in vLLM's environment.

It runs `serve` as the main module under its own name. Processes that vLLM spawns import the main module again, so that
they end with this one; Python skips that import for modules called __main__.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("engine.instance.vllm.serve", run_name="__main__", alter_sys=True)
