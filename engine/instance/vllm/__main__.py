"""`python -m engine.instance.vllm`: one rollout instance with vLLM; runs in vLLM's environment.

The work is in `serve`, run as the main module under its own name: processes that vLLM spawns import the main module
again, which ties them to this one's life, and Python leaves that out for modules called __main__.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("engine.instance.vllm.serve", run_name="__main__", alter_sys=True)
