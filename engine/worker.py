"""Added to vLLM's worker by `--worker-extension-cls`: mends two things that 0.32 gets wrong on a CPU.

Runs inside vLLM, and is the only file of ours that does. vLLM keeps a packed copy of the output matrix,
which its `reload_weights` renews only where that matrix has weights of its own: one that is tied to the
embedding would go on with the old ones. And with adapters switched on, a request for prompt logprobs that
shares a step with another request ends the engine.
"""

from __future__ import annotations

from typing import Any


class ReloadExtension:
    """Mixed into vLLM's worker class; its methods are called through /collective_rpc."""

    def lightning_can_reload(self) -> bool:
        """Whether this extension is there: a worker without it answers that it has no such attribute."""
        return True

    def lightning_reload(self, weights_path: str) -> int:
        """Reload all weights from a folder; gives the number of packed copies that were renewed."""
        worker: Any = self
        worker.reload_weights(weights_path=weights_path)
        return _repack(worker.get_model())

    def lightning_mend_prompt_logprobs(self) -> bool:
        """Let prompts be scored beside other requests; gives whether there was something to mend."""
        return _mend_prompt_logits()


def _repack(model: Any) -> int:
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return 0
    num_renewed = 0
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod) and hasattr(layer, "cpu_linear"):
            method.process_weights_after_loading(layer)
            num_renewed += 1
    return num_renewed


def _mend_prompt_logits() -> bool:
    """Skip the adapter's share of a prompt's logits.

    vLLM indexes it by the requests of the step, not by the prompt's positions: the shapes do not fit. The
    share is zero unless an adapter changes the output matrix itself; then scores would show it, and its
    probe fails.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    original = PunicaWrapperCPU.add_lora_logits
    if getattr(original, "is_mended", False):
        return False

    def add_lora_logits(self: Any, y: Any, x: Any, *stacked: Any, **more: Any) -> Any:
        num_rows = x.view(-1, x.shape[-1]).shape[0]
        if num_rows != self.sampler_indices.shape[0]:
            return None
        return original(self, y, x, *stacked, **more)

    add_lora_logits.is_mended = True  # type: ignore[attr-defined]
    PunicaWrapperCPU.add_lora_logits = add_lora_logits
    return True
