"""Added to vLLM's worker by `--worker-extension-cls`: mends three things that 0.32 gets wrong on a CPU.

Runs inside vLLM, and is the only file of ours that does. vLLM keeps a packed copy of the output matrix,
which its `reload_weights` renews only where that matrix has weights of its own: one that is tied to the
embedding would go on with the old ones. With adapters switched on, a request for prompt logprobs that shares
a step with another request ends the engine; and a request to the base model that shares a step with one to
an adapter is computed with the adapter in the last slot.
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
        """Let prompts be scored, and the base model be asked, beside requests to adapters; gives whether
        there was something to mend."""
        return any([_mend_prompt_logits(), mend_rows_without_adapter()])


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


def mend_rows_without_adapter() -> bool:
    """Nothing is added to the rows that are the base model's.

    vLLM marks them with the index -1, and reads that as the last adapter of its stack. Rows that come out of
    the first matrix as zeros stay zeros in the second.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    original = lora_ops.bgmv_shrink
    if getattr(original, "is_mended", False):
        return False

    def bgmv_shrink(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        original(inputs, weights, output, indices, scaling)
        output[: indices.shape[0]].masked_fill_((indices < 0).unsqueeze(-1), 0)

    bgmv_shrink.is_mended = True  # type: ignore[attr-defined]
    lora_ops.bgmv_shrink = bgmv_shrink
    punica_cpu.bgmv_shrink = bgmv_shrink
    return True
