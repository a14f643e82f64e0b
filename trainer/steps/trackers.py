"""Trackers of experiments (TensorBoard, W&B, trackio, ...) that transformers can log a run to.

Knows which there are and what they need; the trainer itself calls them (`report_to`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import SettingsError

_PACKAGES = {"comet_ml": "comet-ml", "azure_ml": "azureml-sdk", "flyte": "flytekit"}
"""Where the package is called otherwise."""


def require_trackers(names: Sequence[str]) -> None:
    """SettingsError, before anything is loaded, for a name that nobody knows or whose package is missing."""
    if not names:
        return
    from transformers.integrations import integration_utils

    known = integration_utils.INTEGRATION_TO_CALLBACK
    for name in names:
        if name not in known:
            raise SettingsError(f"report_to {name!r}: choose of {', '.join(sorted(known))}")
    missing = [n for n in names if n not in integration_utils.get_available_reporting_integrations()]
    if missing:
        package = _PACKAGES.get(missing[0], missing[0])
        raise SettingsError(f"report_to {missing[0]!r} needs its package: pip install {package}")
