"""The module named by --worker-extension-cls. vLLM imports it in each of its workers before the model is built."""

from engine.instance.vllm.heads import support_every_size
from engine.instance.vllm.sampled_logprobs import report_unrestricted
from engine.instance.vllm.worker_extension import WorkerExtension

__all__ = ["WorkerExtension"]

support_every_size()
report_unrestricted()
