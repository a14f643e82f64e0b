"""What `lightning engine serve` adds to vLLM's worker (`--worker-extension-cls`): a reload that is complete.

Runs inside vLLM, and is the only file of ours that does. On a CPU vLLM keeps a packed copy of the output
matrix. Its `reload_weights` (0.32) renews that copy only where the matrix has weights of its own: one that
is tied to the embedding would go on with the packed copy of the old ones.
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
