"""`make bench-trainer`, its smallest case, in this process: every way, the table, the page, the last line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "trainer"

pytestmark = pytest.mark.slow


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    names = ("run", "ways", "figures", "subject", "recorded")
    taken = [name for name in names if name in sys.modules]
    assert not taken, f"another bench has these module names: {taken}"
    import run
    import ways

    yield run, ways
    for name in names:
        sys.modules.pop(name, None)


def test_all_ways_do_the_same_step_and_their_figures_reach_page_and_last_line(
    bench, tmp_path, monkeypatch, capsys
):
    run, ways = bench
    page = tmp_path / "performance.md"
    marks = [
        f"<!-- bench-trainer {device} {edge} -->" for device in ("cpu", "cuda") for edge in ("begins", "ends")
    ]
    page.write_text("\n".join(["before", marks[0], "old", marks[1], "between", *marks[2:], "after", ""]))
    monkeypatch.setattr(run, "PAGE", page)
    run.main(["--cases", "smallest", "--write"], ask=lambda *arguments: ways.main(arguments))
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(last) == [
        "speedup_2",
        "speedup_8",
        "speedup_16",
        "tree_over_merged_shared_prompt",
        "peak_mem_ratio_8",
        "max_rel_grad_diff",
    ]
    assert 0 < last["max_rel_grad_diff"] <= 1e-4
    written = page.read_text()
    assert "old" not in written
    assert written.startswith("before\n")
    assert written.endswith("after\n")
    rows = [line for line in written.splitlines() if line.startswith("| smallest")]
    assert [row.split("|")[2].strip() for row in rows] == ["stock", "padded", "merged", "tree", "chosen"]


def test_the_page_in_docs_has_a_place_for_both_devices():
    text = (BENCH.parents[1] / "docs" / "performance.md").read_text()
    for device in ("cpu", "cuda"):
        for edge in ("begins", "ends"):
            assert text.count(f"<!-- bench-trainer {device} {edge} -->\n") == 1


def test_a_gpu_that_is_not_there_is_said(bench, monkeypatch):
    run, ways = bench
    monkeypatch.setattr(ways.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees no GPU here"):
        run.main(["--device", "cuda"])


def test_mfu_is_by_trls_formula_on_unique_tokens(bench, monkeypatch):
    _, ways = bench
    case = ways.CASES["smallest"](64)
    config = ways.new_model("cpu", "sdpa").config
    monkeypatch.setattr(ways.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    # per layer: q, k, v: 2 * 256 * (256 + 2 * 128); o: 2 * 256 * 256; scores: 4 * 256 * length; the MLP:
    # 2 * 3 * 256 * 768; then the head; times three for forward and backward
    lengths = [59, 159, 59, 159, 59, 159]
    layer = 2 * 256 * 512 + 2 * 256 * 256 + 4 * 256 * (sum(lengths) // 6) + 6 * 256 * 768
    flops = 3 * (6 * layer + 2 * 8192 * 256)
    unique = 20 + 3 * (39 + 61 + 39)
    assert ways.unique_tokens(case) == unique
    assert ways.mfu(config, case, 0.5) == pytest.approx(100 * flops * unique / 0.5 / 989e12)
    monkeypatch.setattr(ways.torch.cuda, "get_device_name", lambda: "something new")
    assert ways.mfu(config, case, 0.5) is None
