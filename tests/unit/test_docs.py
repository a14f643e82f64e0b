"""The pages that are written from the code say what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _generator():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["settings.md", "cli.md"])
def test_page_is_current(name):
    assert (ROOT / "docs" / name).read_text() == _generator().PAGES[name]().rstrip() + "\n", "run `make docs`"


def test_the_settings_that_may_differ_on_resume_are_named():
    from lightning_rl.trainer.resume import HARMLESS

    section = (ROOT / "docs" / "training.md").read_text().partition("## Stopping, resuming")[2]
    sentence = re.search(r"Only\s(.*?) may differ", section, re.DOTALL)
    assert sentence is not None
    named = {flag.replace("-", "_") for flag in re.findall(r"`--([a-z-]+)`", sentence[1])}
    assert named == HARMLESS | {"max_steps", "model"}  # these two under a condition of their own


def test_every_relative_link_in_the_docs_leads_somewhere():
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
